"""What evidence costs: `adapt` with its default validation beside `adapt` without, as a ratio measured in one run."""

from __future__ import annotations

import fewshift
from core import fastest, network, show, support

MANY, SIZE = 35, 128


def main() -> None:
    model, labelled = network("resnet18"), support(MANY, size=SIZE)
    found = fastest(
        2,
        judged=lambda: fewshift.adapt(model, labelled),
        unjudged=lambda: fewshift.adapt(model, labelled, validate=None),
    )
    show("adapt, cross-validated / adapt with validate=None", found["judged"] / found["unjudged"], "<= 8")


if __name__ == "__main__":
    main()

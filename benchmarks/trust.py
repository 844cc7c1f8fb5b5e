"""What evidence costs: the time of a default `adapt` over that of LCCS without evidence, measured in one run."""

from __future__ import annotations

import fewshift
from core import fastest, network, show, support

MANY, SIZE = 35, 128


def main() -> None:
    model, labelled = network("resnet18"), support(MANY, size=SIZE)
    seconds = fastest(
        2,
        judged=lambda: fewshift.adapt(model, labelled),
        unjudged=lambda: fewshift.adapt(model, labelled, method="lccs", validate=None),
    )
    ratio = seconds["judged"] / seconds["unjudged"]
    show("adapt, cross-validated / adapt by lccs with validate=None", ratio, "<= 8")


if __name__ == "__main__":
    main()

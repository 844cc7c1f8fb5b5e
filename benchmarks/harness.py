"""The time of the harness over the time of `adapt` and a plain evaluation loop, measured in one run."""

from __future__ import annotations

import argparse
import tempfile

import torch

import fewshift
from core import fastest, show
from fewshift.core.draws import draw_support
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.materials import open_materials
from fewshift.lab.bench.run import AT_ONCE, split
from fewshift.lab.bench.sweep import sweep
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.copies import load_domain

CELLS = [Cell("digits", "mnist", "uci", "lccs", {"epochs": 5}, shots=5, seed=seed) for seed in range(2)]


def harness() -> None:
    """Load networks and images, write records."""
    with tempfile.TemporaryDirectory() as folder:
        sweep(CELLS, folder, open_materials, (None, None), workers=1, tell=lambda record: None)


def by_hand() -> None:
    """Compute the same numbers and drop them."""
    network, domain = digits.source_network(), load_domain("digits", "uci")
    for cell in CELLS:
        _, test = split(domain, cell)
        drawn = draw_support(domain.labels, cell.shots, cell.seed)
        support = domain.images(drawn), domain.labels[drawn]
        adapted = fewshift.adapt(network, support, method=fewshift.LCCS(epochs=5), validate=None, seed=cell.seed).model
        with torch.no_grad():
            right = [
                (adapted(domain.images(batch)).argmax(1) == domain.labels[batch]).sum() for batch in test.split(AT_ONCE)
            ]
        float(torch.stack(right).sum() / len(test))


def main(rounds: int) -> None:
    seconds = fastest(rounds, harness=harness, by_hand=by_hand)
    show(
        "two cells by the harness / adapt and a plain evaluation loop",
        seconds["harness"] / seconds["by_hand"],
        "<= 1.05",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="the fastest of so many counts")
    main(parser.parse_args().rounds)

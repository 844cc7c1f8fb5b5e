"""What a temperature fitted on held-out support images does on other images of the place: the digits, both ways.

Every adaptation is judged on images that are not in its support, as it is handed over and with the temperature undone.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift import LCCS, METHODS, Method, adapt
from fewshift.core.metrics import calibration_error
from fewshift.core.support import Support, draw_support, others
from fewshift.lab.datasets import digits

SHOTS = (2, 5)
MOST = 10  # shots that no test image is among
WAYS = (("mnist", "uci"), ("uci", "mnist"))
ADAPTED: dict[str, Method] = {
    **{name: METHODS[name]() for name in ("finetune-head", "l2", "lp-ft", "flute")},
    "lccs, nearest centroids": LCCS(classifier="ncc", epochs=2),
}


class Case(NamedTuple):
    """One adaptation: what its probabilities are off by, and its cross-entropy, before and after the temperature."""

    applied: bool
    errors: tuple[float, float]
    losses: tuple[float, float]


def main(draws: int) -> None:
    print(f"{'':28}{'applied':>10}{'ECE, points':>18}{'cross-entropy':>18}{'it fell in':>12}")
    everything = []
    for name, method in ADAPTED.items():
        found = [case(method, *way, k, draw) for way in WAYS for k in SHOTS for draw in range(draws)]
        show(name, found)
        everything += found
    show("all", everything)


@torch.no_grad()
def case(method: Method, source: str, target: str, k: int, draw: int) -> Case:
    pictures, labels = digits.PLACES[target].read()
    images = digits.normalise(pictures)
    chosen, rest = draw_support(labels, k, draw), others(draw_support(labels, MOST, draw), len(labels))
    with torch.enable_grad():
        support = Support(images[chosen], labels[chosen])
        result = adapt(digits.source_network(source), support, method=method, accept="always", seed=draw)
    logits = torch.cat([result.model(part) for part in images[rest].split(256)]).double()
    both = (logits * result.notes.get("temperature", 1.0), logits)
    return Case("temperature" in result.notes, pair(both, labels[rest]), losses(both, labels[rest]))


def pair(both: tuple[Tensor, Tensor], labels: Tensor) -> tuple[float, float]:
    before, after = (calibration_error(it.softmax(1), labels) for it in both)
    return before, after


def losses(both: tuple[Tensor, Tensor], labels: Tensor) -> tuple[float, float]:
    before, after = (float(F.cross_entropy(it, labels)) for it in both)
    return before, after


def show(name: str, cases: list[Case]) -> None:
    used = [it for it in cases if it.applied]
    counted = f"{len(used)} of {len(cases)}"
    if not used:
        print(f"{name:28}{counted:>10}", flush=True)
        return
    errors = [100 * fmean(column) for column in zip(*(it.errors for it in used), strict=True)]
    costs = [fmean(column) for column in zip(*(it.losses for it in used), strict=True)]
    fell = sum(it.losses[1] < it.losses[0] for it in used)
    told = (f"{errors[0]:.1f} -> {errors[1]:.1f}", f"{costs[0]:.2f} -> {costs[1]:.2f}", f"{fell}")
    print(f"{name:28}{counted:>10}{told[0]:>18}{told[1]:>18}{told[2]:>12}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=4)
    torch.set_num_threads(1)
    main(parser.parse_args().draws)

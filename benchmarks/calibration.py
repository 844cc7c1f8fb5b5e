"""What a temperature fitted to held-out support images does for other images of the place: the digits, both ways.

Each adaptation is judged on images outside its support, once as it is handed over and once without the temperature.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift import LCCS, METHODS, Method, adapt
from fewshift.core.draws import draw_support, others
from fewshift.core.metrics import calibration_error
from fewshift.core.support import Support
from fewshift.lab.datasets import digits

SHOTS = (2, 5)
MOST = 10  # shots that no test image is among
WAYS = (("mnist", "uci"), ("uci", "mnist"))
ADAPTED: dict[str, Method] = {
    **{name: METHODS[name]() for name in ("finetune-head", "l2", "lp-ft", "flute")},
    "lccs, nearest centroids": LCCS(classifier="ncc", epochs=2),
}


class Case(NamedTuple):
    """One adaptation: its calibration error and its cross-entropy, without the temperature and with it."""

    applied: bool
    errors: tuple[float, float]
    losses: tuple[float, float]


def main(draws: int) -> None:
    print(f"{'':28}{'applied':>10}{'ECE, points':>18}{'cross-entropy':>18}{'fell in':>12}")
    everything = []
    for name, method in ADAPTED.items():
        cases = [judge(method, *way, k, draw) for way in WAYS for k in SHOTS for draw in range(draws)]
        show(name, cases)
        everything += cases
    show("all", everything)


@torch.no_grad()
def judge(method: Method, source: str, target: str, k: int, draw: int) -> Case:
    pictures, labels = digits.PLACES[target].read()
    images = digits.normalise(pictures)
    chosen, rest = draw_support(labels, k, draw), others(draw_support(labels, MOST, draw), len(labels))
    with torch.enable_grad():
        support = Support(images[chosen], labels[chosen])
        result = adapt(digits.source_network(source), support, method=method, accept="always", seed=draw)
    logits = torch.cat([result.model(part) for part in images[rest].split(256)]).double()
    both = (logits * result.notes.get("temperature", 1.0), logits)
    return Case("temperature" in result.notes, errors(both, labels[rest]), losses(both, labels[rest]))


def errors(both: tuple[Tensor, Tensor], labels: Tensor) -> tuple[float, float]:
    before, after = (calibration_error(logits.softmax(1), labels) for logits in both)
    return before, after


def losses(both: tuple[Tensor, Tensor], labels: Tensor) -> tuple[float, float]:
    before, after = (float(F.cross_entropy(logits, labels)) for logits in both)
    return before, after


def show(name: str, cases: list[Case]) -> None:
    used = [case for case in cases if case.applied]
    counted = f"{len(used)} of {len(cases)}"
    if not used:
        print(f"{name:28}{counted:>10}", flush=True)
        return
    off = [100 * fmean(column) for column in zip(*(case.errors for case in used), strict=True)]
    costs = [fmean(column) for column in zip(*(case.losses for case in used), strict=True)]
    fell = sum(case.losses[1] < case.losses[0] for case in used)
    cells = (f"{off[0]:.1f} -> {off[1]:.1f}", f"{costs[0]:.2f} -> {costs[1]:.2f}", f"{fell}")
    print(f"{name:28}{counted:>10}{cells[0]:>18}{cells[1]:>18}{cells[2]:>12}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=4)
    torch.set_num_threads(1)
    main(parser.parse_args().draws)

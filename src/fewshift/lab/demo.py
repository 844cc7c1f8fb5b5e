"""The demonstration: a network trained on MNIST is adapted to handwritten digits scanned from Turkish forms."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewshift.api import adapt
from fewshift.core import _progress as progress
from fewshift.core.draws import draw_support, others
from fewshift.core.method import Method, Needs
from fewshift.core.network import logits_of
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.lab.datasets import digits
from fewshift.methods.catalog import METHODS
from fewshift.methods.tent import Tent
from fewshift.report.results import Adaptation
from fewshift.trust.choice import fit_chosen

SHOTS = (1, 5, 10)
BATCH = 128
CLASSES = tuple(map(str, range(10)))


@dataclass(frozen=True)
class DemoRow:
    """One line of the table: a method at k shots, and its accuracy in percent for every draw of the support."""

    method: str
    shots: int | None
    accuracies: tuple[float, ...]
    settings: str = ""  # where they are not the method's own

    @property
    def mean(self) -> float:
        """Over the draws."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """Population standard deviation over the draws."""
        return statistics.pstdev(self.accuracies)


@dataclass(frozen=True)
class Demo:
    """What the demonstration found, with the pictures of both domains."""

    rows: tuple[DemoRow, ...]
    draws: int
    source_accuracy: float  # percent, on held-out images of the source domain
    source_images: Tensor  # (n, 1, 28, 28) in [0, 1]
    target_images: Tensor
    test_images: int
    example: Adaptation  # auto at k = 5, first draw
    seconds: float


@dataclass(frozen=True)
class Plan:
    """One line to be measured."""

    method: Method
    shots: int | None = None
    settings: str = ""


AT_EVERY_K = ("adabn", "lccs", "auto")
FEW_SHOT = [name for name, method in METHODS.items() if method.needs is Needs.SUPPORT and name not in AT_EVERY_K]
PLAN = (
    Plan(METHODS["source"]()),
    Plan(METHODS["testtime-bn"]()),
    *(Plan(METHODS["adabn"](), shots) for shots in SHOTS),
    *(Plan(METHODS[name](), 5) for name in FEW_SHOT),
    *(Plan(METHODS[name](), shots) for name in ("lccs", "auto") for shots in SHOTS),
)
# what --all adds; where a method's own settings would take an hour, fewer steps, and the table says so
MORE = (
    Plan(METHODS["alpha-bn"]()),
    Plan(Tent()),
    Plan(Tent(optimizer="sgd"), settings="optimizer=sgd"),
    *(
        Plan(METHODS[name](**settings), settings=", ".join(f"{key}={value}" for key, value in settings.items()))
        for name, settings in {"shot": {}, "sfda": {"steps": 500}, "sdda": {"epochs": 20, "start_epoch": 10}}.items()
    ),
)


def run(draws: int = 3, plan: Sequence[Plan] = PLAN) -> Demo:
    """Adapt the shipped network to UCI digits, `draws` times; every row is judged on the same images.

    The images of the largest support are left out of the evaluation of every row of that draw.
    """
    began = time.perf_counter()
    network = digits.source_network()
    pictures, labels = digits.uci()
    images = digits.normalise(pictures)
    _, (held_pictures, held_labels) = digits.split("mnist")

    accuracies: dict[Plan, list[float]] = {line: [] for line in plan}
    example: Adaptation | None = None
    for draw, line in progress.track([(draw, line) for draw in range(draws) for line in plan], "methods"):
        test = others(draw_support(labels, max(SHOTS), draw), len(labels))
        order = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(draw))]
        chosen = draw_support(labels, line.shots or 1, draw)
        support = Support(images[chosen], labels[chosen], CLASSES)
        unlabelled = Unlabelled(images[order]) if line.method.needs is Needs.UNLABELLED else None
        predictor = fit_chosen(network, Target(support, unlabelled), line.method, draw)[0].predictor
        accuracies[line].append(accuracy(predictor, images[order], labels[order]))
        if example is None and line.method.name == "auto" and line.shots == 5:
            example = adapt(network, support, seed=draw)
    assert example is not None  # every plan has this line
    return Demo(
        rows=tuple(
            DemoRow(line.method.name, line.shots, tuple(values), line.settings) for line, values in accuracies.items()
        ),
        draws=draws,
        source_accuracy=accuracy(network, digits.normalise(held_pictures), held_labels),
        source_images=held_pictures[:20],
        target_images=pictures[:20],
        test_images=len(order),
        example=example,
        seconds=time.perf_counter() - began,
    )


@torch.no_grad()
def accuracy(predictor: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent right, in batches of 128 in the order given."""
    predicted = torch.cat([logits_of(predictor(batch)).argmax(1) for batch in images.split(BATCH)])
    return 100 * float((predicted == labels).double().mean())

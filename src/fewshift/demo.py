"""The demonstration: a network trained on MNIST meets handwritten digits scanned from Turkish forms."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewshift import progress
from fewshift.adaptation import Adaptation, adapt
from fewshift.data import digits
from fewshift.methods import METHODS
from fewshift.network import logits_of
from fewshift.target import Support, Target, draw_support, others

SHOTS = (1, 5, 10)
BATCH = 128
CLASSES = tuple(map(str, range(10)))


@dataclass(frozen=True)
class Row:
    """One line of the table: a method at k shots, and its accuracy in percent for every draw of the support."""

    method: str
    shots: int | None
    accuracies: tuple[float, ...]

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

    rows: tuple[Row, ...]
    draws: int
    source_accuracy: float  # percent, on held-out images of the source domain
    source_images: Tensor  # (n, 1, 28, 28) in [0, 1]
    target_images: Tensor
    test_images: int
    example: Adaptation  # LCCS at k = 5, first draw
    seconds: float


def run(draws: int = 5) -> Demo:
    """Adapt the shipped network to UCI digits, `draws` times; every row is judged on the same images.

    The images of the largest support are left out of the evaluation of every row of that draw.
    """
    began = time.perf_counter()
    network = digits.source_network()
    pictures, labels = digits.uci()
    images = digits.normalise(pictures)
    _, (held_pictures, held_labels) = digits.mnist_split()

    found: dict[tuple[str, int | None], list[float]] = {}
    example: Adaptation | None = None
    for draw in progress.track(range(draws), "draws"):
        test = others(draw_support(labels, max(SHOTS), draw), len(labels))
        order = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(draw))]

        def score(name: str, shots: int | None, predictor: nn.Module, order: Tensor = order) -> None:
            right = accuracy(predictor, images[order], labels[order])
            found.setdefault((name, shots), []).append(right)

        for name, shots in PLAN:
            chosen = draw_support(labels, shots or 1, draw)
            support = Support(images[chosen], labels[chosen], CLASSES)
            if name == "lccs" and shots == 5 and example is None:
                example = adapt(network, support, seed=draw)
            score(name, shots, METHODS[name]().adapt(network, Target(support), draw))
    assert example is not None
    return Demo(
        rows=tuple(Row(name, shots, tuple(values)) for (name, shots), values in found.items()),
        draws=draws,
        source_accuracy=accuracy(network, digits.normalise(held_pictures), held_labels),
        source_images=held_pictures[:20],
        target_images=pictures[:20],
        test_images=len(order),
        example=example,
        seconds=time.perf_counter() - began,
    )


PLAN: Sequence[tuple[str, int | None]] = [
    ("source", None),
    ("testtime-bn", None),
    *(("adabn", shots) for shots in SHOTS),
    *(("lccs", shots) for shots in SHOTS),
]


@torch.no_grad()
def accuracy(predictor: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent right, in batches of 128 in the order given."""
    predicted = torch.cat([logits_of(predictor(batch)).argmax(1) for batch in images.split(BATCH)])
    return 100 * float((predicted == labels).double().mean())

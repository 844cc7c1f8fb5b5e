"""Conditions: the order, the class mix and the batch size of test images. A condition is a permutation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewshift.core.randomness import checked_seed
from fewshift.errors import FewshiftError

ORDERS = ("shuffled", "sequential")


@dataclass(frozen=True)
class Condition:
    """How a test set becomes a stream.

    - order: "shuffled", or "sequential" = all of the first class, then all of the second, ...
    - alpha: the ratio of the largest to the smallest class of a long-tailed mix; None keeps every image.
    - batch_size: how many images come at a time; the last batch may be smaller.
    """

    order: str = "shuffled"
    alpha: float | None = None
    batch_size: int = 128

    def __post_init__(self) -> None:
        if self.alpha is not None:
            object.__setattr__(self, "alpha", float(self.alpha))  # 10 and 10.0 are one condition
        if self.order not in ORDERS:
            raise FewshiftError(f"order={self.order!r} is unknown: choose one of {', '.join(ORDERS)}")
        if self.alpha is not None and not self.alpha >= 1:
            raise FewshiftError(
                f"alpha={self.alpha} must be the ratio of the largest to the smallest class: give 1 or more"
            )
        if self.batch_size < 1:
            raise FewshiftError(f"batch_size={self.batch_size} is too small: give at least 1")

    def indices(self, labels: Tensor, seed: int, classes: int | None = None) -> Tensor:
        """The images of the stream, in order; the same for every method with the same seed."""
        generator = torch.Generator().manual_seed(checked_seed(seed))
        order = torch.randperm(len(labels), generator=generator)
        if self.alpha is not None:
            order = order[_kept(labels[order], long_tail(labels, self.alpha, classes))]
        return order[labels[order].argsort(stable=True)] if self.order == "sequential" else order


def long_tail(labels: Tensor, alpha: float, classes: int | None = None) -> list[int]:
    """How many images of each class a long-tailed mix keeps.

    Class i of K (in their natural order) keeps floor(n / K * alpha^(-i / (K - 1))) of its images, or all that it has:
    the recipe of Cao et al. (2019), which supposes balanced classes, capped where they are not.
    """
    available = labels.bincount(minlength=classes or 0).tolist()
    largest, last = len(labels) / len(available), max(1, len(available) - 1)
    return [min(has, math.floor(largest * alpha ** (-i / last))) for i, has in enumerate(available)]


def _kept(labels: Tensor, counts: list[int]) -> Tensor:
    """A mask that keeps the first `counts` images of each class."""
    keep = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(counts):
        keep[(labels == label).nonzero().flatten()[:count]] = True
    return keep

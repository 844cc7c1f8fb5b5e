"""A gain: how much more of the target is right after adaptation, with an interval that says how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from scipy.special import ndtri  # type: ignore[import-untyped]
from torch import Tensor

LEVEL = 0.90  # of intervals


@dataclass(frozen=True)
class Gain:
    """The gain on held-out images, in points of accuracy."""

    point: float
    low: float
    high: float
    images: int
    wins: int  # predictions that became right
    losses: int  # predictions that became wrong
    predictions: int
    before: float  # accuracy of the source network on the same images
    after: float
    per_class: Mapping[int, tuple[int, float, float]]  # class -> images, before, after
    interval: str  # how it was computed
    loss_change: float  # of the cross-entropy, each network under its best temperature; negative is better
    loss_error: float  # its standard error
    weak: bool = False

    @property
    def nats(self) -> float:
        """The log of how many times likelier the labels of the held-out images became, together."""
        return -self.images * self.loss_change


def gain_from(
    images: Tensor,
    before: Tensor,
    after: Tensor,
    loss: Tensor,
    per_class: Mapping[int, tuple[int, float, float]] | None = None,
    *,
    folds: Tensor | None = None,
    weak: bool = False,
) -> Gain:
    """From predictions: which image, the share of it that was right before and is after, the change of its loss.

    `folds` says which network answered.
    """
    change = by_image(images, after - before)
    loss_change = by_image(images, loss)
    low, high = paired_interval(change, between=_between(images, folds, after - before))
    return Gain(
        point=100 * float(change.mean()),
        low=100 * low,
        high=100 * high,
        images=len(change),
        wins=int((after > before).sum()),
        losses=int((after < before).sum()),
        predictions=len(images),
        before=100 * float(by_image(images, before).mean()),
        after=100 * float(by_image(images, after).mean()),
        per_class=per_class or {},
        interval="paired by image, normal after Agresti and Min; as wide as networks differ, if that is wider",
        loss_change=float(loss_change.mean()),
        loss_error=standard_error(loss_change),
        weak=weak,
    )


def paired_interval(change: Tensor, level: float = LEVEL, between: float = 0.0) -> tuple[float, float]:
    """An interval for the mean of paired differences in [-1, 1], one for each image.

    Agresti and Min (2005): add half a win, half a loss and one tie, then take the normal interval. With few or no
    changes the plain one would be too short. `between` is the squared error that the networks of different folds show:
    images tell of the chance in images, networks also of the chance in the draw that they were fitted to.
    """
    total = len(change) + 2
    mean = float(change.sum()) / total
    variance = (float(change.square().sum()) + 1) / total - mean**2
    half = float(ndtri((1 + level) / 2)) * math.sqrt(max(variance / total, between))
    return max(-1.0, mean - half), min(1.0, mean + half)


def _between(images: Tensor, folds: Tensor | None, change: Tensor) -> float:
    """The squared error of the mean over folds; 0 where a fold is one image, or an image is in several."""
    if folds is None or len(images.unique()) < len(images) or not 1 < len(folds.unique()) < len(images):
        return 0.0
    means = by_image(folds, change)
    return float(means.var()) / len(means)


def standard_error(values: Tensor) -> float:
    """Of the mean; infinite for a single value."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf


def by_image(images: Tensor, values: Tensor) -> Tensor:
    """The mean value of every image."""
    which, inverse = images.unique(return_inverse=True)
    sums = torch.zeros(len(which), dtype=torch.float64).index_add_(0, inverse, values.double())
    means: Tensor = sums / inverse.bincount(minlength=len(which))
    return means

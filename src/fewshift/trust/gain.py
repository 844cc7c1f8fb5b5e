"""A gain: how much more of the target is right after adaptation, with an interval that says how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from scipy.special import ndtri  # type: ignore[import-untyped]
from torch import Tensor

LEVEL = 0.90  # of intervals
ADDED, CHANGED = 2, 0.25  # images that an interval adds to those it has, and the share of them whose answer changes


@dataclass(frozen=True)
class Gain:
    """The gain on held-out images, in points of accuracy."""

    point: float  # the mean over classes, where images have labels
    low: float
    high: float
    images: int
    wins: int  # predictions that became right
    losses: int  # predictions that became wrong
    predictions: int
    before: float  # percent right before, averaged like `point`
    after: float
    over_images: float  # the mean over images: the same where all classes have as many
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
    *,
    labels: Tensor | None = None,
    folds: Tensor | None = None,
    weak: bool = False,
) -> Gain:
    """From predictions: which image, the share of it that was right before and is after, the change of its loss.

    With `labels` every class has the same weight, however many images it has. `folds` says which network answered.
    """
    weights = _weights(images, labels)
    changes, source, adapted, losses = (by_image(images, values) for values in (after - before, before, after, loss))
    low, high = paired_interval(changes, between=_between(images, folds, after - before), weights=weights)
    point, plain, first, last, loss_change = (
        float(mean)
        for mean in (weights @ changes, changes.mean(), weights @ source, weights @ adapted, weights @ losses)
    )
    return Gain(
        point=100 * point,
        low=100 * low,
        high=100 * high,
        images=len(changes),
        wins=int((after > before).sum()),
        losses=int((after < before).sum()),
        predictions=len(images),
        before=100 * first,
        after=100 * last,
        over_images=100 * plain,
        per_class={} if labels is None else _per_class(images, labels, before, after),
        interval="paired by image, normal after Agresti and Min; as wide as networks differ, if that is wider",
        loss_change=loss_change,
        loss_error=standard_error(losses, weights),
        weak=weak,
    )


def _weights(images: Tensor, labels: Tensor | None) -> Tensor:
    """(images,): what each image counts; the sum is 1."""
    which, inverse = images.unique(return_inverse=True)
    if labels is None:
        return torch.full((len(which),), 1 / len(which), dtype=torch.float64)
    of_image = labels.new_empty(len(which)).index_copy_(0, inverse, labels)
    _, of_class, counts = of_image.unique(return_inverse=True, return_counts=True)
    shares: Tensor = 1 / (len(counts) * counts[of_class].double())
    return shares


def _per_class(images: Tensor, labels: Tensor, before: Tensor, after: Tensor) -> dict[int, tuple[int, float, float]]:
    """For each class: its images, and the percentages of its predictions that were and are right."""
    rows = {label: labels == label for label in labels.unique().tolist()}
    return {
        label: (len(images[mine].unique()), 100 * float(before[mine].mean()), 100 * float(after[mine].mean()))
        for label, mine in rows.items()
    }


def paired_interval(
    change: Tensor, level: float = LEVEL, between: float = 0.0, weights: Tensor | None = None
) -> tuple[float, float]:
    """An interval for the mean of paired differences in [-1, 1], one for each image.

    As Agresti and Min (2005), add two images and take the normal interval: with few or no changes the plain one would
    be too short. Theirs are half a win, half a loss and a tie; here a quarter, a quarter and one and a half, as most
    answers stay. Weighted images count as many as equally weighted ones with the same
    variance (Kish). `between` is the squared error that the networks of different folds show: images tell of the chance
    in images, networks also of the chance in the draw that they were fitted to.
    """
    shares = torch.full((len(change),), 1 / len(change), dtype=torch.float64) if weights is None else weights
    count = 1 / float(shares.square().sum())
    total = count + ADDED
    mean = count * float(shares @ change.double()) / total
    variance = (count * float(shares @ change.double().square()) + ADDED * CHANGED) / total - mean**2
    half = float(ndtri((1 + level) / 2)) * math.sqrt(max(variance / total, between))
    return max(-1.0, mean - half), min(1.0, mean + half)


def _between(images: Tensor, folds: Tensor | None, change: Tensor) -> float:
    """The squared error of the mean over folds; 0 where a fold is one image, or an image is in several."""
    if folds is None or len(images.unique()) < len(images) or not 1 < len(folds.unique()) < len(images):
        return 0.0
    means = by_image(folds, change)
    return float(means.var()) / len(means)


def standard_error(values: Tensor, weights: Tensor | None = None) -> float:
    """Of the mean, plain or weighted; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    shares = torch.full((len(values),), 1 / len(values), dtype=torch.float64) if weights is None else weights
    around = (values.double() - shares @ values.double()).square()
    return math.sqrt(float(shares.square() @ around) * len(values) / (len(values) - 1))


def by_image(images: Tensor, values: Tensor) -> Tensor:
    """The mean value of every image."""
    which, inverse = images.unique(return_inverse=True)
    sums = torch.zeros(len(which), dtype=torch.float64).index_add_(0, inverse, values.double())
    means: Tensor = sums / inverse.bincount(minlength=len(which))
    return means

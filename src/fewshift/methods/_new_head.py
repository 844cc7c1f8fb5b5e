"""A new head for images with one label: what stays of the source's head, and the directions of the classes.

The source's head has seen thousands of images, the support a few. After a change of camera it is still right, and rows
made from five images would do harm; after a change of style they are worth more than it. So the new head is a mixture,
and held-out labels choose the share of the source's head that stays. A mixture of linear layers is a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.draws import others
from fewshift.core.heads import best_scale, leaning_rows, scores_apart, trained_rows
from fewshift.core.losses import log_losses

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the source's head
USUAL = 0.9  # the share that stays where labels say nothing
PRIOR = 2.0  # nats that it costs to be a whole share away from it
PULL = 2.0  # images' worth of the source's rows
DECAY = 1e-3  # of the trained rows towards their start
LEAST_SCALE, MOST_SCALE = 10.0, 40.0  # of cosines
SUPPORT_WEIGHT = 3.0  # of a labelled image against an unlabelled one of the same class


@dataclass(frozen=True)
class LinearHead:
    """Rows and a bias, in double precision."""

    rows: Tensor  # (classes, features)
    bias: Tensor  # (classes,)

    @classmethod
    def of(cls, layer: nn.Linear | nn.Conv2d) -> Self:
        """The head of a network."""
        rows = layer.weight.detach().flatten(1).double()
        return cls(rows, rows.new_zeros(len(rows)) if layer.bias is None else layer.bias.detach().double())

    def answers(self, points: Tensor) -> Tensor:
        """(N, classes): the logits of these features."""
        return points.double() @ self.rows.T + self.bias

    def times(self, factor: float) -> Self:
        """The same predictions, surer or less sure of themselves."""
        return type(self)(factor * self.rows, factor * self.bias)

    def trained(self, points: Tensor, labels: Tensor) -> Self:
        """Rows that fit these features better, held near where they start; features count by their direction."""
        length = _length(points)
        rows = trained_rows(F.normalize(points.double(), dim=1), labels, self.rows * length, DECAY, self.bias)
        return type(self)(rows / length, self.bias)


@dataclass(frozen=True)
class MixedHead:
    """The two parts of a new head, each as sure of itself as it is right."""

    stays: LinearHead  # the source's
    new: LinearHead

    @classmethod
    def of(
        cls, source: LinearHead, points: Tensor, labels: Tensor, beside: Tensor | None, scale: float | None = None
    ) -> Self:
        """The parts for these features and labels; `beside` are features of unlabelled images.

        They add to a row by the probability of its class. `scale` is that of the new rows' cosines.
        """
        near = points.double()
        own = scale or _bounded(best_scale(scores_apart(near, labels, source.rows, PULL), labels))
        more: Tensor | float = 0.0
        if beside is not None and len(beside):
            units = F.normalize(beside.double(), dim=1)
            shares = (own * units @ leaning_rows(near, labels, source.rows, PULL).T).softmax(1)
            more = shares.T @ units / SUPPORT_WEIGHT
        rows = own * leaning_rows(near, labels, source.rows, PULL, more) / _length(near)
        sure = best_scale(source.answers(near), labels)
        return cls(source.times(sure), LinearHead(rows, torch.zeros_like(source.bias)))

    def at(self, share: float) -> LinearHead:
        """The head in which so much of the source's stays."""
        return LinearHead(
            share * self.stays.rows + (1 - share) * self.new.rows,
            share * self.stays.bias + (1 - share) * self.new.bias,
        )


@dataclass(frozen=True)
class HeldOutHeads:
    """For each share, what heads made without an image's fold say of it; and those heads, by fold."""

    folds: Sequence[Tensor]
    labels: Tensor
    mixtures: Sequence[MixedHead]
    answers: Mapping[float, Tensor]  # (N, classes) by share

    @classmethod
    def of(
        cls, source: LinearHead, points: Tensor, labels: Tensor, beside: Tensor | None, folds: Sequence[Tensor]
    ) -> Self:
        """Make the heads, one mixture for each fold."""
        mixtures = []
        answers = {share: points.new_empty(len(points), len(source.rows)).double() for share in SHARES}
        for fold in folds:
            rest = others(fold, len(points))
            mixtures.append(MixedHead.of(source, points[rest], labels[rest], beside))
            for share in SHARES:
                answers[share][fold] = mixtures[-1].at(share).answers(points[fold])
        return cls(folds, labels, mixtures, answers)

    def share(self, rows: Tensor | None = None) -> float:
        """The share that these images choose, by their held-out labels and a weak prior; all images by default."""
        chosen = torch.arange(len(self.labels)) if rows is None else rows

        def cost(share: float) -> float:
            losses = log_losses(self.answers[share][chosen], self.labels[chosen])
            return float(losses.sum()) + PRIOR * abs(USUAL - share)

        return min(SHARES, key=cost)


def _length(points: Tensor) -> Tensor:
    length: Tensor = points.double().norm(dim=1).mean().clamp(min=1e-12)
    return length


def _bounded(scale: float) -> float:
    return min(max(scale, LEAST_SCALE), MOST_SCALE)

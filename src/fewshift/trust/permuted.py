"""Labels in another order than the network's outputs, seen in the network's answers to the images.

The confusion counts have a row for each label and a column for each output. An assignment of labels to outputs fits as
many images as it finds in its cells. The best one is a permutation, and a permutation is made of cycles: images of the
first class look like the second, those of the second like the third, and those of the last like the first.

**Far better.** If the labels are right, then by Markov's inequality a cycle makes them r times as likely with
probability 1 / r at most. There are C! / (L (C - L)!) cycles of L of C classes, so the likelihood has to grow by 20
times that number; each assignment has its best temperature. Under a strong shift the network is wrong in a systematic
way, and likelihoods prove less. So the cycle must also be right about half of its images, and four times as often as
the labels.

**Who is asked.** Under a shift the source network is often wrong, and can tell no order. Half-way to the statistics of
the place it is right far more often, and labels have no part in those. So it is asked that way first, and believed if
its cycles make half of all images right; otherwise the source network is asked as it is. docs/trust.md has the rates.
Pictures that were turned or mirrored do pass: an upside-down 6 is a 9.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from torch import Tensor

from fewshift.core.losses import log_losses

CHANCE = 0.05  # of a cycle among right labels, were the network calibrated
HALF = 0.5  # of its images have to be right under a cycle
TIMES = 4  # as often as under the labels
HALF_WAY = 0.5  # v, of the statistics of the place


@dataclass(frozen=True)
class Cycle:
    """Classes whose images look like another's: those of each like the next, those of the last like the first."""

    classes: tuple[int, ...]
    images: int
    as_labelled: int  # images of these classes that the network has right
    as_moved: int  # that it would have right, were they of the next class

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        """(label, the class that its images look like)."""
        return tuple(zip(self.classes, (*self.classes[1:], self.classes[0]), strict=True))


@dataclass(frozen=True)
class Moves:
    """The cycles that some answers show, and how many of all images are right in these."""

    cycles: Sequence[Cycle]
    right: int  # as labelled
    half_way: bool  # whether the answers are those half-way to the statistics of the place

    @property
    def gained(self) -> int:
        """Images that are right with all cycles beyond those that are right as labelled."""
        return sum(cycle.as_moved - cycle.as_labelled for cycle in self.cycles)


def find_moves(source: Tensor, half_way: Tensor | None, labels: Tensor) -> Moves:
    """What the answers half-way to the place's statistics show, if half of all images are right then; or the source's.

    All logits are (N, classes).
    """
    if half_way is not None:
        shown = _moves(half_way, labels, half_way=True)
        if shown.cycles and shown.right + shown.gained >= HALF * len(labels):
            return shown
    return _moves(source, labels, half_way=False)


def _moves(logits: Tensor, labels: Tensor, *, half_way: bool) -> Moves:
    return Moves(find_cycles(logits, labels), int((logits.argmax(1) == labels).sum()), half_way)


def find_cycles(logits: Tensor, labels: Tensor) -> list[Cycle]:
    """The cycles of classes that fit a network's answers far better than the labels do."""
    classes = logits.shape[1]
    predicted = logits.argmax(1)
    counts = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes).double()
    # less than an image in all: of equal assignments, the one with more labels as they are
    _, columns = linear_sum_assignment((counts + torch.eye(classes) / (2 * classes)).numpy(), maximize=True)
    assigned = torch.from_numpy(columns)
    cycles = []
    for ring in rings(columns.tolist()):
        rows = torch.isin(labels, torch.tensor(ring))
        if not rows.any():
            continue
        own, moved = labels[rows], assigned[labels[rows]]
        cycle = Cycle(
            ring, len(own), int((predicted[rows] == own).sum()), int((predicted[rows] == moved).sum())
        )  # fmt: skip
        if cycle.as_moved < HALF * cycle.images or cycle.as_moved < TIMES * cycle.as_labelled:
            continue
        likelier = float((log_losses(logits[rows], own) - log_losses(logits[rows], moved)).sum())
        if likelier > math.log(_number_of_cycles(len(ring), classes) / CHANCE):
            cycles.append(cycle)
    return cycles


def rings(permutation: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The cycles of a permutation that move something, each from its smallest element on."""
    seen: set[int] = set()
    for start in range(len(permutation)):
        ring = []
        at = start
        while at not in seen:
            seen.add(at)
            ring.append(at)
            at = permutation[at]
        if len(ring) > 1:
            yield tuple(ring)


def _number_of_cycles(length: int, classes: int) -> int:
    return math.perm(classes, length) // length

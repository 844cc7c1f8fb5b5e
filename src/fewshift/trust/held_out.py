"""Which support images are held out together, and what the source network and adapted ones say about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fewshift.core.labels import IMAGES, PIXELS, Labels
from fewshift.core.losses import log_losses
from fewshift.core.network import like, logits_of
from fewshift.core.outputs import refuse_unanswered
from fewshift.core.support import MINIBATCH, Support
from fewshift.errors import FewshiftError
from fewshift.trust.gain import Gain, gain_from

INSIDE = ("cv", "loo")  # ways to hold out images of the support itself


def folds_of(support: Support, kind: str, seed: int) -> list[Tensor]:
    """The positions that are held out together, one tensor for each adaptation; none where a single image is all.

    "cv" holds out the support's folds, "loo" one image at a time.
    """
    if kind == "loo":
        return list(torch.arange(len(support)).split(1)) if len(support) > 1 else []
    if kind != "cv":
        raise FewshiftError(f"validate={kind!r} is unknown: choose 'cv', 'loo', None, or give labelled images")
    return support.folds(seed)


@dataclass(frozen=True)
class HeldOut(ABC):
    """Answers about held-out images. Rows are predictions; an image that was held out several times has several."""

    of_source: ClassVar[tuple[str, ...]]  # the fields with the source network's answers
    of_adapted: ClassVar[tuple[str, ...]]

    images: Tensor  # (n,) positions in the support
    folds: Tensor  # (n,)

    @abstractmethod
    def gain(self, *, weak: bool = False) -> Gain:
        """The paired difference, image by image."""

    @property
    @abstractmethod
    def losses(self) -> Tensor:
        """(n,): the cross-entropy of the adapted network's answers."""

    def against(self, other: Self) -> Self:
        """The same answers, with another adapted network's in place of the source network's."""
        names = zip(self.of_source, self.of_adapted, strict=True)
        return replace(self, **{name: getattr(other, adapted) for name, adapted in names})

    def answered_by(self, other: Self, rows: Tensor) -> Self:
        """The same answers, with another adapted network's in these rows."""
        columns = {name: getattr(self, name).clone() for name in self.of_adapted}
        for name, column in columns.items():
            column[rows] = getattr(other, name)[rows]
        return replace(self, **columns)

    def part(self, rows: Tensor) -> Self:
        """The answers in these rows."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def joined(self, others: Sequence[Self]) -> Self:
        """These answers and others below them."""
        columns = {field.name: [getattr(part, field.name) for part in (self, *others)] for field in fields(self)}
        return replace(self, **{name: torch.cat(column) for name, column in columns.items()})


@dataclass(frozen=True)
class ImageAnswers(HeldOut):
    """Logits, where every image has one label."""

    of_source = ("source",)
    of_adapted = ("adapted",)

    labels: Tensor  # (n,)
    source: Tensor  # (n, classes) logits
    adapted: Tensor  # (n, classes) logits

    def gain(self, *, weak: bool = False) -> Gain:
        """An image is right or wrong; losses are compared with each network under its best temperature."""
        before = (self.source.argmax(1) == self.labels).double()
        after = (self.adapted.argmax(1) == self.labels).double()
        loss = self.losses - log_losses(self.source, self.labels)
        return gain_from(self.images, before, after, loss, labels=self.labels, folds=self.folds, weak=weak)

    @property
    def losses(self) -> Tensor:
        """Under the temperature that suits these rows best."""
        return log_losses(self.adapted, self.labels)


@dataclass(frozen=True)
class PixelAnswers(HeldOut):
    """Shares and mean losses, where every pixel has a label: an image counts once."""

    of_source = ("before", "loss_before")
    of_adapted = ("after", "loss_after")

    before: Tensor  # (n,) the share of pixels that the source network has right
    after: Tensor  # (n,) the adapted one
    loss_before: Tensor  # (n,)
    loss_after: Tensor  # (n,)

    def gain(self, *, weak: bool = False) -> Gain:
        """An image counts by the share of its pixels that is right."""
        loss = self.loss_after - self.loss_before
        return gain_from(self.images, self.before, self.after, loss, folds=self.folds, weak=weak)

    @property
    def losses(self) -> Tensor:
        """The mean over pixels."""
        return self.loss_after


@torch.no_grad()
def predictions(model: nn.Module, images: Support) -> Tensor:
    """Logits, one row for each image."""
    return torch.cat([logits_of(model(like(model, part))) for part, _ in images.chunks(MINIBATCH)])


@torch.no_grad()
def shares_right(model: nn.Module, images: Support) -> Tensor:
    """(n,): the share of each image that is right."""
    chunks = images.chunks(images.kind.minibatch)
    answered = ((refuse_unanswered(logits_of(model(like(model, part)))), labels) for part, labels in chunks)
    return torch.cat([images.kind.right(logits.cpu(), labels.cpu()) for logits, labels in answered])


def asked(
    source: nn.Module, adapted: nn.Module, held: Support, images: Tensor, fold: int
) -> ImageAnswers | PixelAnswers:
    """Ask both networks about the images of one fold, whose positions are `images`."""
    before, after = (answers(model, held) for model in (source, adapted))
    return answered(held, images, torch.full((len(images),), fold), before, after)


@torch.no_grad()
def answers(model: nn.Module, images: Support) -> list[Tensor]:
    """The logits of each image, of shape (1, ...)."""
    size = images.kind.minibatch
    parts = (refuse_unanswered(logits_of(model(like(model, part)))) for part, _ in images.chunks(size))
    return [row for logits in parts for row in logits.split(1)]


def answered(
    held: Support, images: Tensor, folds: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]
) -> ImageAnswers | PixelAnswers:
    """What two networks answered about images, from the logits of each."""
    return ANSWERS[held.kind](images, folds, *_COLUMNS[held.kind](held, before, after))


def _logits(held: Support, *networks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return held.targets.cpu(), *(torch.cat(list(rows)).double().cpu() for rows in networks)


def _shares(held: Support, *networks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    measures: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (held.kind.right, held.kind.losses)
    labels = [label[None] for label in held.labels]
    return tuple(
        torch.cat([measure(row.float(), label).double().cpu() for row, label in zip(rows, labels, strict=True)])
        for measure in measures
        for rows in networks
    )


ANSWERS: dict[Labels, Callable[..., ImageAnswers | PixelAnswers]] = {IMAGES: ImageAnswers, PIXELS: PixelAnswers}
_COLUMNS = {IMAGES: _logits, PIXELS: _shares}

"""What the source network and adapted ones say about images that the latter had not seen, image by image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.labels import IMAGES, PIXELS, Labels
from fewshift.core.network import like, logits_of
from fewshift.core.support import MINIBATCH, Support
from fewshift.trust.gain import Gain, gain_from

TEMPERATURES = torch.logspace(-2, 2, 81, dtype=torch.float64)


@dataclass(frozen=True)
class HeldOut(ABC):
    """Answers about held-out images. Rows are predictions; an image that was held out several times has several."""

    images: Tensor  # (n,) positions in the support
    folds: Tensor  # (n,)

    @abstractmethod
    def gain(self, *, weak: bool = False) -> Gain:
        """The paired difference, image by image."""

    @property
    @abstractmethod
    def losses(self) -> Tensor:
        """(n,): the cross-entropy of the adapted network's answers."""

    @abstractmethod
    def against(self, other: Self) -> Self:
        """The same answers, with another adapted network's in place of the source network's."""

    @abstractmethod
    def answered_by(self, other: Self, rows: Tensor) -> Self:
        """The same answers, with another adapted network's in these rows."""

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

    labels: Tensor  # (n,)
    source: Tensor  # (n, classes) logits
    adapted: Tensor  # (n, classes) logits

    def gain(self, *, weak: bool = False) -> Gain:
        """An image is right or wrong; losses are compared with each network under its best temperature."""
        before = (self.source.argmax(1) == self.labels).double()
        after = (self.adapted.argmax(1) == self.labels).double()
        per_class = {}
        for label in self.labels.unique().tolist():
            rows = self.labels == label
            images = len(self.images[rows].unique())
            per_class[label] = images, 100 * float(before[rows].mean()), 100 * float(after[rows].mean())
        loss = self.losses - log_losses(self.source, self.labels)
        return gain_from(self.images, before, after, loss, per_class, weak=weak)

    @property
    def losses(self) -> Tensor:
        """Under the temperature that suits these rows best."""
        return log_losses(self.adapted, self.labels)

    def against(self, other: Self) -> Self:
        """Logits of two adapted networks."""
        return replace(self, source=other.adapted)

    def answered_by(self, other: Self, rows: Tensor) -> Self:
        """Logits of two adapted networks, row by row."""
        return replace(self, adapted=torch.where(rows.unsqueeze(1), other.adapted, self.adapted))


@dataclass(frozen=True)
class PixelAnswers(HeldOut):
    """Shares and mean losses, where every pixel has a label: an image counts once."""

    before: Tensor  # (n,) the share of pixels that the source network has right
    after: Tensor  # (n,) the adapted one
    loss_before: Tensor  # (n,)
    loss_after: Tensor  # (n,)

    def gain(self, *, weak: bool = False) -> Gain:
        """An image counts by the share of its pixels that is right."""
        return gain_from(self.images, self.before, self.after, self.loss_after - self.loss_before, weak=weak)

    @property
    def losses(self) -> Tensor:
        """The mean over pixels."""
        return self.loss_after

    def against(self, other: Self) -> Self:
        """Shares of two adapted networks."""
        return replace(self, before=other.after, loss_before=other.loss_after)

    def answered_by(self, other: Self, rows: Tensor) -> Self:
        """Shares of two adapted networks, row by row."""
        after, loss = (torch.where(rows, getattr(other, name), getattr(self, name)) for name in ("after", "loss_after"))
        return replace(self, after=after, loss_after=loss)


@torch.no_grad()
def predictions(model: nn.Module, images: Support) -> Tensor:
    """Logits, one row for each image."""
    return torch.cat([logits_of(model(like(model, part))) for part, _ in images.chunks(MINIBATCH)])


@torch.no_grad()
def shares_right(model: nn.Module, images: Support) -> Tensor:
    """(n,): the share of each image that is right."""
    chunks = images.chunks(images.kind.minibatch)
    return torch.cat(
        [images.kind.right(logits_of(model(like(model, part))).cpu(), labels.cpu()) for part, labels in chunks]
    )


def asked(
    source: nn.Module, adapted: nn.Module, held: Support, images: Tensor, fold: int
) -> ImageAnswers | PixelAnswers:
    """Ask both networks about the images of one fold, whose positions are `images`."""
    return ANSWERS[held.kind](images, torch.full((len(images),), fold), *_COLUMNS[held.kind](source, adapted, held))


def _logits(source: nn.Module, adapted: nn.Module, held: Support) -> tuple[Tensor, ...]:
    return held.targets.cpu(), *(predictions(model, held).double().cpu() for model in (source, adapted))


@torch.no_grad()
def _shares(source: nn.Module, adapted: nn.Module, held: Support) -> tuple[Tensor, ...]:
    rows = []
    for images, labels in held.chunks(1):
        logits = [logits_of(model(like(model, images))).float() for model in (source, adapted)]
        measures: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (held.kind.right, held.kind.losses)
        rows.append(torch.cat([measure(answer, labels).double().cpu() for measure in measures for answer in logits]))
    return torch.stack(rows).unbind(1)


ANSWERS: dict[Labels, Callable[..., ImageAnswers | PixelAnswers]] = {IMAGES: ImageAnswers, PIXELS: PixelAnswers}
_COLUMNS = {IMAGES: _logits, PIXELS: _shares}


def temperature(logits: Tensor, labels: Tensor) -> float:
    """The T under which softmax(logits / T) has the least cross-entropy."""
    scaled = logits.double().unsqueeze(0) / TEMPERATURES.view(-1, 1, 1)
    losses = F.cross_entropy(scaled.flatten(0, 1), labels.repeat(len(TEMPERATURES)), reduction="none")
    return float(TEMPERATURES[losses.view(len(TEMPERATURES), -1).mean(1).argmin()])


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) of every row, under the temperature that suits these rows best."""
    return F.cross_entropy(logits.double() / temperature(logits, labels), labels, reduction="none")

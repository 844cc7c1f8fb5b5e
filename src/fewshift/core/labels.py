"""What differs between image labels and pixel labels. No other code asks which of the two it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift.core._arguments import checked_images
from fewshift.core.losses import IGNORE, at_labels
from fewshift.core.metrics import accuracy, mean_iou, tally
from fewshift.errors import FewshiftError

Stack = Tensor | tuple[Tensor, ...]  # one tensor, or one for each image where their sizes differ
Augment = Callable[..., Any]
"""One image -> a view of the same shape; with pixel labels (image, labels) -> a view of both."""
Name = Callable[[int], str]
MANY = 5  # labels that an error lists


class LabelKind:
    """What both kinds of labels share: one class index for each image, or for each pixel of each image."""

    unit: ClassVar[str]  # what a label belongs to
    shots_mean: ClassVar[str]  # what k counts
    metric: ClassVar[str]  # the headline metric, a name in `core.metrics.METRICS`
    metric_title: ClassVar[str]  # the same in words
    minibatch: ClassVar[int]  # how many images a step learns from by default
    batch_statistics: ClassVar[bool]  # whether BatchNorm may learn from a minibatch
    centroids: ClassVar[bool]  # whether a class has a centroid: the mean feature of its images
    stratified: ClassVar[bool]  # whether folds have their share of every class
    ignored: ClassVar[int | None]  # the label that means no label

    def kept(self, label: Tensor) -> Tensor:
        """The labels that are not ignored."""
        return label if self.ignored is None else label[label != self.ignored]

    def counts(self, labels: Stack) -> dict[int, int]:
        """How often each class occurs."""
        parts = [labels] if isinstance(labels, Tensor) else labels
        values, counts = torch.cat([self.kept(part).flatten() for part in parts]).unique(return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def weight(self, labels: Tensor) -> int:
        """The weight of a batch in a mean: how many labels it has."""
        return self.kept(labels).numel()

    def tally(self, labels: Tensor, predictions: Tensor, classes: int) -> Tensor:
        """(classes, classes): how often each true class (row) was predicted as each class (column)."""
        return tally(labels, predictions, classes, ignore=self.ignored)

    def check_range(self, counts: Mapping[int, int], classes: int | None) -> None:
        """Raise an error if a label is no output of the network."""
        outside = {
            label: count for label, count in counts.items() if label < 0 or (classes is not None and label >= classes)
        }
        if outside:
            ignore = "" if self.ignored is None else f", {self.ignored} to ignore"
            raise FewshiftError(
                f"{_listed(outside, self.unit)} out of range for a network with {classes} outputs: "
                f"use labels from 0 to {(classes or 1) - 1}{ignore}"
            )


class ImageLabels(LabelKind):
    """One class index for each image."""

    unit = "image"
    shots_mean = "labelled images per class"
    metric = "accuracy"
    metric_title = "accuracy"
    score = staticmethod(accuracy)  # of a tally
    minibatch = 32
    batch_statistics = True
    centroids = True
    stratified = True
    ignored = None

    def shots(self, labels: Stack, counts: Mapping[int, int]) -> int:
        """k: how many images the rarest class has."""
        return min(counts.values())

    def folds(self, labels: Stack, parts: int, generator: torch.Generator) -> list[Tensor]:
        """Disjoint sets of positions, each with its share of every class."""
        classes = torch.stack(tuple(labels)).cpu()
        order = torch.randperm(len(classes), generator=generator)
        part = torch.zeros(len(classes), dtype=torch.long)
        for label in classes.unique().tolist():
            members = order[classes[order] == label]
            part[members] = torch.arange(len(members)) % parts
        return [(part == number).nonzero().flatten() for number in range(parts)]

    def view(self, augment: Augment, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """A random view of an image; the augmentation sees the image alone and keeps its shape."""
        view = _augmented(augment, image)
        if not isinstance(view, Tensor):
            raise FewshiftError("augment did not return a tensor: let it return an image like the one it took")
        if view.shape != image.shape:
            raise FewshiftError(
                f"augment changed an image of shape {tuple(image.shape)} to {tuple(view.shape)}: let it keep the shape"
            )
        return view, label

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(n,): -log p(label) of each image."""
        return F.cross_entropy(logits, labels, reduction="none")

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(n,): 1 for each image that is right, 0 for the others."""
        return (logits.argmax(1) == labels).double()

    def logits(self, answer: Tensor) -> Tensor:
        """The head's output with a row for each image: a convolution on pooled features gives 1x1 maps."""
        return answer.flatten(1)

    def stacked(self, images: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """One batch; all images have one size."""
        return _stack(images), torch.stack(tuple(labels))

    def check(
        self, images: Stack, labels: Stack, counts: Mapping[int, int], class_name: Name, image_name: Name
    ) -> None:
        """Raise an error if there are fewer than two classes."""
        if len(counts) < 2:
            raise FewshiftError(
                f"every support image is of class {class_name(next(iter(counts)))}: add images of at least one other"
            )

    def check_answer(self, labels: Stack, answer: tuple[int, ...]) -> None:
        """Raise an error if a network's output, less its classes, is more than one row for each image."""
        if answer:
            raise FewshiftError(
                f"the network's output for an image has shape {answer}, and each image has one label: "
                "give a label for each pixel"
            )


class PixelLabels(LabelKind):
    """One class index for each pixel; 255 means no label."""

    unit = "pixel"
    shots_mean = "labelled images"
    metric = "mean_iou"
    metric_title = "mean IoU"
    score = staticmethod(mean_iou)  # of a tally
    minibatch = 1
    batch_statistics = False
    centroids = False
    stratified = False
    ignored = IGNORE

    def shots(self, labels: Stack, counts: Mapping[int, int]) -> int:
        """k: all images."""
        return len(labels)

    def folds(self, labels: Stack, parts: int, generator: torch.Generator) -> list[Tensor]:
        """Disjoint random sets of positions: each image has pixels of many classes."""
        return random_folds(len(labels), parts, generator)

    def view(self, augment: Augment, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """A random view of an image; the augmentation changes its labels alike."""
        pair = _augmented(augment, image, label)
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
            raise FewshiftError("augment did not return two tensors: let it return an image and its labels")
        view, view_label = pair
        if view.shape[-view_label.ndim :] != view_label.shape:
            raise FewshiftError(
                f"augment returned an image of shape {tuple(view.shape)} with labels of shape "
                f"{tuple(view_label.shape)}: let it change both alike"
            )
        return view, view_label

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(n,): the mean cross-entropy of the labelled pixels of each image; 0 without any."""
        rows = F.cross_entropy(at_labels(logits, labels), labels, reduction="none", ignore_index=IGNORE)
        return rows.flatten(1).sum(1) / (labels != IGNORE).flatten(1).sum(1).clamp(min=1)

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(n,): the share of each image's labelled pixels that are right; 0 without any."""
        known = (labels != IGNORE).flatten(1)
        hits = (at_labels(logits, labels).argmax(1) == labels).flatten(1) & known
        return hits.sum(1).double() / known.sum(1).clamp(min=1)

    def logits(self, answer: Tensor) -> Tensor:
        """The head's output: a map for each class."""
        return answer

    def stacked(self, images: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """One batch; smaller images are padded at the right and at the bottom, and ignored there."""
        height, width = (max(label.shape[side] for label in labels) for side in (0, 1))
        around = [(0, width - label.shape[1], 0, height - label.shape[0]) for label in labels]
        return (
            _stack([F.pad(image, pad) for image, pad in zip(images, around, strict=True)]),
            torch.stack([F.pad(label, pad, value=IGNORE) for label, pad in zip(labels, around, strict=True)]),
        )

    def check(
        self, images: Stack, labels: Stack, counts: Mapping[int, int], class_name: Name, image_name: Name
    ) -> None:
        """Raise an error if no pixel is labelled, or if an image has not as many labels as pixels."""
        if not counts:
            raise FewshiftError(f"every pixel of the support is ignored (label {IGNORE}): label some")
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            if image.shape[-label.ndim :] != label.shape:
                raise FewshiftError(
                    f"{image_name(index)} is {extent(image.shape[-label.ndim :])} pixels and its labels are "
                    f"{extent(label.shape)}: give one label for each pixel"
                )

    def check_answer(self, labels: Stack, answer: tuple[int, ...]) -> None:
        """Raise an error if a network's output has neither the labels' size nor, coarser, their aspect ratio."""
        shape = tuple(labels[0].shape)
        if len(shape) != len(answer):
            raise FewshiftError(
                f"the network's output for an image has shape {answer}, and its labels {shape}: "
                "give one label for each image, or use a network that labels pixels"
            )
        alike = len(answer) == 2 and abs(answer[0] * shape[1] - answer[1] * shape[0]) <= sum(shape)
        if answer != shape and not (alike and answer[0] <= shape[0] and answer[1] <= shape[1]):
            raise FewshiftError(
                f"the output ({extent(answer)}) must have the labels' aspect ratio ({extent(shape)}) and be no larger: "
                "wrap the network so that it does"
            )


Labels = ImageLabels | PixelLabels
IMAGES, PIXELS = ImageLabels(), PixelLabels()


def kind_of(labels: Stack) -> Labels:
    """Image labels or pixel labels, by their shape."""
    return PIXELS if labels[0].ndim > 0 else IMAGES


def random_folds(total: int, parts: int, generator: torch.Generator) -> list[Tensor]:
    """Disjoint random sets of positions of equal size, give or take one."""
    order = torch.randperm(total, generator=generator)
    return [order[part::parts].sort().values for part in range(parts)]


def extent(shape: Sequence[int]) -> str:
    """Width x height."""
    return "x".join(map(str, reversed(shape)))


def _stack(images: Sequence[Tensor]) -> Tensor:
    for image in images:
        if image.shape != images[0].shape:
            raise FewshiftError(
                f"images have different shapes {tuple(images[0].shape)} and {tuple(image.shape)}: give one size for all"
            )
    return torch.stack(tuple(images))


def _augmented(augment: Augment, *parts: Tensor) -> Any:
    try:
        return augment(*parts)
    except TypeError as error:
        wanted = "one image" if len(parts) == 1 else "(image, labels)"
        raise FewshiftError(f"augment cannot be called ({error}): let it take {wanted}") from error


def _listed(counts: Mapping[int, int], unit: str) -> str:
    named = ", ".join(
        f"{label} ({count:,} {unit}{'s' if count > 1 else ''})" for label, count in list(counts.items())[:MANY]
    )
    more = f" and {len(counts) - MANY} more" if len(counts) > MANY else ""
    return f"label{'s' if len(counts) > 1 else ''} {named}{more} {'are' if len(counts) > 1 else 'is'}"


def each_of(tensors: Stack, change: Callable[[Tensor], Tensor]) -> Stack:
    """`change` of the one tensor, or of every tensor where sizes differ."""
    return change(tensors) if isinstance(tensors, Tensor) else tuple(change(tensor) for tensor in tensors)


def as_one(tensors: Stack) -> Tensor:
    """One tensor, or an error if sizes differ."""
    if isinstance(tensors, Tensor):
        return tensors
    sizes = sorted({extent(tensor.shape[-2:]) for tensor in tensors})
    raise FewshiftError(
        f"images of {len(sizes)} different sizes ({', '.join(sizes[:2])}) cannot go together: "
        "take one at a time (batch_size=1), or preprocess them to one size"
    )


def at_places(tensors: Stack, indices: Tensor) -> Stack:
    """Those at `indices`."""
    if isinstance(tensors, Tensor):
        return tensors[indices]
    return stacked(tuple(tensors[index] for index in indices.tolist()))


def stacked(tensors: Any, what: str = "images") -> Stack:
    """One tensor if the shapes allow it."""
    if isinstance(tensors, Tensor):
        return checked_images(tensors, what)
    if not isinstance(tensors, Sequence) or not all(isinstance(each, Tensor) for each in tensors):
        raise FewshiftError(f"{what} are no tensors ({type(tensors).__name__}): give one tensor, or a list of them")
    return torch.stack(tuple(tensors)) if len({tensor.shape for tensor in tensors}) == 1 else tuple(tensors)

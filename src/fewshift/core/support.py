"""What a method may look at: a labelled support set and unlabelled images of the target. Never source data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift.core._arguments import checked_images
from fewshift.core._display import Displayed, few
from fewshift.core.draws import others
from fewshift.core.labels import (
    Augment,
    Labels,
    Stack,
    as_one,
    at_places,
    each_of,
    extent,
    kind_of,
    random_folds,
    stacked,
)
from fewshift.core.left_out import LeftOut
from fewshift.core.losses import IGNORE, Loss, at_labels, cross_entropy
from fewshift.errors import FewshiftError

FOLDS = 3  # few, for the time: each adapts with most of the images
SINGLE_FOLDS = 6  # where classes have a single image
MINIBATCH = 32  # images that pass through a network together when only predictions are wanted


@dataclass(frozen=True, repr=False)
class Support(Displayed):
    """Labelled target images, preprocessed, with a label for each image or for each pixel.

    `augment` gives a random view of one image. `at_once` is how many images may be in memory together while
    statistics are read; None decides by the free memory.
    """

    images: Stack  # (N, channels, H, W), or whatever the network takes
    labels: Stack  # (N,) or (N, H, W), integers of any type; kept as int64
    classes: tuple[str, ...] | None = None
    augment: Augment | None = None
    at_once: int | None = None
    files: tuple[Path, ...] | None = None  # where the images come from, if that is known
    left_out: LeftOut | None = None  # files of the same folder that are not among them

    def __post_init__(self) -> None:
        for name in ("images", "labels"):
            object.__setattr__(self, name, stacked(getattr(self, name), name))
        if len(self.images) != len(self.labels):
            raise FewshiftError(
                f"{len(self.images)} images but {len(self.labels)} labels: give one label for each image"
            )
        if self.files is not None and len(self.files) != len(self.images):
            raise FewshiftError(f"{len(self.images)} images but {len(self.files)} files: give one file for each image")
        if not len(self.images):
            raise FewshiftError("the support set is empty: give at least one labelled image of two classes")
        for index, image in enumerate(self.images):
            checked_images(image)
            if not image.is_floating_point():
                raise FewshiftError(
                    f"images are {str(image.dtype).removeprefix('torch.')}: preprocess them to floating point first"
                )
            if not torch.isfinite(image).all():
                raise FewshiftError(f"{self.image_name(index)} contains NaN or infinity: check its preprocessing")
        for label in self.labels:
            if label.is_floating_point() or label.is_complex():
                raise FewshiftError("labels are not integers: give class indices from 0")
            if label.ndim == 1 or label.ndim != self.labels[0].ndim:
                raise FewshiftError(
                    f"labels have shape {tuple(label.shape)} for an image: "
                    "give one class index for each image, or for each pixel"
                )
        object.__setattr__(self, "labels", each_of(self.labels, Tensor.long))
        object.__setattr__(self, "images", each_of(self.images, Tensor.detach))  # what made them does not learn
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise FewshiftError(f"class name '{twice}' occurs twice: name every class once")
        if self.at_once is not None and self.at_once < 1:
            raise FewshiftError(f"at_once={self.at_once} is too small: give at least 1")

    @property
    def title(self) -> str:
        """What it is."""
        return f"Support of {len(self)} labelled images"

    @property
    def facts(self) -> dict[str, str]:
        """Sizes, classes and k."""
        sizes = tuple(sorted({extent(image.shape[1:]) for image in self.images}))
        classes = few(self.classes or tuple(map(str, self.counts)))
        return {"sizes": few(sizes), "labels": f"one per {self.kind.unit}", "classes": classes, "k": str(self.shots)}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    @property
    def kind(self) -> Labels:
        """Image labels or pixel labels, and all that follows from it."""
        return kind_of(self.labels)

    @property
    def pictures(self) -> Tensor:
        """All images as one tensor, or an error if their sizes differ."""
        return as_one(self.images)

    @property
    def targets(self) -> Tensor:
        """All labels as one tensor, or an error if their sizes differ."""
        return as_one(self.labels)

    @property
    def counts(self) -> dict[int, int]:
        """Images (or labelled pixels) per class, for the classes that occur."""
        return self.kind.counts(self.labels)

    @property
    def shots(self) -> int:
        """k: how many images the rarest class has; with pixel labels, how many images there are."""
        return self.kind.shots(self.labels, self.counts)

    def minibatch(self, size: int | None) -> int:
        """How many images a step learns from: `size`, or the default for these labels."""
        return size or self.kind.minibatch

    def prepared(self, make: Callable[[Tensor], Tensor]) -> Support:
        """The same support with `make(images)` as its images, and its labels on their device."""
        if isinstance(self.images, Tensor):
            images: Stack = make(self.images)
        else:
            images = tuple(make(image[None])[0] for image in self.images)
        device = images[0].device
        return replace(self, images=images, labels=each_of(self.labels, lambda label: label.to(device)))

    def part(self, indices: Tensor) -> Support:
        """The images at `indices`, in that order."""
        files = None if self.files is None else tuple(self.files[at] for at in indices.tolist())
        return replace(
            self, images=at_places(self.images, indices), labels=at_places(self.labels, indices), files=files
        )

    def splits(self, folds: Sequence[Tensor]) -> list[tuple[Support, Support]]:
        """(all other images, the fold) for every fold of positions."""
        return [(self.part(others(fold, len(self))), self.part(fold)) for fold in folds]

    def folds(self, seed: int) -> list[Tensor]:
        """Positions to hold out together: up to three folds, each with its share of every class.

        Where a class has a single image no class can be both adapted to and held out, and the folds are any images. A
        single image cannot be held out.
        """
        generator = torch.Generator().manual_seed(seed)
        if len(self) < 2:
            return []
        if self.shots < 2:
            return random_folds(len(self), min(len(self), SINGLE_FOLDS), generator)
        return self.kind.folds(self.labels, min(self.shots, FOLDS), generator)

    def chunks(self, size: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Images and labels, `size` at a time (default: all); one by one if their sizes differ."""
        if isinstance(self.images, Tensor) and isinstance(self.labels, Tensor):
            size = size or len(self)
            return list(zip(self.images.split(size), self.labels.split(size), strict=True))
        return [(image[None], label[None]) for image, label in zip(self.images, self.labels, strict=True)]

    def loss_of(self, loss: Loss, logits: Sequence[Tensor]) -> float:
        """The loss over all images from the logits of their chunks; each chunk is weighted by its labels."""
        chunks = [labels for _, labels in self.chunks(len(logits[0]))]
        if len(chunks) == 1:
            return float(loss(logits[0], chunks[0]))
        weights = [self.kind.weight(labels) for labels in chunks]
        losses = [float(loss(part, labels)) for part, labels in zip(logits, chunks, strict=True)]
        return sum(weight * value for weight, value in zip(weights, losses, strict=True)) / sum(weights)

    def padded(self, multiple: int) -> Support:
        """Images padded at their right and lower edge to sides that are multiples; the padding has no labels."""

        def fill(picture: Tensor, mode: str, value: float = 0.0) -> Tensor:
            down, right = (-side % multiple for side in picture.shape[-2:])
            spread = F.pad(picture.reshape(1, -1, *picture.shape[-2:]), (0, right, 0, down), mode, value)
            return spread.reshape(*picture.shape[:-2], *spread.shape[-2:])

        images = tuple(fill(image, "replicate") for image in self.images)
        return replace(self, images=images, labels=tuple(fill(label, "constant", IGNORE) for label in self.labels))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels at `indices`; each image is augmented on its own if there is an augmentation."""
        if self.augment is None:
            images, labels = as_one(at_places(self.images, indices)), as_one(at_places(self.labels, indices))
        else:
            pairs = [self.kind.view(self.augment, self.images[index], self.labels[index]) for index in indices.tolist()]
            images, labels = (as_one(stacked(tuple(column))) for column in zip(*pairs, strict=True))
        if self.images[0].ndim == 3 and self.images[0][None].is_contiguous(memory_format=torch.channels_last):
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def checked(self, output: tuple[int, ...]) -> Support:
        """The support without unlabelled images, or an error if its labels do not fit the network.

        `output` is the shape of the network's output for the first image. It may be coarser than the labels.
        """
        classes, counts = output[0] if output else None, self.counts
        self.kind.check(self.images, self.labels, counts, self.class_name, self.image_name)
        if output:
            self.kind.check_answer(self.labels, output[1:])
        self.kind.check_range(counts, classes)
        if self.classes is not None and classes is not None and len(self.classes) != classes:
            raise FewshiftError(
                f"{len(self.classes)} class names for a network with {classes} outputs: "
                "name every output once, in the network's order"
            )
        labelled = torch.tensor([self.kind.weight(label) > 0 for label in self.labels])
        return self if labelled.all() else self.part(labelled.nonzero().flatten())

    def image_name(self, index: int) -> str:
        """The file of an image, or its position."""
        return f"image {index} of the support" if self.files is None else str(self.files[index])

    def class_name(self, label: int) -> str:
        """The name of a class, or its number if there are no names."""
        return f"'{self.classes[label]}'" if self.classes and 0 <= label < len(self.classes) else str(label)


class Unlabelled:
    """Target images without labels: a tensor, or a dataset that is read batch by batch.

    A dataset's items are image tensors, or tuples that begin with one; the rest of a tuple is ignored.
    """

    def __init__(self, images: Any, augment: Augment | None = None, left_out: LeftOut | None = None) -> None:
        self._images = checked_images(images, "unlabelled images") if isinstance(images, Tensor) else images
        self.augment, self.left_out = augment, left_out
        if not len(images):
            raise FewshiftError("there are no unlabelled images: give at least one")

    def __len__(self) -> int:
        return len(self._images)

    def batch(self, indices: Tensor, *, augmented: bool = False) -> Tensor:
        """The images at `indices`, as one tensor."""
        if isinstance(self._images, Tensor):
            images = self._images[indices]
        else:
            items = [self._images[index] for index in indices.tolist()]
            rows = [
                checked_images(item[0] if isinstance(item, (tuple, list)) else item, "unlabelled images")
                for item in items
            ]
            if other := next((at for at, row in enumerate(rows) if row.shape != rows[0].shape), None):
                first, second = (f"{self.image_name(int(indices[at]))} {tuple(rows[at].shape)}" for at in (0, other))
                raise FewshiftError(
                    f"unlabelled images have different shapes, {first} and {second}: preprocess them to one size"
                )
            images = torch.stack(rows)
        if augmented and self.augment:
            images = torch.stack([self.augment(image) for image in images])
        if not images.is_floating_point():
            kind = str(images.dtype).removeprefix("torch.")
            raise FewshiftError(f"unlabelled images are {kind}: preprocess them to floating point first")
        images = images.detach()
        finite = torch.isfinite(images).flatten(1).all(1)
        if not finite.all():
            name = self.image_name(int(indices[int(finite.long().argmin())]))
            raise FewshiftError(f"{name} contains NaN or infinity: check its preprocessing")
        return images

    def image_name(self, index: int) -> str:
        """The file of an image, or its position."""
        files = getattr(self._images, "files", None)
        return str(files[index]) if files else f"unlabelled image {index}"


@dataclass(frozen=True)
class Target:
    """Everything a method may look at. There is no field for source data: source-free by type."""

    support: Support | None = None
    unlabelled: Unlabelled | None = None
    loss: Loss = cross_entropy

    def cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of logits, which may be coarser than the labels."""
        return self.loss(at_labels(logits, labels), labels)

    def need_support(self, who: str) -> Support:
        """The support set, or an error that asks for it."""
        if self.support is None:
            raise FewshiftError(f"{who} needs labelled target images: pass a support set")
        return self.support

    def need_unlabelled(self, who: str) -> Unlabelled:
        """The unlabelled images, or an error that asks for them."""
        if self.unlabelled is None:
            raise FewshiftError(f"{who} needs unlabelled target images: pass them as unlabelled")
        return self.unlabelled

    def some_images(self, who: str, what: str) -> Tensor:
        """A few target images, to probe the network with."""
        if self.support is not None:
            return self.support.images[:2] if isinstance(self.support.images, Tensor) else self.support.images[0][None]
        if self.unlabelled is not None:
            return self.unlabelled.batch(torch.arange(min(2, len(self.unlabelled))))
        raise FewshiftError(f"{who} needs {what}: pass a few target images, as support or unlabelled")

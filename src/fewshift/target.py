"""What a method may look at: a labelled support set and unlabelled images of the target. Never source data."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshift.errors import FewshiftError
from fewshift.losses import IGNORE, Loss, cross_entropy

Augment = Callable[[Tensor], Tensor]  # one preprocessed image -> one image of the same shape


@dataclass(frozen=True)
class Support:
    """Labelled target images, preprocessed. `augment` gives a random view of one image."""

    images: Tensor  # (N, channels, H, W), or whatever the network takes
    labels: Tensor  # (N,), integers
    classes: tuple[str, ...] | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise FewshiftError(
                f"{len(self.images)} images but {len(self.labels)} labels: give one label for each image"
            )
        if not len(self.images):
            raise FewshiftError("the support set is empty: give at least one labelled image of two classes")
        if not self.images.is_floating_point():
            raise FewshiftError(
                f"images are {str(self.images.dtype).removeprefix('torch.')}: preprocess them to floating point first"
            )
        broken = (~torch.isfinite(self.images.flatten(1)).all(1)).nonzero().flatten().tolist()
        if broken:
            raise FewshiftError(f"image {broken[0]} of the support contains NaN or infinity: check its preprocessing")
        if self.labels.is_floating_point() or self.labels.is_complex():
            raise FewshiftError("labels are not integers: give class indices from 0")
        if self.labels.ndim in (0, 2):
            raise FewshiftError(
                f"labels have shape {tuple(self.labels.shape)}: give one class index for each image, or for each pixel"
            )
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise FewshiftError(f"class name '{twice}' occurs twice: name every class once")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def dense(self) -> bool:
        """Whether every pixel has a label of its own."""
        return self.labels.ndim > 1

    @property
    def counts(self) -> dict[int, int]:
        """Images (or labelled pixels) per class, for the classes that occur."""
        labels = self.labels[self.labels != IGNORE] if self.dense else self.labels
        values, counts = labels.unique(return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    @property
    def shots(self) -> int:
        """k: the images of the rarest class that occurs; with pixel labels, all images."""
        return len(self) if self.dense else min(self.counts.values())

    def to(self, images: Tensor) -> Support:
        """The same support, on the device and in the type of `images`."""
        return replace(self, images=images, labels=self.labels.to(images.device, torch.long))

    def views(self, indices: Tensor) -> Tensor:
        """The images at `indices`, each augmented on its own if there is an augmentation."""
        images = self.images[indices]
        if self.images.ndim == 4 and self.images.is_contiguous(memory_format=torch.channels_last):
            images = images.contiguous(memory_format=torch.channels_last)
        if self.augment is None:
            return images
        views = [self.augment(image) for image in images]
        if not all(isinstance(view, Tensor) for view in views):
            raise FewshiftError("augment did not return a tensor: let it return an image like the one it was given")
        if any(view.shape != images.shape[1:] for view in views):
            raise FewshiftError(
                f"augment changed an image of shape {tuple(images.shape[1:])}: let it return the shape it was given"
            )
        return torch.stack(views)

    def check_labels(self, output: tuple[int, ...]) -> None:
        """One sentence when the labels cannot belong to a network that answers an image with this shape."""
        classes, counts = output[0] if output else None, self.counts
        if output and self.labels.shape[1:] != output[1:]:
            raise FewshiftError(
                f"each image has labels of shape {tuple(self.labels.shape[1:])} and is answered with {output[1:]}: "
                "give one label for each answer of the network"
            )
        if not counts:
            raise FewshiftError(f"every pixel of the support is ignored (label {IGNORE}): label some")
        if len(counts) < 2 and not self.dense:
            only = self.class_name(next(iter(counts)))
            raise FewshiftError(f"every support image is of class {only}: add images of at least one other class")
        for label in counts:
            if label < 0 or (classes is not None and label >= classes):
                raise FewshiftError(
                    f"label {label} is out of range for a network with {classes} outputs: "
                    f"use labels from 0 to {(classes or 1) - 1}"
                )
        if self.classes is not None and classes is not None and len(self.classes) != classes:
            raise FewshiftError(
                f"{len(self.classes)} class names for a network with {classes} outputs: "
                "name every output once, in the network's order"
            )

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where no names were given."""
        return f"'{self.classes[label]}'" if self.classes and 0 <= label < len(self.classes) else str(label)


class Unlabelled:
    """Target images without labels: a tensor, or a dataset that is read when a batch is asked for.

    A dataset's items are image tensors, or tuples that begin with one; whatever else they hold is not looked at.
    """

    def __init__(self, images: Any, augment: Augment | None = None) -> None:
        self._images, self.augment = images, augment
        if not len(images):
            raise FewshiftError("there are no unlabelled images: give at least one")

    def __len__(self) -> int:
        return len(self._images)

    def batch(self, indices: Tensor, *, augmented: bool = False) -> Tensor:
        """The images at `indices`, as one tensor."""
        if isinstance(self._images, Tensor):
            images = self._images[indices]
            rows = list(images) if augmented and self.augment else []
        else:
            items = [self._images[index] for index in indices.tolist()]
            rows = [item[0] if isinstance(item, (tuple, list)) else item for item in items]
            shapes = {tuple(row.shape) for row in rows}
            if len(shapes) > 1:
                raise FewshiftError(
                    f"unlabelled images have different shapes {sorted(shapes)[:2]}: preprocess them to one size"
                )
        if augmented and self.augment:
            rows = [self.augment(row) for row in rows]
        images = torch.stack(rows) if rows else images
        if not images.is_floating_point():
            kind = str(images.dtype).removeprefix("torch.")
            raise FewshiftError(f"unlabelled images are {kind}: preprocess them to floating point first")
        if not torch.isfinite(images).all():
            raise FewshiftError("an unlabelled image contains NaN or infinity: check its preprocessing")
        return images

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """(indices, images) of one pass; in random order if a generator is given, from first to last otherwise."""
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        for indices in order.split(size):
            yield indices, self.batch(indices)


@dataclass(frozen=True)
class Target:
    """Everything a method may look at. There is no field for source data: source-free by type."""

    support: Support | None = None
    unlabelled: Unlabelled | None = None
    loss: Loss = cross_entropy

    def need_support(self, who: str) -> Support:
        """The support set, or one sentence asking for it."""
        if self.support is None:
            raise FewshiftError(f"{who} needs labelled target images: pass a support set")
        return self.support

    def need_unlabelled(self, who: str) -> Unlabelled:
        """The unlabelled images, or one sentence asking for them."""
        if self.unlabelled is None:
            raise FewshiftError(f"{who} needs unlabelled target images: pass them as unlabelled")
        return self.unlabelled

    def some_images(self, who: str, what: str) -> Tensor:
        """A few target images, to see how the network runs on them."""
        if self.support is not None:
            return self.support.images
        if self.unlabelled is not None:
            return self.unlabelled.batch(torch.arange(min(2, len(self.unlabelled))))
        raise FewshiftError(f"{who} needs {what}: pass a few target images, as support or unlabelled")


def draw_support(
    labels: Sequence[int] | Tensor,
    k: int,
    seed: int,
    classes: Sequence[str] | None = None,
    *,
    skip_rare: bool = False,
) -> Tensor:
    """Indices of k images per class, uniformly without replacement.

    Each class has its own seeded order of which the first k are taken: the draw for k is part of the draw for
    k + 1, and does not depend on which other classes there are. A class with fewer images is refused, or left out
    with `skip_rare`.
    """
    labels, seed = torch.as_tensor(labels), checked_seed(seed)
    chosen = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        if len(members) < k:
            if skip_rare:
                continue
            name = f"'{classes[label]}'" if classes else str(label)
            raise FewshiftError(
                f"class {name} has {len(members)} images, {k} shots asked: "
                f"add {k - len(members)} or ask for {len(members)}"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + label)
        chosen.append(members[torch.randperm(len(members), generator=generator)[:k]])
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.long)


def others(indices: Tensor, total: int) -> Tensor:
    """The indices below `total` that are not in `indices`: what may be used for evaluation."""
    keep = torch.ones(total, dtype=torch.bool)
    keep[indices] = False
    return keep.nonzero().flatten()


def minibatches(
    total: int, size: int, generator: torch.Generator, *, drop_last: bool = False, at_least: int = 1
) -> list[Tensor]:
    """One epoch: a random order cut into minibatches.

    An incomplete last one is dropped on request, if it is not the only one; one smaller than `at_least` is joined
    to the one before it (batch statistics of a single image mean nothing).
    """
    order = torch.randperm(total, generator=generator)
    batches = list(order.split(size))
    if drop_last and len(batches) > 1 and len(batches[-1]) < size:
        batches.pop()
    if len(batches) > 1 and len(batches[-1]) < at_least:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def checked_seed(seed: int) -> int:
    """One sentence when a seed is none."""
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise FewshiftError(f"seed={seed!r} is no seed: give a whole number from 0 to {2**32 - 1}")
    return seed


_alone = threading.RLock()  # the global random states are one per process


@contextmanager
def private_randomness(seed: int) -> Iterator[torch.Generator]:
    """Everything random in the block follows `seed`; Python's, NumPy's and torch's global states are untouched.

    The generator is for our own choices; the seeded global states are for augmentations, which know no other. Blocks
    in several threads wait for each other.
    """
    checked_seed(seed)
    with _alone, torch.random.fork_rng():
        python, numpy = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield torch.Generator().manual_seed(seed)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

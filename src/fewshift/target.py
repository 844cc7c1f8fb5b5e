"""What a method may look at: a labelled support set and unlabelled images of the target. Never source data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fewshift.errors import FewshiftError
from fewshift.losses import Loss, cross_entropy

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

    def __len__(self) -> int:
        return len(self.images)

    @property
    def counts(self) -> dict[int, int]:
        """Images per class, for the classes that occur."""
        values, counts = self.labels.unique(return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    @property
    def shots(self) -> int:
        """k: the images of the rarest class that occurs."""
        return min(self.counts.values())

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
        if any(view.shape != images.shape[1:] for view in views):
            raise FewshiftError(
                f"augment changed an image of shape {tuple(images.shape[1:])}: let it return the shape it was given"
            )
        return torch.stack(views)

    def check_labels(self, classes: int | None) -> None:
        """One sentence when the labels cannot belong to a network with that many outputs."""
        counts = self.counts
        if len(counts) < 2:
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


@dataclass(frozen=True)
class Target:
    """Everything a method may look at. There is no field for source data: source-free by type."""

    support: Support | None = None
    unlabelled: Tensor | None = None
    loss: Loss = cross_entropy

    def need_support(self, who: str) -> Support:
        """The support set, or one sentence asking for it."""
        if self.support is None:
            raise FewshiftError(f"{who} needs labelled target images: pass a support set")
        return self.support

    def any_images(self, who: str) -> Tensor:
        """Some target images, to see how the network runs on them."""
        if self.support is not None:
            return self.support.images
        if self.unlabelled is not None:
            return self.unlabelled
        raise FewshiftError(f"{who} needs a look at target images: pass a support set or unlabelled images")


def draw_support(labels: Sequence[int] | Tensor, k: int, seed: int, classes: Sequence[str] | None = None) -> Tensor:
    """Indices of k images per class, uniformly without replacement.

    Each class has its own seeded order of which the first k are taken: the draw for k is part of the draw for
    k + 1, and does not depend on which other classes there are.
    """
    labels = torch.as_tensor(labels)
    chosen = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        if len(members) < k:
            name = f"'{classes[label]}'" if classes else str(label)
            raise FewshiftError(
                f"class {name} has {len(members)} images, {k} shots asked: "
                f"add {k - len(members)} or ask for {len(members)}"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + label)
        chosen.append(members[torch.randperm(len(members), generator=generator)[:k]])
    return torch.cat(chosen)


def others(indices: Tensor, total: int) -> Tensor:
    """The indices below `total` that are not in `indices`: what may be used for evaluation."""
    keep = torch.ones(total, dtype=torch.bool)
    keep[indices] = False
    return keep.nonzero().flatten()


def minibatches(total: int, size: int, generator: torch.Generator, *, drop_last: bool = False) -> list[Tensor]:
    """One epoch: a random order cut into minibatches; an incomplete last one is dropped only if there is another."""
    order = torch.randperm(total, generator=generator)
    batches = list(order.split(size))
    if drop_last and len(batches) > 1 and len(batches[-1]) < size:
        batches.pop()
    return batches


@contextmanager
def private_randomness(seed: int) -> Iterator[torch.Generator]:
    """Everything random in the block follows `seed`; Python's, NumPy's and torch's global states are untouched.

    The generator is for our own choices; the seeded global states are for augmentations, which know no other.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield torch.Generator().manual_seed(seed)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

"""What a method may look at: a labelled support set and unlabelled images of the target. Never source data."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift.core.losses import IGNORE, Loss, at_labels, cross_entropy
from fewshift.errors import FewshiftError

Augment = Callable[
    ..., Any
]  # one image -> a view of the same shape; with pixel labels (image, labels) -> a view of both
Stack = Tensor | tuple[Tensor, ...]  # one tensor, or one for each image where their sizes differ
MANY_VALUES = 5  # that an error names
MINIBATCH = 32  # images, where a method is not told otherwise; of pixel labels each image has plenty


@dataclass(frozen=True)
class Support:
    """Labelled target images, preprocessed: a label for each image, or for each pixel.

    `augment` gives a random view of one image. `at_once` is how many images may be in memory together while
    statistics are read; None decides by what there is.
    """

    images: Stack  # (N, channels, H, W), or whatever the network takes
    labels: Stack  # (N,) or (N, H, W), integers
    classes: tuple[str, ...] | None = None
    augment: Augment | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise FewshiftError(
                f"{len(self.images)} images but {len(self.labels)} labels: give one label for each image"
            )
        if not len(self.images):
            raise FewshiftError("the support set is empty: give at least one labelled image of two classes")
        object.__setattr__(self, "images", _stacked(self.images))
        object.__setattr__(self, "labels", _stacked(self.labels))
        for index, image in enumerate(self.images):
            if not image.is_floating_point():
                raise FewshiftError(
                    f"images are {str(image.dtype).removeprefix('torch.')}: preprocess them to floating point first"
                )
            if not torch.isfinite(image).all():
                raise FewshiftError(f"image {index} of the support contains NaN or infinity: check its preprocessing")
        for label in self.labels:
            if label.is_floating_point() or label.is_complex():
                raise FewshiftError("labels are not integers: give class indices from 0")
            if label.ndim == 1 or label.ndim != self.labels[0].ndim:
                raise FewshiftError(
                    f"labels have shape {tuple(label.shape)} for an image: "
                    "give one class index for each image, or for each pixel"
                )
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise FewshiftError(f"class name '{twice}' occurs twice: name every class once")
        if self.at_once is not None and self.at_once < 1:
            raise FewshiftError(f"at_once={self.at_once} is too small: give at least 1")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def dense(self) -> bool:
        """Whether every pixel has a label of its own."""
        return self.labels[0].ndim > 0

    @property
    def pictures(self) -> Tensor:
        """All images as one tensor, or one sentence where their sizes differ."""
        return _one(self.images)

    @property
    def targets(self) -> Tensor:
        """All labels as one tensor, or one sentence where their sizes differ."""
        return _one(self.labels)

    @property
    def counts(self) -> dict[int, int]:
        """Images (or labelled pixels) per class, for the classes that occur."""
        total: Counter[int] = Counter()
        for label in self.labels if self.dense else (self.targets,):
            values, counts = (label[label != IGNORE] if self.dense else label).unique(return_counts=True)
            total.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        return dict(sorted(total.items()))

    @property
    def shots(self) -> int:
        """k: the images of the rarest class that occurs; with pixel labels, all images."""
        return len(self) if self.dense else min(self.counts.values())

    def minibatch(self, size: int | None) -> int:
        """How many images are learned from at a time: the number given, or 32; with pixel labels, one."""
        return size or (1 if self.dense else MINIBATCH)

    def prepared(self, make: Callable[[Tensor], Tensor]) -> Support:
        """The same support with other tensors for its images, and its labels where those are."""
        images = (
            make(self.images) if isinstance(self.images, Tensor) else tuple(make(it[None])[0] for it in self.images)
        )
        device = images[0].device
        if isinstance(self.labels, Tensor):
            return replace(self, images=images, labels=self.labels.to(device, torch.long))
        return replace(self, images=images, labels=tuple(it.to(device, torch.long) for it in self.labels))

    def part(self, indices: Tensor) -> Support:
        """The images at `indices`, in that order."""
        return replace(self, images=_at(self.images, indices), labels=_at(self.labels, indices))

    def chunks(self, size: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Images and labels, `size` together (all by default); one by one where their sizes differ."""
        if isinstance(self.images, Tensor) and isinstance(self.labels, Tensor):
            size = size or len(self)
            return list(zip(self.images.split(size), self.labels.split(size), strict=True))
        return [(image[None], label[None]) for image, label in zip(self.images, self.labels, strict=True)]

    def loss_of(self, loss: Loss, answers: Sequence[Tensor]) -> float:
        """The loss over all images from the answers to their chunks, each of which counts by its labels."""
        chunks = [labels for _, labels in self.chunks(len(answers[0]))]
        if len(chunks) == 1:
            return float(loss(answers[0], chunks[0]))
        weights = [int((labels != IGNORE).sum()) if self.dense else len(labels) for labels in chunks]
        parts = zip(weights, answers, chunks, strict=True)
        return sum(weight * float(loss(logits, labels)) for weight, logits, labels in parts) / sum(weights)

    def padded(self, multiple: int) -> Support:
        """Images whose sides are multiples: repeated at their right and lower edge, where nothing is labelled."""

        def fill(picture: Tensor, mode: str, value: float = 0.0) -> Tensor:
            down, right = (-side % multiple for side in picture.shape[-2:])
            spread = F.pad(picture.reshape(1, -1, *picture.shape[-2:]), (0, right, 0, down), mode, value)
            return spread.reshape(*picture.shape[:-2], *spread.shape[-2:])

        images = tuple(fill(it, "replicate") for it in self.images)
        return replace(self, images=images, labels=tuple(fill(it, "constant", IGNORE) for it in self.labels))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels at `indices`, each augmented on its own if there is an augmentation."""
        if self.augment is None:
            images, labels = _one(_at(self.images, indices)), _one(_at(self.labels, indices))
        else:
            pairs = [self._view(self.images[it], self.labels[it]) for it in indices.tolist()]
            images, labels = (_one(_stacked(tuple(column))) for column in zip(*pairs, strict=True))
        if self.images[0].ndim == 3 and _interleaved(self.images):
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def _view(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        assert self.augment is not None  # batch asks
        try:
            pair = self.augment(image, label) if self.dense else (self.augment(image), label)
        except TypeError as error:
            wanted = "(image, labels)" if self.dense else "one image"
            raise FewshiftError(f"augment cannot be called ({error}): let it take {wanted}") from error
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(it, Tensor) for it in pair)):
            wanted = "an image and its labels" if self.dense else "an image"
            raise FewshiftError(f"augment did not return a tensor: let it return {wanted} like what it was given")
        view, its_label = pair
        if self.dense and view.shape[-its_label.ndim :] != its_label.shape:
            raise FewshiftError(
                f"augment returned an image of shape {tuple(view.shape)} with labels of shape "
                f"{tuple(its_label.shape)}: let it change both alike"
            )
        if not self.dense and view.shape != image.shape:
            raise FewshiftError(
                f"augment changed an image of shape {tuple(image.shape)}: let it return the shape it was given"
            )
        return view, its_label

    def checked(self, output: tuple[int, ...]) -> Support:
        """The support without images that say nothing, or one sentence when its labels cannot belong to a network.

        `output` is the shape of the network's answer to the first image. Answers may be coarser than the labels.
        """
        classes, counts = output[0] if output else None, self.counts
        if output:
            self._check_shapes(output[1:])
        if not counts:
            raise FewshiftError(f"every pixel of the support is ignored (label {IGNORE}): label some")
        if len(counts) < 2 and not self.dense:
            only = self.class_name(next(iter(counts)))
            raise FewshiftError(f"every support image is of class {only}: add images of at least one other class")
        outside = {it: counts[it] for it in counts if it < 0 or (classes is not None and it >= classes)}
        if outside:
            raise FewshiftError(
                f"{_listed(outside, 'pixels' if self.dense else 'images')} out of range for a network with {classes} "
                f"outputs: use labels from 0 to {(classes or 1) - 1}" + (f", {IGNORE} to ignore" if self.dense else "")
            )
        if self.classes is not None and classes is not None and len(self.classes) != classes:
            raise FewshiftError(
                f"{len(self.classes)} class names for a network with {classes} outputs: "
                "name every output once, in the network's order"
            )
        if not self.dense:
            return self
        said = torch.tensor([bool((label != IGNORE).any()) for label in self.labels])
        return self if said.all() else self.part(said.nonzero().flatten())

    def _check_shapes(self, answer: tuple[int, ...]) -> None:
        labels = self.labels[0].shape
        if len(labels) != len(answer):
            raise FewshiftError(
                f"each image has labels of shape {tuple(labels)} and is answered with {answer}: "
                "give one label for each answer of the network"
            )
        if not self.dense:
            return
        for index, (image, label) in enumerate(zip(self.images, self.labels, strict=True)):
            if image.shape[-label.ndim :] != label.shape:
                raise FewshiftError(
                    f"image {index} is {_extent(image.shape[-label.ndim :])} pixels and its labels are "
                    f"{_extent(label.shape)}: give one label for each pixel"
                )
        alike = len(answer) == 2 and abs(answer[0] * labels[1] - answer[1] * labels[0]) <= sum(labels)
        if answer != tuple(labels) and not (alike and answer[0] <= labels[0] and answer[1] <= labels[1]):
            raise FewshiftError(
                f"labels of {_extent(labels)} pixels are answered with {_extent(answer)}, which is no coarser picture "
                "of them: wrap the network so that it answers in the proportions of its input"
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

    def cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of logits that may be coarser than the labels."""
        return self.loss(at_labels(logits, labels), labels)

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
            return self.support.images[:2] if isinstance(self.support.images, Tensor) else self.support.images[0][None]
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


def _stacked(tensors: Any) -> Stack:
    """One tensor where that is possible."""
    if isinstance(tensors, Tensor):
        return tensors
    return torch.stack(tuple(tensors)) if len({it.shape for it in tensors}) == 1 else tuple(tensors)


def _one(tensors: Stack) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    sizes = sorted({_extent(it.shape[-2:]) for it in tensors})
    raise FewshiftError(
        f"images of {len(sizes)} different sizes ({', '.join(sizes[:2])}) cannot go together: "
        "take one at a time (batch_size=1), or preprocess them to one size"
    )


def _at(tensors: Stack, indices: Tensor) -> Stack:
    if isinstance(tensors, Tensor):
        return tensors[indices]
    return _stacked(tuple(tensors[it] for it in indices.tolist()))


def _interleaved(images: Stack) -> bool:
    first = images[:1] if isinstance(images, Tensor) else images[0][None]
    return first.is_contiguous(memory_format=torch.channels_last)


def _extent(shape: Sequence[int]) -> str:
    """Width x height, as pictures are spoken of."""
    return "x".join(map(str, reversed(shape)))


def _listed(counts: Mapping[int, int], what: str) -> str:
    named = ", ".join(
        f"{label} ({count:,} {what if count > 1 else what[:-1]})" for label, count in list(counts.items())[:MANY_VALUES]
    )
    more = f" and {len(counts) - MANY_VALUES} more" if len(counts) > MANY_VALUES else ""
    return f"label{'s' if len(counts) > 1 else ''} {named}{more} {'are' if len(counts) > 1 else 'is'}"

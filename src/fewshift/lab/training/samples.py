"""Labelled images before any change of values, one by one or by the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from fewshift.core import _progress as progress
from fewshift.core.labels import IMAGES, PIXELS, Labels, kind_of
from fewshift.core.layout import channels_last
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes
from fewshift.lab.datasets.domain import Domain
from fewshift.lab.training.augment import Pair, Size
from fewshift.lab.training.recipes import Recipe


class Samples(Protocol):
    """Pixels (channels, height, width), bytes or floats in [0, 1], and a class or a map (height, width) of classes."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int, /) -> Pair:
        """One of them."""


class Joined(ConcatDataset[Pair]):
    """Several samples as one, and which of them each image is from."""

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__(parts)
        self.domains = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))


class Pool:
    """Samples by the batch: decoded into memory if they fit into `room` bytes, else read when they are asked for."""

    def __init__(self, samples: Samples, room: int, what: str = "images read") -> None:
        self._samples = samples
        image, label = samples[0]
        self.labels = kind_of(label[None])
        self._kept = self._read_all(what) if len(samples) * (image.nbytes + label.nbytes) <= room else None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return sum(tensor.nbytes for tensor in self._kept) if self._kept else 0

    def batch(self, indices: Tensor) -> Pair:
        """The images and labels at `indices`."""
        if self._kept is not None:
            return self._kept[0][indices], self._kept[1][indices]
        pairs = [self._samples[index] for index in indices.tolist()]
        images, labels = self.labels.stacked([image for image, _ in pairs], [label for _, label in pairs])
        return channels_last(images), labels

    def batches(self, order: Sequence[Tensor]) -> Iterator[Pair]:
        """One batch after the other; what is not in memory is read by another thread while the last is worked on."""
        if self._kept is not None or not order:
            yield from map(self.batch, order)
            return
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self.batch, order[0])
            for following in (*order[1:], None):
                ready = ahead.result()
                if following is not None:
                    ahead = reader.submit(self.batch, following)
                yield ready

    def _read_all(self, what: str) -> Pair | None:
        image, label = self._samples[0]
        count = len(self)
        # channels side by side, as convolutions want them and as decoders give them
        images = torch.empty((count, *image.shape), dtype=image.dtype, memory_format=torch.channels_last)
        labels = torch.empty((count, *label.shape), dtype=label.dtype)
        for index in progress.track(range(count), what):
            image, label = self._samples[index]
            if image.shape != images.shape[1:]:
                return None  # of different sizes: a batch is made when it is asked for
            images[index], labels[index] = image, label
        return images, labels


@dataclass(frozen=True)
class Decoded:
    """The images and labels of a domain before normalisation."""

    images: Domain | Scenes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> Pair:
        return self.images.pixels(index)


class ImageReading:
    """Squares: `size` times `margin` is read, and `size` is cut out of it."""

    def evaluation(self, steps: Preprocess, base: Preprocess, recipe: Recipe) -> Preprocess:
        """The steps with the recipe's sizes: the middle is cut out, resized as the network's library does."""
        size = recipe.size or steps.crop
        if size is None:
            raise FewshiftError("the data set does not say how large its images are: give a size")
        return replace(steps, interpolation=base.interpolation, resize=round(size * recipe.margin), crop=size)

    def training(self, steps: Preprocess, recipe: Recipe) -> Preprocess:
        """All that evaluation cuts from."""
        return replace(steps, crop=steps.resize, squeeze=steps.squeeze or recipe.squeeze)

    def seen(self, steps: Preprocess, recipe: Recipe, size: Size) -> Size:
        """What evaluation sees."""
        return size if steps.crop is None else (steps.crop, steps.crop)


class SceneReading:
    """Whole scenes, of which training may see parts."""

    def evaluation(self, steps: Preprocess, base: Preprocess, recipe: Recipe) -> Preprocess:
        """The recipe's size is that of the shorter side."""
        return steps if recipe.size is None else replace(steps, resize=recipe.size, crop=None)

    def training(self, steps: Preprocess, recipe: Recipe) -> Preprocess:
        """As evaluation."""
        return steps

    def seen(self, steps: Preprocess, recipe: Recipe, size: Size) -> Size:
        """The recipe's crop, or as much as there is."""
        height, width = size
        return min(recipe.crop or height, height), min(recipe.crop or width, width)


READINGS: dict[Labels, ImageReading | SceneReading] = {IMAGES: ImageReading(), PIXELS: SceneReading()}

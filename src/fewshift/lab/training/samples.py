"""Labelled images before any change of values, one by one or by the batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift.core import _progress as progress
from fewshift.core.losses import IGNORE
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.scenes import Scenes
from fewshift.lab.datasets.domain import Domain

Pair = tuple[Tensor, Tensor]


class Samples(Protocol):
    """Pixels (channels, height, width), bytes or floats in [0, 1], and a class or a map (height, width) of classes."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int, /) -> Pair:
        """One of them."""


@dataclass(frozen=True)
class OfDomain:
    """The images of a domain: one label each."""

    domain: Domain

    def __len__(self) -> int:
        return len(self.domain)

    def __getitem__(self, index: int, /) -> Pair:
        source, steps = self.domain.source[index], self.domain.preprocess
        if isinstance(source, Tensor):
            return source, self.domain.labels[index]
        try:
            return steps.pixels(open_image(source, steps.mode)), self.domain.labels[index]
        except FewshiftError as error:
            if str(source) in str(error):
                raise
            raise FewshiftError(f"{source}: {error}") from error


@dataclass(frozen=True)
class OfScenes:
    """The images of a domain with pixel labels."""

    scenes: Scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int, /) -> Pair:
        return self.scenes.pixels(index)


class Joined:
    """Several samples as one, and which of them each image is from."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))
        self.domains = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(it) for it in parts]))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Pair:
        which = bisect_right(self._ends, index)
        return self._parts[which][index - (self._ends[which - 1] if which else 0)]


class Pool:
    """Samples by the batch: decoded into memory if they fit into `room` bytes, else read when they are asked for."""

    def __init__(self, samples: Samples, room: int, what: str = "images read") -> None:
        self._samples = samples
        image, label = samples[0]
        self.dense = label.ndim > 0
        self._kept = self._read_all(what) if len(samples) * (image.nbytes + label.nbytes) <= room else None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return sum(it.nbytes for it in self._kept) if self._kept else 0

    def batch(self, indices: Tensor) -> Pair:
        """The images and labels at `indices`."""
        if self._kept is not None:
            return self._kept[0][indices], self._kept[1][indices]
        return stacked([self._samples[it] for it in indices.tolist()])

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
            if image.shape != images.shape[1:] and self.dense:
                return None  # of different sizes: padded to that of their batch when they are asked for
            _same(image, images[0])
            images[index], labels[index] = image, label
        return images, labels


def stacked(pairs: Sequence[Pair]) -> Pair:
    """One tensor of images and one of labels; where scenes differ in size, the smaller are padded and ignored there."""
    images, labels = [image for image, _ in pairs], [label for _, label in pairs]
    if labels[0].ndim:
        height, width = (max(it.shape[side] for it in labels) for side in (0, 1))
        around = [(0, width - it.shape[1], 0, height - it.shape[0]) for it in labels]
        images = [F.pad(it, pad) if any(pad) else it for it, pad in zip(images, around, strict=True)]
        labels = [F.pad(it, pad, value=IGNORE) if any(pad) else it for it, pad in zip(labels, around, strict=True)]
    for image in images:
        _same(image, images[0])
    return torch.stack(images).contiguous(memory_format=torch.channels_last), torch.stack(labels)


def _same(image: Tensor, first: Tensor) -> None:
    if image.shape != first.shape:
        raise FewshiftError(
            f"images have different shapes {tuple(first.shape)} and {tuple(image.shape)}: give one size for all"
        )

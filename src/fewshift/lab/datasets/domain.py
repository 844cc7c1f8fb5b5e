"""Domain: the labelled images of one place, decoded when asked for, by this process or by others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fewshift.core.draws import others
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import positions

MANY = 500  # images that are worth the seconds a process takes to start
READ_AT_ONCE = 32  # images a process decodes and hands over together


@dataclass(eq=False)
class Domain:
    """The labelled images of one domain, read when asked for: a dataset of (tensor, label).

    `source` is files, or the pixels themselves, resized and cropped: bytes, or floats in [0, 1].
    """

    source: tuple[Path, ...] | Tensor
    labels: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess
    skip_rare: bool = False  # whether classes with fewer images than shots are left out of a support
    workers: int = 0  # processes that decode when many images are asked for; 0: this one does

    @property
    def files(self) -> tuple[Path, ...] | None:
        """The file of each image; None for pixels in memory."""
        return None if isinstance(self.source, Tensor) else self.source

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, label = self.pixels(index)
        return self.preprocess.normalise(pixels), int(label)

    def pixels(self, index: int) -> tuple[Tensor, Tensor]:
        """One image, resized and cropped, before its values are normalised, and its label."""
        source = self.source[index]
        return source if isinstance(source, Tensor) else _decoded(source, self.preprocess), self.labels[index]

    def images(self, indices: Tensor | Sequence[int]) -> Tensor:
        """The images at `indices` as one tensor."""
        chosen = self._at(indices)
        return self.preprocess.normalise(chosen if isinstance(chosen, Tensor) else self._read(chosen))

    def batches(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of one batch of indices after the other; processes decode the next few meanwhile."""
        if isinstance(self.source, Tensor):
            return map(self.images, batches)
        files = [tuple(self.source[index] for index in positions(batch).tolist()) for batch in batches]
        return map(self.preprocess.normalise, self._decode(files, self.workers))

    def without(self, indices: Tensor | Sequence[int]) -> Tensor:
        """The indices that may be used for evaluation once those at `indices` were seen as support."""
        return others(positions(indices), len(self))

    def subset(self, indices: Tensor | Sequence[int]) -> Domain:
        """The images at `indices`, in that order, with the same classes."""
        return replace(self, source=self._at(indices), labels=self.labels[positions(indices)])

    @property
    def decoded_bytes(self) -> int:
        """The memory that `cached` takes."""
        if isinstance(self.source, Tensor):
            return self.source.nbytes
        return len(self) * _decoded(self.source[0], self.preprocess).nbytes

    def cached(self) -> Domain:
        """The same domain, decoded into memory: one byte for each value, and the same tensors."""
        return self if isinstance(self.source, Tensor) else replace(self, source=self._read(self.source))

    def _at(self, indices: Tensor | Sequence[int]) -> tuple[Path, ...] | Tensor:
        chosen = positions(indices)
        if isinstance(self.source, Tensor):
            return self.source[chosen]
        return tuple(self.source[index] for index in chosen.tolist())

    def _read(self, files: Sequence[Path]) -> Tensor:
        """The pixels of all files, in a tensor that is filled as they come."""
        portions = [files[at : at + READ_AT_ONCE] for at in range(0, len(files), READ_AT_ONCE)]
        workers = self.workers if self.workers > 1 else 0  # this process waits: one other would only take its place
        images, start = torch.empty(0), 0
        for pixels in self._decode(portions, workers):
            if not start:
                images = pixels.new_empty(len(files), *pixels.shape[1:])
            _same(pixels.shape[1:], images.shape[1:])
            images[start : start + len(pixels)] = pixels
            start += len(pixels)
        return images

    def _decode(self, portions: Sequence[Sequence[Path]], workers: int) -> Iterator[Tensor]:
        """The pixels of one portion of files after the other."""
        if not portions or not all(portions):
            raise FewshiftError("no images are asked for: give at least one index")
        decoded = _Portions(portions, self.preprocess)
        source: Iterable[Tensor | FewshiftError] = map(decoded.__getitem__, range(len(decoded)))
        if workers and sum(map(len, portions)) > MANY:
            source = DataLoader(
                decoded,
                batch_size=None,
                num_workers=workers,
                multiprocessing_context=_context(),
                generator=torch.Generator(),  # the loader would draw a seed from the global one
            )
        for pixels in source:
            if isinstance(pixels, FewshiftError):
                raise pixels
            yield pixels


def joined(domains: Sequence[Domain]) -> Domain:
    """All images of several domains, one domain after the other."""
    first, *rest = domains
    if any(domain.classes != first.classes for domain in rest):
        raise FewshiftError("domains with different classes cannot be joined: join those of one data set")
    sources = [domain.source for domain in domains]
    labels = torch.cat([domain.labels for domain in domains])
    if all(isinstance(source, Tensor) for source in sources):
        return replace(first, source=torch.cat(cast(list[Tensor], sources)), labels=labels)
    return replace(
        first, source=tuple(file for files in sources for file in cast(tuple[Path, ...], files)), labels=labels
    )


@dataclass
class _Portions(Dataset[Tensor | FewshiftError]):
    """Files in portions, decoded. An error is handed over as a value: raised in a worker, it comes with a traceback."""

    portions: Sequence[Sequence[Path]]
    steps: Preprocess

    def __len__(self) -> int:
        return len(self.portions)

    def __getitem__(self, index: int) -> Tensor | FewshiftError:
        try:
            images = [_decoded(file, self.steps) for file in self.portions[index]]
            for image in images:
                _same(image.shape, images[0].shape)
        except FewshiftError as error:
            return error
        return torch.stack(images)


def _context() -> BaseContext:
    """Start from a server that was not forked: a fork of this process copies locks that its other threads hold."""
    if sys.platform == "win32":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported by the server once, in seconds, and not by every process
    return context


def _decoded(file: Path, steps: Preprocess) -> Tensor:
    image = open_image(file, steps.mode)
    try:
        return steps.pixels(image)
    except FewshiftError as error:
        raise FewshiftError(f"{file}: {error}") from error


def _same(shape: torch.Size, first: torch.Size) -> None:
    if shape != first:
        raise FewshiftError(
            f"images have different shapes {tuple(first)} and {tuple(shape)}: preprocess them to one crop size"
        )

"""Images read and preprocessed in batches, in this process or by several others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fewshift.core._names import as_text, is_unicode
from fewshift.core._progress import track
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.preprocess import FileSteps, Preprocess


class Unreadable(NamedTuple):
    """An image that could not be read, and why."""

    file: Path
    error: str


class ReadBatch(NamedTuple):
    """A batch of files: the tensors of those that can be read, and why the others cannot."""

    files: list[Path]
    pictures: Tensor | list[Tensor]  # one tensor where their shapes are alike
    broken: list[Unreadable]


def batches_of(files: Sequence[Path], size: int) -> list[Sequence[Path]]:
    """The files in batches of `size`, in order."""
    return [files[start : start + size] for start in range(0, len(files), size)]


def decode(files: Sequence[Path], preprocess: FileSteps, *, strict: bool = False) -> ReadBatch:
    """Read one batch of files; if `strict`, up to the first that cannot be read."""
    steps = preprocess.pixels if isinstance(preprocess, Preprocess) else preprocess
    read: list[Path] = []
    pictures: list[Tensor] = []
    broken: list[Unreadable] = []
    for file in files:
        try:
            _refuse_unwritable(file)
            pictures.append(steps(open_image(file, preprocess.mode)))
            read.append(file)
        except FewshiftError as error:
            broken.append(Unreadable(file, str(error) if as_text(file) in str(error) else f"{file}: {error}"))
            if strict:
                break
    stacked: Tensor | list[Tensor] = pictures
    if len({picture.shape for picture in pictures}) == 1:
        stacked = torch.stack(pictures)
    if isinstance(preprocess, Preprocess):  # once for a batch: bytes are a quarter of the memory
        normalise = preprocess.normalise
        stacked = normalise(stacked) if isinstance(stacked, Tensor) else list(map(normalise, stacked))
    return ReadBatch(read, stacked, broken)


def _refuse_unwritable(file: Path) -> None:
    """One sentence for an image that no table can name, before it is read."""
    if not is_unicode(file):
        raise FewshiftError(f"{as_text(file)}: the name is not UTF-8 text, as a table needs it: rename the file")


def decoded(
    batches: Sequence[Sequence[Path]], preprocess: FileSteps, workers: int = 0, *, strict: bool = False
) -> Iterator[ReadBatch]:
    """One batch of files after the other; `workers` processes read ahead."""
    dataset = _Batches(batches, preprocess, strict)
    progress = track(range(sum(map(len, batches))), "images")
    if not workers:
        for index in range(len(batches)):
            yield dataset[index]
            advance(progress, len(batches[index]))
        advance(progress, 1)
        return
    # a generator of its own: the loader would draw from the global one
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, generator=torch.Generator())
    try:
        for batch, answer in zip(batches, loader, strict=True):
            yield answer
            advance(progress, len(batch))
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise FewshiftError(
            "a process that reads images was ended, which happens when memory runs out: pass fewer --workers (workers=)"
        ) from error
    advance(progress, 1)


def advance(progress: Iterator[int], steps: int) -> None:
    """So many images are done; one more ends the stage."""
    for _ in islice(progress, steps):
        pass


class _Batches(Dataset[ReadBatch]):
    """Batches of images by number."""

    def __init__(self, batches: Sequence[Sequence[Path]], preprocess: FileSteps, strict: bool) -> None:
        self.batches, self.preprocess, self.strict = batches, preprocess, strict

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> ReadBatch:
        return decode(self.batches[index], self.preprocess, strict=self.strict)

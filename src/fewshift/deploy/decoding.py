"""Images read and preprocessed one after the other, in this process or by several others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fewshift.core._progress import track
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.preprocess import Preprocess


class Unreadable(NamedTuple):
    """An image that could not be read, and why."""

    file: Path
    error: str


def decoded(files: Sequence[Path], preprocess: Preprocess, workers: int = 0) -> Iterator[Tensor | Unreadable]:
    """The tensor of each image in turn, or why there is none; `workers` processes read ahead."""
    pictures = _Pictures(files, preprocess)
    if not workers:
        yield from (pictures[index] for index in track(range(len(files)), "images"))
        return
    # a generator of its own: the loader would draw from the global one
    loader = DataLoader(pictures, batch_size=None, num_workers=workers, generator=torch.Generator())
    try:
        for _, answer in zip(track(files, "images"), loader, strict=True):
            yield answer
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise FewshiftError(
            "a process that reads images was ended, which happens when memory runs out: pass fewer --workers (workers=)"
        ) from error


class _Pictures(Dataset[Tensor | Unreadable]):
    """Preprocessed images by number."""

    def __init__(self, files: Sequence[Path], preprocess: Preprocess) -> None:
        self.files, self.preprocess = files, preprocess

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor | Unreadable:
        file = self.files[index]
        try:
            return self.preprocess(open_image(file, self.preprocess.mode))
        except FewshiftError as error:
            return Unreadable(file, str(error) if str(file) in str(error) else f"{file}: {error}")

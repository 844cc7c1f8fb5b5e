"""Labelled images on disk: folders, the way people keep them, and lists of files.

Classes are sorted by name and stored, never taken in the order of a directory listing. No image is skipped silently:
one that cannot be read stops the work and is named.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image, ImageOps
from torch import Tensor

from fewshift.core.labels import IMAGES, Labels, extent
from fewshift.errors import FewshiftError
from fewshift.images.class_names import class_numbers, some
from fewshift.images.formats import is_image_entry, left_out_below, opened, readable, remedy
from fewshift.images.preprocess import FileSteps, in_mode
from fewshift.images.walking import entries_below

LAYOUT = "make one folder per class, such as {root}/cat/1.jpg and {root}/dog/2.jpg"


def open_image(path: str | Path, mode: str) -> Image.Image:
    """Read one image upright, in mode "L" or "RGB"."""
    with opened(path) as image:
        # the other way round, orientation would be lost with the rest of the header
        return in_mode(ImageOps.exif_transpose(image), mode)


def read_tensor(path: Path, steps: FileSteps) -> Tensor:
    """One image as a network takes it; an error names the file."""
    image = open_image(path, steps.mode)
    try:
        return steps(image)
    except FewshiftError as error:
        raise FewshiftError(f"{path}: {error}") from error


def image_names(root: str | Path) -> Iterator[str]:
    """The paths of all images below a folder, sorted; hidden files and folders are left out."""
    known = readable()
    return (str(Path(entry.path)) for entry in entries_below(root) if is_image_entry(entry, known))


def image_files(root: str | Path) -> list[Path]:
    """All images below a folder, sorted; hidden files and folders are left out. One file is a list of one."""
    root = Path(root)
    if root.is_file():
        if not is_image(root):
            better = remedy([root])
            raise FewshiftError(
                f"{root} cannot be read here: {better}"
                if better
                else f"{root} is not an image: give a folder or one of {_suffixes()}"
            )
        return [root]
    if not root.is_dir():
        raise FewshiftError(
            f"{root} is not an ordinary file: give a folder or an image"
            if root.exists()
            else f"no such folder {root}: check the path"
        )
    files = [Path(name) for name in image_names(root)]
    if not files:
        unread = left_out_below(root)
        if unread is not None and unread.files:
            raise FewshiftError(
                f"no images below {root} that can be read, but {some([file.name for file in unread.files], 3)}: "
                f"{remedy(unread.files)}"
            )
        raise FewshiftError(f"no images below {root}: put some there ({_suffixes()})")
    return files


@dataclass(frozen=True)
class ImageFolder:
    """Labelled images on disk, read on access: a dataset of (tensor, label).

    `labels[i]` is the position of the class of `files[i]` in `classes`, or where those have no names the output of the
    network.
    """

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...] | None
    preprocess: FileSteps
    kind: ClassVar[Labels] = IMAGES

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return read_tensor(self.files[index], self.preprocess), self.labels[index]

    def subset(self, indices: Sequence[int]) -> ImageFolder:
        """The images at `indices`, in that order, with the same classes."""
        files, labels = tuple(self.files[at] for at in indices), tuple(self.labels[at] for at in indices)
        return replace(self, files=files, labels=labels)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All images as one float tensor (n, channels, height, width), all labels as one integer tensor (n,)."""
        images = [image for image, _ in (self[index] for index in range(len(self)))]
        for file, image in zip(self.files, images, strict=True):
            if image.shape != images[0].shape:
                first, other = (extent(shape[-2:]) for shape in (images[0].shape, image.shape))
                raise FewshiftError(
                    f"{self.files[0]} is {first} pixels and {file} is {other}: give a crop size to make them equal"
                )
        return torch.stack(images), torch.tensor(self.labels)


def labelled_folder(root: str | Path, preprocess: FileSteps, classes: Sequence[str] | None = None) -> ImageFolder:
    """Read a folder of class folders.

    Without `classes`, the sorted folder names are the classes. With `classes`, the names of a network's outputs, labels
    are positions in it: a folder may lack some of them, but cannot add any. Its names may differ in case.
    """
    root = Path(root)
    if not root.is_dir():
        raise FewshiftError(f"no such folder {root}: {LAYOUT.format(root=root)}")
    entries = [path for path in root.iterdir() if not is_hidden(path, root)]
    folders = {path.name: path for path in sorted(entries, key=lambda path: path.name) if path.is_dir()}
    if not folders:
        raise FewshiftError(f"{root} has no class folders: {LAYOUT.format(root=root)}")
    if strays := sorted(path for path in entries if is_image(path)):
        raise FewshiftError(f"{strays[0]} lies beside the class folders: move it into one of them or away")
    known = tuple(folders) if classes is None else tuple(classes)
    numbers = class_numbers(folders, known, str(root))
    images = {name: _class_images(name, folder) for name, folder in folders.items()}
    return ImageFolder(
        files=tuple(file for files in images.values() for file in files),
        labels=tuple(numbers[name] for name, files in images.items() for _ in files),
        classes=known,
        preprocess=preprocess,
    )


WHOLE = re.compile(r"-?\d+(\.0+)?")  # a number of an output, as tables of numbers may have it


def labelled_files(
    rows: Sequence[tuple[Path, Any]],
    preprocess: FileSteps,
    classes: Sequence[str] | None,
    whose: str,
) -> ImageFolder:
    """Files, each with the name of its class or the number of its output.

    Labels that are all written as numbers are outputs, unless these are the names of classes. Without `classes`, the
    sorted names are the classes.
    """
    if not rows:
        raise FewshiftError(f"{whose} has no labelled images: label some")
    labels = [label if isinstance(label, str) else _number(label, file) for file, label in rows]
    names = sorted({label for label in labels if isinstance(label, str)})
    if names and all(map(WHOLE.fullmatch, names)) and not set(names) <= set(classes or ()):
        labels, names = [int(float(label)) for label in labels], []
    if names and classes is None and len(names) < len(set(labels)):
        raise FewshiftError(f"{whose} labels some images by name and some by number: pass classes, or use one of them")
    known = tuple(names) or None if classes is None else tuple(classes)
    numbers = class_numbers(names, known or (), whose)
    positions = [numbers[label] if isinstance(label, str) else label for label in labels]
    for (file, label), position in zip(rows, positions, strict=True):
        if position < 0 or (known is not None and position >= len(known)):
            last = "" if known is None else f" to {len(known) - 1}"
            raise FewshiftError(f"{file} has the label {label} in {whose}: use names, or numbers from 0{last}")
    return ImageFolder(tuple(file for file, _ in rows), tuple(positions), known, preprocess)


def _number(label: Any, file: Path) -> int:
    try:
        return operator.index(label)
    except TypeError:
        raise FewshiftError(
            f"{file} has the label {label!r}: give the name of a class, or the number of an output"
        ) from None


def _class_images(name: str, folder: Path) -> list[Path]:
    try:
        return image_files(folder)
    except FewshiftError as error:
        unread = left_out_below(folder)
        better = remedy(unread.files) if unread else None
        raise FewshiftError(
            f"class {name!r} has no images{f' that can be read here: {better}' if better else ''}"
            f"{', or' if better else ':'} put some into {folder} or remove it"
        ) from error


def is_image(path: Path) -> bool:
    """Whether this is an image file that can be read here, by its suffix."""
    return path.suffix.lower() in readable() and (path.is_file() or path.is_symlink())


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a file or one of its folders below `root` begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _suffixes() -> str:
    return " ".join(sorted(readable()))

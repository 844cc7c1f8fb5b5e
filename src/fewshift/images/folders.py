"""Folders of images, the way people keep them.

Classes are sorted by name and stored, never taken in the order of a directory listing. No image is skipped silently:
one that cannot be read stops the work and is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image, ImageOps
from torch import Tensor

from fewshift.core.labels import IMAGES, Labels, extent
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess, in_mode, opened

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
LAYOUT = "make one folder per class, such as {root}/cat/1.jpg and {root}/dog/2.jpg"


def open_image(path: str | Path, mode: str) -> Image.Image:
    """Read one image upright, in mode "L" or "RGB"."""
    with opened(path) as image:
        # the other way round, orientation would be lost with the rest of the header
        return in_mode(ImageOps.exif_transpose(image), mode)


def image_files(root: str | Path) -> list[Path]:
    """All images below a folder, sorted; hidden files and folders are left out. One file is a list of one."""
    root = Path(root)
    if root.is_file():
        if not _is_image(root):
            raise FewshiftError(f"{root} is not an image: give a folder or one of {_suffixes()}")
        return [root]
    if not root.is_dir():
        raise FewshiftError(f"no such folder {root}: check the path")
    files = sorted(path for path in root.rglob("*") if _is_image(path) and not is_hidden(path, root))
    if not files:
        raise FewshiftError(f"no images below {root}: put some there ({_suffixes()})")
    return files


@dataclass(frozen=True)
class ImageFolder:
    """Labelled images on disk, read on access: a dataset of (tensor, label).

    `labels[i]` is the position of the class of `files[i]` in `classes`.
    """

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess
    kind: ClassVar[Labels] = IMAGES

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = open_image(self.files[index], self.preprocess.mode)
        try:
            return self.preprocess(image), self.labels[index]
        except FewshiftError as error:
            raise FewshiftError(f"{self.files[index]}: {error}") from error

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


def labelled_folder(root: str | Path, preprocess: Preprocess, classes: Sequence[str] | None = None) -> ImageFolder:
    """Read a folder of class folders.

    Without `classes`, the sorted folder names are the classes. With `classes`, the names of a network's outputs, labels
    are positions in it: a folder may lack some of them, but cannot add any.
    """
    root = Path(root)
    if not root.is_dir():
        raise FewshiftError(f"no such folder {root}: {LAYOUT.format(root=root)}")
    entries = [path for path in root.iterdir() if not is_hidden(path, root)]
    folders = {path.name: path for path in sorted(entries, key=lambda path: path.name) if path.is_dir()}
    if not folders:
        raise FewshiftError(f"{root} has no class folders: {LAYOUT.format(root=root)}")
    if strays := sorted(path for path in entries if _is_image(path)):
        raise FewshiftError(f"{strays[0]} lies beside the class folders: move it into one of them or away")
    known = tuple(folders) if classes is None else tuple(classes)
    if unknown := [name for name in folders if name not in known]:
        raise FewshiftError(
            f"{root} has a class {unknown[0]!r} that the network does not know: rename or remove the folder, "
            f"the known classes are {some(known)}"
        )
    images = {name: _class_images(name, folder) for name, folder in folders.items()}
    return ImageFolder(
        files=tuple(file for files in images.values() for file in files),
        labels=tuple(known.index(name) for name, files in images.items() for _ in files),
        classes=known,
        preprocess=preprocess,
    )


def _class_images(name: str, folder: Path) -> list[Path]:
    try:
        return image_files(folder)
    except FewshiftError as error:
        raise FewshiftError(f"class {name!r} has no images: put some into {folder} or remove it") from error


def _is_image(path: Path) -> bool:
    # a broken link counts: opening it raises an error, skipping it would hide it
    return path.suffix.lower() in IMAGE_SUFFIXES and (path.is_file() or path.is_symlink())


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a file or one of its folders below `root` begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _suffixes() -> str:
    return " ".join(sorted(IMAGE_SUFFIXES))


def some(things: Sequence[Any], most: int = 20) -> str:
    """The first few things, and how many more there are."""
    rest = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + rest

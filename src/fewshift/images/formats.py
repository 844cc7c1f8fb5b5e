"""Which image files can be read here, which only look like images, and which files of a folder are left out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from PIL import features

from fewshift.core.left_out import LeftOut

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
HEIC, AVIF = frozenset({".heic", ".heif"}), frozenset({".avif"})
UNREAD = frozenset(
    {".arw", ".cr2", ".cr3", ".dng", ".exr", ".hdr", ".j2k", ".jfif", ".jp2", ".jpe", ".jxl", ".nef", ".orf", ".psd"}
    | {".raf", ".raw", ".rw2", ".svg", ".tga"}
)
EXTRA = 'pip install "fewshift[heic]"'


def readable() -> frozenset[str]:
    """The suffixes that are read here: HEIC needs pillow-heif, AVIF a Pillow that knows it."""
    heic = HEIC if find_spec("pillow_heif") else frozenset[str]()
    avif = AVIF if "avif" in features.modules and features.check("avif") else frozenset[str]()
    return IMAGE_SUFFIXES | heic | avif


def looks_like_an_image(path: Path) -> bool:
    """Whether a suffix is that of an image, whether it can be read here or not."""
    return path.suffix.lower() in IMAGE_SUFFIXES | HEIC | AVIF | UNREAD


def unreadable(files: Iterable[Path]) -> list[Path]:
    """The images among these files whose format cannot be read here."""
    return [file for file in files if looks_like_an_image(file) and file.suffix.lower() not in readable()]


def remedy(files: Iterable[Path]) -> str | None:
    """What makes images readable that are not: the extra, another format; None if there are none such."""
    suffixes = {file.suffix.lower() for file in files if looks_like_an_image(file)} - readable()
    steps = [f"{EXTRA} to read HEIC and AVIF"] * bool(suffixes & (HEIC | AVIF))
    others = sorted(suffixes - HEIC - AVIF)
    return ", and ".join(steps + [f"save {' '.join(others)} as JPEG or PNG"] * bool(others)) or None


def teach_pillow(path: Path) -> None:
    """Let Pillow read HEIC if this is such a file: importing the library takes a third of a second."""
    if path.suffix.lower() in HEIC and find_spec("pillow_heif"):
        import_module("pillow_heif").register_heif_opener()


def left_out_below(root: str | Path) -> LeftOut | None:
    """The files of a folder that are not read, hidden ones too; None if there are none. Images among them are named."""
    known = readable()
    files = [path for path in _files_below(Path(root)) if path.name.startswith(".") or path.suffix.lower() not in known]
    images = (path for path in files if looks_like_an_image(path) and not path.name.startswith("."))
    return LeftOut(len(files), tuple(sorted(images))) if files else None


def _files_below(root: Path) -> Iterator[Path]:
    """All files at any depth; hidden folders are not looked into."""
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place) / name for name in files)

"""Which image files are meant: folders, files, patterns, lists of names, and names on standard input."""

from __future__ import annotations

import codecs
import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, overload

from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files, image_names
from fewshift.images.formats import readable
from fewshift.images.inputs import images_below

Files = str | Path | Sequence[str | Path]
"""A folder of images, an image file, a pattern ("photos/*.jpg"), a list ("@files.txt"), "-", or several of these."""


class Names(Sequence[Path]):
    """Paths that are kept as text: of millions of files, a `Path` each would take most of the memory."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> Names: ...
    def __getitem__(self, index: int | slice) -> Path | Names:
        return Names(self.names[index]) if isinstance(index, slice) else Path(self.names[index])

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Names) else other)

    __hash__ = None  # type: ignore[assignment]


class FileList(NamedTuple):
    """Image files as their paths were given, and the folder that contains them all."""

    root: Path
    files: Sequence[Path]


def listed(images: Files) -> FileList:
    """The image files that are meant, in the order given; those of a folder are sorted."""
    if isinstance(images, (str, Path)) and _exists(images):
        root = images_below(images)
        names = list(image_names(root)) if root.is_dir() else []
        return FileList(root, Names(names) if names else image_files(root))  # which says why there are none
    paths = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    other = next((path for path in paths if not isinstance(path, str | os.PathLike)), None)
    if other is not None:
        raise FewshiftError(
            f"{type(other).__name__} is no image file: give a folder, a file or a list of files, and call the network "
            "itself on tensors"
        )
    files = [file for path in paths for file in _meant_by(path)]
    if not files:
        raise FewshiftError("there are no images: give some")
    return FileList(Path(os.path.commonpath([plain(file.parent) for file in files])), files)


def _meant_by(path: str | Path) -> list[Path]:
    """The image files that one word stands for."""
    text = str(path)
    if _exists(path):
        return image_files(images_below(path))
    if text == "-":
        return _named_in(sys.stdin.buffer.read(), "standard input")
    if text.startswith("@"):
        try:
            return _named_in(Path(text[1:]).read_bytes(), text[1:])
        except OSError as error:
            raise FewshiftError(f"cannot read the list {text[1:]}: {error.strerror}: check the path") from error
    if glob.has_magic(text):
        matches = [Path(match) for match in sorted(glob.glob(text, recursive=True))]  # noqa: PTH207 - absolute patterns too
        if files := [match for match in matches if match.suffix.lower() in readable()]:
            return files
        raise FewshiftError(f"no image matches {text}: check the pattern")
    return image_files(path)


def _named_in(content: bytes, where: str) -> list[Path]:
    """The files of a list, one name in a line, or as `find -print0` writes them; a folder stands for its images.

    A name without a file stays in the list: it is reported like a damaged image, and does not stop the others.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    separator = b"\0" if b"\0" in content else b"\n"
    names = [os.fsdecode(name.strip(b"\r") if separator == b"\n" else name) for name in content.split(separator)]
    paths = [Path(name) for name in names if name.strip()]
    if not paths:
        raise FewshiftError(f"{where} names no images: write one path in each line")
    return [file for path in paths for file in (image_files(path) if _is_folder(path) else [path])]


def plain(path: Path) -> Path:
    """The absolute path without "..", as it is spelled: no link is followed."""
    return Path(os.path.normpath(path.absolute()))


def _exists(path: str | Path) -> bool:
    """Whether there is such a file or folder; a name that is too long, or in a closed folder, names none."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    return _exists(path) and path.is_dir()

"""The places of a fleet: a folder or a list of labelled images each, named by what is in it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewshift.core._files import read_ordinary
from fewshift.errors import FewshiftError
from fewshift.images.folders import is_hidden, is_image
from fewshift.images.label_lists import read_label_list
from fewshift.images.scenes import scene_layout
from fewshift.images.walking import entries_below

LISTS = (".csv", ".tsv", ".json")
LAYOUT = "make one folder for each place, such as {root}/camera-7/cat/1.jpg"


@dataclass(frozen=True)
class Place:
    """A place, where its labelled images are, and a word for these, the network and the options."""

    name: str
    path: Path
    key: str

    @property
    def fit_key(self) -> str:
        """The key: places share nothing but the network."""
        return self.key

    def to_json(self) -> dict[str, Any]:
        """Name and path."""
        return {"name": self.name, "path": str(self.path)}


def paths_below(root: str | Path) -> dict[str, Path]:
    """The folders and lists of the places below a folder, by the names of the places."""
    root = Path(root).absolute()
    if not root.is_dir():
        raise FewshiftError(f"no such folder {root}: {LAYOUT.format(root=root)}")
    paths = sorted(path for path in root.iterdir() if not is_hidden(path, root) and _is_place(path))
    if not paths:
        raise FewshiftError(f"{root} has no places: {LAYOUT.format(root=root)}")
    names = [path.name if path.is_dir() else path.stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise FewshiftError(f"{root} has two places called {name}: rename one")
    if all(map(_is_class, paths)):
        raise FewshiftError(
            f"{root} has folders of images, as one place has: {LAYOUT.format(root=root)}, or adapt to one place with "
            "--support"
        )
    return dict(zip(names, paths, strict=True))


def named(paths: Mapping[str, Path], settings: str) -> list[Place]:
    """The places; `settings` is everything else that an adaptation depends on."""
    return [Place(name, path, _key(name, path, settings)) for name, path in paths.items()]


def common_classes(paths: Iterable[Path]) -> tuple[str, ...] | None:
    """The class folders that most places have, sorted; None where no place has any.

    A place that lacks a class must not give the others its number.
    """
    folders = [path for path in paths if path.is_dir() and scene_layout(path) is None]
    counts = Counter(
        tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))
        for folder in folders
    )
    counts.pop((), None)
    return max(counts, key=lambda names: (counts[names], len(names))) if counts else None


def _is_place(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in LISTS


def _is_class(path: Path) -> bool:
    """Whether a folder has images and no folders."""
    entries = list(path.iterdir()) if path.is_dir() else []
    return any(map(is_image, entries)) and not any(entry.is_dir() for entry in entries)


def _key(name: str, path: Path, settings: str) -> str:
    """Sixteen hexadecimal digits that change with the settings and with any file of a place."""
    facts = hashlib.sha256(json.dumps([name, settings]).encode())
    for file, label in _files(path):
        facts.update(json.dumps([label, _content(file)]).encode())
    return facts.hexdigest()[:16]


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Every file of a place, and what it is to it."""
    if path.is_dir():
        files = (Path(entry.path) for entry in entries_below(path) if not entry.name.startswith("."))
        yield from ((file, str(file.relative_to(path))) for file in files if file.is_file())
        return
    yield path, "list"
    with suppress(FewshiftError):  # adapting says what is wrong with the list
        yield from ((image, f"{image} {label}") for image, label in read_label_list(path).rows)


def _content(file: Path) -> str:
    try:
        return hashlib.sha256(read_ordinary(file)).hexdigest()
    except OSError as error:
        return str(error.strerror)

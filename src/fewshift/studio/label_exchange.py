"""Labels from and for other programs: class folders, tables (CSV), and exports of Label Studio."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fewshift.core._files import whole
from fewshift.core._names import as_cell, write_rows
from fewshift.errors import FewshiftError
from fewshift.images.class_names import class_numbers
from fewshift.images.folders import image_files, is_hidden
from fewshift.images.label_lists import is_label_list, read_label_list
from fewshift.studio.gallery import Gallery

TABLE, TASKS, FOLDERS = "labels.csv", "label-studio.json", "classes"


@dataclass(frozen=True)
class TakenIn:
    """Labels of images by their names in the gallery, and how many labels belong to images elsewhere."""

    labels: Mapping[str, str]
    elsewhere: int = 0


# --- reading


def class_folders(gallery: Gallery, classes: Sequence[str]) -> TakenIn:
    """Labels from folders among the images that are named like classes."""
    if gallery.scenes is not None:
        return TakenIn({})
    by_name = {name.casefold(): name for name in classes}
    labels = {}
    for image in gallery.images:
        first, inside, _ = image.name.partition("/")
        if inside and first.casefold() in by_name:
            labels[image.name] = first if first in classes else by_name[first.casefold()]
    return TakenIn(labels)


def read_labels(source: str | Path, gallery: Gallery, classes: Sequence[str]) -> TakenIn:
    """Labels from a table, an export of Label Studio, COCO-style JSON, or a folder of class folders."""
    rows = read_label_list(source).rows if is_label_list(source) else _folder_rows(Path(source))
    names = {label: label for _, label in rows}
    if not set(names) <= set(classes):
        numbers = class_numbers(sorted(names), classes, str(source))
        names = {label: classes[number] for label, number in numbers.items()}
    labels, elsewhere = {}, 0
    for file, label in rows:
        number = gallery.number_of(file)
        if number is None:
            elsewhere += 1
        else:
            labels[gallery[number].name] = names[label]
    return TakenIn(labels, elsewhere)


def class_names_in(source: str | Path) -> tuple[str, ...] | None:
    """The classes in labels, sorted: what outputs without names are called, as in `adapt`; None if all are numbers."""
    rows = read_label_list(source).rows if is_label_list(source) else _folder_rows(Path(source))
    names = {label for _, label in rows}
    return None if all(name.isdecimal() for name in names) else tuple(sorted(names))


def _folder_rows(root: Path) -> list[tuple[Path, str]]:
    if not root.is_dir():
        raise FewshiftError(f"no such folder or file {root}: give class folders, a CSV or a JSON export")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not is_hidden(path, root))
    if not folders:
        raise FewshiftError(f"{root} has no class folders: give class folders, a CSV or a JSON export")
    return [(file, folder.name) for folder in folders for file in image_files(folder)]


# --- writing


def write_table(labels: Mapping[Path, str], path: Path) -> Path:
    """A line with path and label for each image; paths are relative to the table."""
    text = io.StringIO(newline="")
    write_rows(text, [["path", "label"], *([as_cell(_relative(file, path)), label] for file, label in labels.items())])
    return _written(path, text.getvalue())


def write_tasks(labels: Mapping[Path, str], path: Path, root: Path) -> Path:
    """Tasks as Label Studio exports and imports them.

    `image` is where its local storage has the file if its document root is the folder around the images; `path` is
    relative to this file.
    """
    tasks = [_task(number, file, label, path, root) for number, (file, label) in enumerate(labels.items(), 1)]
    return _written(path, json.dumps(tasks, indent=1) + "\n")


def _task(number: int, file: Path, label: str, path: Path, root: Path) -> dict[str, Any]:
    served = Path(root.absolute().name) / file.relative_to(root)
    choice = {"type": "choices", "from_name": "label", "to_name": "image", "value": {"choices": [label]}}
    address = f"/data/local-files/?d={quote(os.fsencode(served))}"
    return {
        "id": number,
        "data": {"path": _relative(file, path), "image": address},
        "annotations": [{"result": [choice], "was_cancelled": False}],
    }


def write_class_folders(labels: Mapping[Path, str], folder: Path, root: Path, *, links: bool = False) -> Path:
    """A new folder with a folder of copies, or of links, for each class; returns where it is."""
    for name in set(labels.values()):
        if not name or name in (".", "..") or "/" in name or "\0" in name or name.startswith("."):
            raise FewshiftError(f"the class {name!r} cannot be the name of a folder: write a CSV")
    place = _free(folder)
    put: Callable[[Path, Path], Any] = _link if links else shutil.copy2
    draft = place.with_name(f".{place.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for file, label in labels.items():
            target = draft / label / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            put(file, target)
        draft.rename(place)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise FewshiftError(f"cannot write {place}: {error.strerror}: choose another folder") from error
    return place


def _link(file: Path, target: Path) -> None:
    target.symlink_to(file.resolve())


def _free(folder: Path) -> Path:
    """The folder, or with a number where there is one of that name."""
    number = 1
    place = folder
    while place.exists():
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place


def _relative(file: Path, table: Path) -> str:
    return Path(os.path.relpath(file.absolute(), table.absolute().parent)).as_posix()


def _written(path: Path, text: str) -> Path:
    with whole(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path

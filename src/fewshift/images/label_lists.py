"""Lists of labelled image files: tables (CSV), exports of Label Studio, and COCO-style JSON."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from fewshift.core._files import read_ordinary
from fewshift.core.left_out import LeftOut
from fewshift.errors import FewshiftError
from fewshift.files.parsing import parsed_json
from fewshift.images.class_names import plain_name
from fewshift.images.formats import looks_like_an_image

TABLES, SUFFIXES = (".csv", ".tsv", ".txt"), (".csv", ".tsv", ".txt", ".json")
DELIMITERS = "\t;,"
PATHS = ("path", "file", "filename", "filepath", "image", "imagepath", "img")  # plain names of columns
LABELS = ("label", "labels", "class", "classname", "category", "choice", "target")
UPLOAD = re.compile(r"^[0-9a-f]{8}-")  # what Label Studio writes before the names of uploaded files


class LabelList(NamedTuple):
    """Image files and the names of their classes; images that have no label are left out."""

    rows: list[tuple[Path, str]]
    left_out: LeftOut | None


class ListedImage(NamedTuple):
    """An image as a list names it, and all labels it has there."""

    image: str
    labels: frozenset[str]
    where: str  # line 3, task 12


def is_label_list(path: str | Path) -> bool:
    """Whether this is meant to be a file with labels, and not a folder."""
    return Path(path).suffix.lower() in SUFFIXES and not Path(path).is_dir()


def read_label_list(path: str | Path) -> LabelList:
    """The labelled images of a file: paths are relative to it.

    A table has a path and a label in each line, separated by tabs, semicolons or commas; a header may name the columns.
    JSON is what Label Studio exports (JSON or JSON-MIN), or has COCO's images, annotations and categories. There,
    images may also lie in images/ beside the file or its folder. Images without a label are left out; several
    different ones for an image are an error.
    """
    path = Path(path)
    try:
        text = read_ordinary(path).decode("utf-8-sig")
    except OSError as error:
        raise FewshiftError(f"cannot read {path}: {error.strerror}: check the path") from error
    except UnicodeDecodeError as error:
        raise FewshiftError(f"{path} is not UTF-8 text: save it as UTF-8") from error
    table = path.suffix.lower() in TABLES
    entries = _table_entries(text, path) if table else _json_entries(text, path)
    labels: dict[Path, str] = {}
    for entry in (entry for entry in entries if entry.labels):
        file = _located(entry, _written(entry, path) if table else _exported(entry, path), path)
        several = entry.labels | ({labels[file]} if file in labels else set())
        if len(several) > 1:
            raise FewshiftError(
                f"{file} has {len(several)} labels in {path} ({', '.join(sorted(several))}; {entry.where}): leave one"
            )
        labels[file] = next(iter(several))
    unlabelled = tuple(path.parent / _path_of(entry.image) for entry in entries if not entry.labels)
    return LabelList(list(labels.items()), LeftOut(len(unlabelled), unlabelled) if unlabelled else None)


# --- tables


def _table_entries(text: str, path: Path) -> list[ListedImage]:
    lines = _cells(text, path)
    _, first = lines[0]
    columns = (0, 1)
    if not any(looks_like_an_image(Path(cell)) or "/" in cell or "\\" in cell for cell in first):
        columns, lines = _columns(first, path), lines[1:]
    elif len(first) > 2:
        raise FewshiftError(f"{path} has {len(first)} columns and no header: write 'path,label' above those two")
    entries = []
    for number, cells in lines:
        image, label = (cells[column].strip() if column < len(cells) else "" for column in columns)
        if not image or not label:
            raise FewshiftError(f"line {number} of {path} has no {'label' if image else 'path'}: write 'path,label'")
        entries.append(ListedImage(image, frozenset({label}), f"line {number}"))
    return entries


def _cells(text: str, path: Path) -> list[tuple[int, list[str]]]:
    """Line numbers and cells, by the delimiter that cuts the most of the lines into as many cells as the first."""
    best: list[tuple[int, list[str]]] = []
    most = 0
    for delimiter in DELIMITERS:
        reader = csv.reader(text.splitlines(), delimiter=delimiter, skipinitialspace=True)
        try:
            lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
        except csv.Error as error:
            raise FewshiftError(f"line {reader.line_num} of {path} cannot be read ({error}): correct it") from error
        alike = sum(len(cells) == len(lines[0][1]) > 1 for _, cells in lines)
        if alike > most:
            best, most = lines, alike
    if not best:
        raise FewshiftError(f"{path} is no table of paths and labels: write a line 'cat/1.jpg,cat' for each image")
    return best


def _columns(header: Sequence[str], path: Path) -> tuple[int, int]:
    """The columns of the path and of the label: by name, or the first two where there are no others."""
    names = [plain_name(name) for name in header]
    image = next((names.index(name) for name in PATHS if name in names), None)
    label = next((names.index(name) for name in LABELS if name in names), None)
    if image is not None and label is not None:
        return image, label
    if len(header) == 2:
        return 0, 1
    raise FewshiftError(f"{path} has the columns {', '.join(header)}: name those that count 'path' and 'label'")


# --- JSON


def _json_entries(text: str, path: Path) -> list[ListedImage]:
    content = parsed_json(text, path, "export it again")
    try:
        if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
            return list(_coco_entries(content))
        if isinstance(content, list) and all(isinstance(task, dict) for task in content):
            return [_task_entry(task, f"task {task.get('id', at)}") for at, task in enumerate(content, 1)]
    except (LookupError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise FewshiftError(
            f"{path} cannot be read ({type(error).__name__}: {error}): give an export of Label Studio, or COCO's "
            "images, annotations and categories"
        ) from error
    raise FewshiftError(
        f"{path} has no labelled images: give an export of Label Studio, or COCO's images, annotations and categories"
    )


def _coco_entries(content: Mapping[str, Any]) -> Iterator[ListedImage]:
    names = {category["id"]: str(category["name"]) for category in content.get("categories", [])}
    labels = defaultdict(set)
    for annotation in content["annotations"]:
        number = annotation["category_id"]
        labels[annotation["image_id"]].add(names.get(number, str(number)))
    for image in content["images"]:
        yield ListedImage(_address(image["file_name"]), frozenset(labels[image["id"]]), f"image {image['id']}")


def _task_entry(task: Mapping[str, Any], where: str) -> ListedImage:
    """A task of Label Studio: as JSON with all annotations, or as JSON-MIN with a column for the choice."""
    if "data" not in task:
        columns = {plain_name(name): value for name, value in task.items()}
        image = _address(next(columns[name] for name in PATHS if name in columns))
        value = next((columns[name] for name in LABELS if name in columns), None)
        return ListedImage(image, frozenset(_names(value)), where)
    texts = [value for value in task["data"].values() if isinstance(value, str)]
    image = next((text for text in texts if looks_like_an_image(_path_of(text))), texts[0])
    labels = [
        name
        for annotation in task.get("annotations", task.get("completions", []))
        if not annotation.get("was_cancelled")
        for result in annotation["result"]
        for name in _names(result["value"].get(result["type"]))
    ]
    return ListedImage(image, frozenset(labels), where)


def _address(value: Any) -> str:
    """Where an image is said to be."""
    if not isinstance(value, str):
        raise TypeError(f"the address of an image is of type {type(value).__name__}")
    return value


def _names(value: Any) -> Iterable[str]:
    """The labels in a choice: none, one or several."""
    if isinstance(value, dict):
        value = value.get("choices")
    return [value] if isinstance(value, str) else [str(name) for name in value or ()]


# --- where the images are


def _path_of(address: str) -> Path:
    """The path in an address: of a file, a URL, or a file that Label Studio serves (?d=PATH)."""
    try:
        parts = urlsplit(address) if "://" in address or address.startswith("/data/") else None
    except ValueError:  # it only looks like a URL
        parts = None
    if parts is None:
        return Path(address)
    return Path(parse_qs(parts.query).get("d", [unquote(parts.path)])[0].lstrip("/"))


def _written(entry: ListedImage, source: Path) -> Iterator[Path]:
    """Where the image of a table may be: beside it, with either kind of slash."""
    yield from (source.parent / entry.image, source.parent / entry.image.replace("\\", "/"))


def _exported(entry: ListedImage, source: Path) -> Iterator[Path]:
    """Where the image of an export may be: exports put folders, and uploads letters, before the name it had."""
    path = _path_of(entry.image)
    ends = [path, *(Path(*path.parts[at:]) for at in range(1, len(path.parts)))]
    for end in [*ends, Path(UPLOAD.sub("", path.name))]:
        for folder in (source.parent, source.parent.parent):
            yield from (folder / end, folder / "images" / end)


def _located(entry: ListedImage, places: Iterable[Path], source: Path) -> Path:
    """The first of these places where there is a file."""
    for place in places:
        with suppress(OSError, ValueError):  # a name that no file can have
            if place.is_file():
                return place
    raise FewshiftError(
        f"no such image {entry.image} ({entry.where} of {source}): paths are relative to {source.parent}, put the "
        "images there"
    )

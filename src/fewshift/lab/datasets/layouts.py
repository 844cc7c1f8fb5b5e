"""Layouts of data sets with a label for each image: how a copy lists its files and labels.

In class folders, in lists of "path label", or in the metadata tables of WILDS, which are read without its package.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fewshift.errors import FewshiftError
from fewshift.files.parsing import whole_number
from fewshift.images.folders import image_files
from fewshift.images.formats import IMAGE_SUFFIXES
from fewshift.images.preprocess import Preprocess
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.collection import Collection, check_classes, check_count, child_folder, find_home, no_domain
from fewshift.lab.datasets.domain import Domain

Listing = tuple[list[Path], list[int]]  # files and their labels
Copy = tuple[Sequence[Path], Sequence[int], tuple[str, ...]]  # files, labels, classes
Row = Mapping[str, str]


def _from_folders(collection: Collection, domain: str, root: Path) -> Copy:
    """Read domain/class/image, or domain/images/class/image as Office-31 has it."""
    home, there = find_home(collection, root)
    folder = child_folder(home, domain) if there else None
    if folder is None:
        raise no_domain(collection, domain, home, there)
    folder = folder / "images" if (folder / "images").is_dir() else folder
    entries = {path.name: path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    if unknown := sorted(set(entries) - set(collection.classes)):
        raise FewshiftError(
            f"{folder} has a folder {unknown[0]!r} that is none of the {collection.class_count} classes of "
            f"{collection.title}: rename or remove it"
        )
    images = {name: _images(entries[name]) for name in collection.classes if name in entries}
    files = [file for group in images.values() for file in group]
    labels = [collection.classes.index(name) for name, group in images.items() for _ in group]
    check_classes(collection, domain, folder, labels)
    check_count(collection, domain, folder, len(files))
    return files, labels, collection.classes


def _from_lists(collection: Collection, domain: str, root: Path) -> Copy:
    """Read domain_train.txt and domain_test.txt, which name the classes by the folders their images are in."""
    home, there = find_home(collection, root, lambda folder, domain: (folder / f"{domain}_train.txt").is_file())
    if domain not in there:
        raise no_domain(collection, domain, home, there)
    parts = [read_list(home / f"{domain}_{part}.txt", home, collection.class_count) for part in ("train", "test")]
    files, labels = ([value for part in column for value in part] for column in zip(*parts, strict=True))
    check_classes(collection, domain, home, labels)
    check_count(collection, domain, home, len(files))
    names = sorted(set(zip(labels, (file.parent.name for file in files), strict=True)))
    if len(names) > collection.class_count:
        raise FewshiftError(
            f"the lists of {domain!r} in {home} give {len(names)} folders {collection.class_count} labels, "
            f"one folder for each label is expected: {collection.where}"
        )
    return present(files, collection.where), labels, tuple(name for _, name in names)


def _from_table(read: Callable[[Path, str], Listing], collection: Collection, domain: str, root: Path) -> Copy:
    """Read the rows of metadata.csv that belong to the domain."""
    home, there = find_home(collection, root, lambda folder, _: (folder / "metadata.csv").is_file())
    if not there:
        raise no_domain(collection, domain, home / "metadata.csv", there)
    files, labels = read(home, domain)
    check_count(collection, domain, home / "metadata.csv", len(files))
    if labels and max(labels) >= collection.class_count:
        raise FewshiftError(
            f"{home / 'metadata.csv'} has the label {max(labels)}, expected are {collection.class_count} classes from "
            f"0: {collection.where}"
        )
    return present(files, collection.where), labels, collection.classes


def read_digits(domain: str, classes: tuple[str, ...], steps: Preprocess) -> Domain:
    """One of the two domains of digits, which are in memory."""
    if replace(steps, mean=(0.0,), std=(1.0,)) != replace(digits.PREPROCESS, mean=(0.0,), std=(1.0,)):
        raise FewshiftError(f"digits are 28x28 grey pixels, not {steps.mode} of {steps.crop}: leave preprocess out")
    pixels, labels = digits.PLACES[domain].read()
    return Domain(pixels, labels, classes, steps)


def _images(folder: Path) -> list[Path]:
    try:
        return image_files(folder)
    except FewshiftError:  # an empty class is counted with the others, and reported with them
        return []


def camelyon17(home: Path, domain: str) -> Listing:
    """The patches of one hospital, "hospital2": its number is the column `center`."""
    number = domain.removeprefix("hospital")
    return _table(
        home, lambda row: row["center"] == number, _patch, "tumor", ("patient", "node", "x_coord", "y_coord", "center")
    )


def iwildcam(home: Path, domain: str) -> Listing:
    """The photographs of one split; those of every split lie in the folder `train`."""
    return _table(
        home, lambda row: row["split"] == domain, lambda row: f"train/{row['filename']}", "y", ("split", "filename")
    )


def read_list(file: Path, root: Path, classes: int, offset: int = 0) -> Listing:
    """The images of a list with one "path label" in each line; the first class has the label `offset`."""
    if not file.is_file():
        raise FewshiftError(f"no such list {file}: check the path")
    files, labels = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), start=1):
        if not line.strip():
            continue
        path, word = line.rsplit(maxsplit=1) if len(line.split()) > 1 else (line, "")
        label = whole_number(word)
        if label is None or not 0 <= label - offset < classes:
            raise FewshiftError(
                f"line {number} of {file} is {line[:80]!r}: "
                f"write a path, a space and a label from {offset} to {offset + classes - 1}"
            )
        files.append(root / path.strip())
        labels.append(label - offset)
    if not files:
        raise FewshiftError(f"{file} lists no images: write one path and label in each line")
    return files, labels


def present(files: Sequence[Path], cure: str) -> list[Path]:
    """The listed files as they are on disk, or one sentence with how many are missing.

    Lists outlive the files they name: an image may have been saved in another format since, so `1.png` is found
    as `1.jpg`. A folder is listed once, which for 100,000 images is quicker than to ask for each.
    """
    names = {folder: _names(folder) for folder in {file.parent for file in files}}
    saved_files = [_as_saved(file, *names[file.parent]) for file in files]
    missing = [file for file, saved in zip(files, saved_files, strict=True) if saved is None]
    if missing:
        raise FewshiftError(
            f"{len(files):,} images are listed and {len(files) - len(missing):,} found, "
            f"the first that is missing is {missing[0]}: {cure}"
        )
    return [saved for saved in saved_files if saved is not None]


def _table(
    home: Path, wanted: Callable[[Row], bool], file: Callable[[Row], str], label: str, columns: Sequence[str]
) -> Listing:
    files, labels = [], []
    for row in filter(wanted, _rows(home / "metadata.csv", (*columns, label))):
        number = whole_number(row[label])
        if number is None:
            raise FewshiftError(f"{home / 'metadata.csv'} has the label {row[label]!r}: extract the archive again")
        files.append(home / file(row))
        labels.append(number)
    return files, labels


def _rows(table: Path, columns: Sequence[str]) -> Iterator[Row]:
    with table.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines, restval="")
        if lacking := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise FewshiftError(f"{table} has no column {lacking[0]!r}: extract the archive again")
        try:
            yield from reader
        except (csv.Error, UnicodeDecodeError) as error:
            raise FewshiftError(f"{table} cannot be read ({error}): extract the archive again") from error


def _patch(row: Row) -> str:
    # patients keep their leading zeros: "004" is text
    slide = f"patient_{row['patient']}_node_{row['node']}"
    return f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"


def _names(folder: Path) -> tuple[frozenset[str], dict[str, str]]:
    """The names in a folder, and for images the name by its stem."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208 - names, not a path for each
    stems = {Path(name).stem: name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES}
    return frozenset(names), stems


def _as_saved(file: Path, names: frozenset[str], stems: Mapping[str, str]) -> Path | None:
    if file.name in names:
        return file
    return file.with_name(stems[file.stem]) if file.stem in stems else None


READERS: dict[str, Callable[[Collection, str, Path], Copy]] = {
    "folders": _from_folders,
    "lists": _from_lists,
    "camelyon17": partial(_from_table, camelyon17),
    "iwildcam": partial(_from_table, iwildcam),
}

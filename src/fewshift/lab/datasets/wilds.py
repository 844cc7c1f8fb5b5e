"""Images that a file lists: the metadata tables of WILDS, read without its package, and lists of "path label"."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fewshift.errors import FewshiftError
from fewshift.images.folders import IMAGE_SUFFIXES

Listing = tuple[list[Path], list[int]]  # files and their labels
Row = Mapping[str, str]


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
        path, label = line.rsplit(maxsplit=1) if len(line.split()) > 1 else (line, "")
        if not label.isdecimal() or not 0 <= int(label) - offset < classes:
            raise FewshiftError(
                f"line {number} of {file} is {line[:80]!r}: "
                f"write a path, a space and a label from {offset} to {offset + classes - 1}"
            )
        files.append(root / path.strip())
        labels.append(int(label) - offset)
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
        if not row[label].isdecimal():
            raise FewshiftError(f"{home / 'metadata.csv'} has the label {row[label]!r}: extract the archive again")
        files.append(home / file(row))
        labels.append(int(row[label]))
    return files, labels


def _rows(table: Path, columns: Sequence[str]) -> Iterator[Row]:
    with table.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines, restval="")
        if lacking := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise FewshiftError(f"{table} has no column {lacking[0]!r}: extract the archive again")
        yield from reader


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

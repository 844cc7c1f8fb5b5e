"""Layouts of data sets with a label for each image: how a copy lists its files and labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files
from fewshift.images.preprocess import Preprocess
from fewshift.lab.datasets import digits, wilds
from fewshift.lab.datasets.collection import Collection
from fewshift.lab.datasets.domain import Domain
from fewshift.lab.datasets.homes import check_classes, check_count, child_folder, find_home, no_domain

Copy = tuple[Sequence[Path], Sequence[int], tuple[str, ...]]  # files, labels, classes


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
    parts = [wilds.read_list(home / f"{domain}_{part}.txt", home, collection.class_count) for part in ("train", "test")]
    files, labels = ([value for part in column for value in part] for column in zip(*parts, strict=True))
    check_classes(collection, domain, home, labels)
    check_count(collection, domain, home, len(files))
    names = sorted(set(zip(labels, (file.parent.name for file in files), strict=True)))
    if len(names) > collection.class_count:
        raise FewshiftError(
            f"the lists of {domain!r} in {home} give {len(names)} folders {collection.class_count} labels, "
            f"one folder for each label is expected: {collection.where}"
        )
    return wilds.present(files, collection.where), labels, tuple(name for _, name in names)


def _from_table(read: Callable[[Path, str], wilds.Listing], collection: Collection, domain: str, root: Path) -> Copy:
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
    return wilds.present(files, collection.where), labels, collection.classes


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


READERS: dict[str, Callable[[Collection, str, Path], Copy]] = {
    "folders": _from_folders,
    "lists": _from_lists,
    "camelyon17": partial(_from_table, wilds.camelyon17),
    "iwildcam": partial(_from_table, wilds.iwildcam),
}

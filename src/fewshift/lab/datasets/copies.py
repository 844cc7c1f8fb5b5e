"""A domain of a data set, read from the copy on the user's disk.

Nothing is downloaded. A copy that is not what was published (another number of images, a class that is missing) is
refused with the numbers expected and found: results on it could not be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files
from fewshift.images.label_files import Encoding
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import CITYSCAPES, Pairing, Scenes, joined_scenes
from fewshift.lab.datasets import digits, street, wilds
from fewshift.lab.datasets.catalog import Collection, find_collection
from fewshift.lab.datasets.domain import Domain, joined

DATA_VARIABLE = "FEWSHIFT_DATA"
JOIN = "+"


def load_domain(
    collection: Collection | str,
    domain: str,
    root: str | Path | None = None,
    preprocess: Preprocess | None = None,
) -> Domain:
    """One domain of a collection below `root` (or below FEWSHIFT_DATA), as the network is to see it.

    Images are at root/<collection>/<domain>/<class>/ or where the published archive has them; `root` may also be the
    collection's own folder. "a+b" are two domains as one.
    """
    known = _known(collection, domain, dense=False)
    if JOIN in domain:
        return joined([load_domain(known, part, root, preprocess) for part in domain.split(JOIN)])
    steps = preprocess or known.preprocess
    if known.layout == "digits":
        return _digits(domain, known.classes, steps)
    files, labels, classes = READERS[known.layout](known, domain, data_root(root))
    return Domain(tuple(files), torch.tensor(labels), classes, steps, known.skip_rare)


def load_scenes(
    collection: Collection | str,
    domain: str,
    root: str | Path | None = None,
    preprocess: Preprocess | None = None,
) -> Scenes:
    """The same for a collection that has a label for every pixel (`dense`): pairs of images and label files."""
    known = _known(collection, domain, dense=True)
    if JOIN in domain:
        return joined_scenes([load_scenes(known, part, root, preprocess) for part in domain.split(JOIN)])
    files, label_files, encoding = _from_places(known, domain, data_root(root))
    return Scenes(files, label_files, known.classes, preprocess or known.preprocess, encoding, known.palette)


def _known(collection: Collection | str, domain: str, *, dense: bool) -> Collection:
    known = collection if isinstance(collection, Collection) else find_collection(collection)
    if known.dense != dense:
        labels, reader = ("pixels", "load_scenes") if known.dense else ("images", "load_domain")
        raise FewshiftError(f"{known.name} has labels for {labels}: read it with {reader}")
    for part in domain.split(JOIN):
        if part not in known.domains:
            raise FewshiftError(f"{known.name} has no domain {part!r}: use one of {', '.join(known.domains)}")
    return known


def from_list(
    file: str | Path, root: str | Path, classes: Sequence[str], offset: int = 0, *, preprocess: Preprocess
) -> Domain:
    """The images of a list file with one "path label" in each line, paths below `root`, labels from `offset`.

    PACS' published splits are such lists, with labels from 1.
    """
    files, labels = wilds.read_list(Path(file), Path(root), len(classes), offset)
    found = wilds.present(files, f"compare {file} with the images in {root}")
    return Domain(tuple(found), torch.tensor(labels), tuple(classes), preprocess)


def listed(
    file: Path, collection: Collection, root: str | Path | None = None, preprocess: Preprocess | None = None
) -> Domain:
    """The images of a list of one's own, with paths below the collection's folder and labels from 0."""
    home, _ = _home(collection, data_root(root), lambda folder, domain: _child(folder, domain) is not None)
    return from_list(file, home, collection.classes, preprocess=preprocess or collection.preprocess)


def load_validation(
    collection: Collection | str, domain: str, root: str | Path | None = None, preprocess: Preprocess | None = None
) -> Domain:
    """The images of a domain that its published list keeps for validation, in the order of the list.

    Lists lie beside the domains, or in a folder such as pacs_splits beside that of the images. Labels are from 1.
    """
    known = _known(collection, domain, dense=False)
    if not known.validation:
        raise FewshiftError(f"{known.title} has no published validation lists: use a network of `fewshift train`")
    home, there = _home(known, data_root(root), lambda folder, domain: _child(folder, domain) is not None)
    if domain not in there:
        raise _no_domain(known, domain, home, there)
    name = known.validation.format(domain)
    places = [folder / name for folder in (home.parent / f"{known.name}_splits", home)]
    file = next((it for it in places if it.is_file()), None)
    if file is None:
        raise FewshiftError(f"the published list {name} is not in {places[0].parent}: put it there")
    return from_list(file, home, known.classes, 1, preprocess=preprocess or known.preprocess)


def data_root(option: str | Path | None = None) -> Path:
    """The folder that holds the data sets: the one given, or the one FEWSHIFT_DATA names."""
    given = option or os.environ.get(DATA_VARIABLE)
    if not given:
        raise FewshiftError(f"no data folder is known: pass --data-root FOLDER or set {DATA_VARIABLE}")
    root = Path(given).expanduser()
    if not root.is_dir():
        raise FewshiftError(f"no such data folder {root}: check --data-root and {DATA_VARIABLE}")
    return root


# --- layouts

Copy = tuple[Sequence[Path], Sequence[int], tuple[str, ...]]  # files, labels, classes


def _from_folders(collection: Collection, domain: str, root: Path) -> Copy:
    """Read domain/class/image, or domain/images/class/image as Office-31 has it."""
    home, there = _home(collection, root, lambda folder, domain: _child(folder, domain) is not None)
    folder = _child(home, domain) if there else None
    if folder is None:
        raise _no_domain(collection, domain, home, there)
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
    _check_classes(collection, domain, folder, labels)
    _check_count(collection, domain, folder, len(files))
    return files, labels, collection.classes


def _from_lists(collection: Collection, domain: str, root: Path) -> Copy:
    """Read domain_train.txt and domain_test.txt, which name the classes by the folders their images are in."""
    home, there = _home(collection, root, lambda folder, domain: (folder / f"{domain}_train.txt").is_file())
    if domain not in there:
        raise _no_domain(collection, domain, home, there)
    parts = [wilds.read_list(home / f"{domain}_{part}.txt", home, collection.class_count) for part in ("train", "test")]
    files, labels = ([it for part in column for it in part] for column in zip(*parts, strict=True))
    _check_classes(collection, domain, home, labels)
    _check_count(collection, domain, home, len(files))
    names = sorted(set(zip(labels, (file.parent.name for file in files), strict=True)))
    if len(names) > collection.class_count:
        raise FewshiftError(
            f"the lists of {domain!r} in {home} give {len(names)} folders {collection.class_count} labels, "
            f"one folder for each label is expected: {collection.where}"
        )
    return wilds.present(files, collection.where), labels, tuple(name for _, name in names)


def _from_table(read: Callable[[Path, str], wilds.Listing], collection: Collection, domain: str, root: Path) -> Copy:
    """Read the rows of metadata.csv that belong to the domain."""
    home, there = _home(collection, root, lambda folder, _: (folder / "metadata.csv").is_file())
    if not there:
        raise _no_domain(collection, domain, home / "metadata.csv", there)
    files, labels = read(home, domain)
    _check_count(collection, domain, home / "metadata.csv", len(files))
    if labels and max(labels) >= collection.class_count:
        raise FewshiftError(
            f"{home / 'metadata.csv'} has the label {max(labels)}, expected are {collection.class_count} classes from "
            f"0: {collection.where}"
        )
    return wilds.present(files, collection.where), labels, collection.classes


READERS: dict[str, Callable[[Collection, str, Path], Copy]] = {
    "folders": _from_folders,
    "lists": _from_lists,
    "camelyon17": partial(_from_table, wilds.camelyon17),
    "iwildcam": partial(_from_table, wilds.iwildcam),
}


# --- layouts of scenes


@dataclass(frozen=True)
class Place:
    """Where a copy may keep a domain: two folders, and how the names of their files end.

    In folder names {0} stands for the domain, "val", and {1} for its long name, "validation". `names` tells which
    images are the domain's, where a folder holds those of all.
    """

    images: str
    labels: str
    encoding: Encoding
    image_end: str = ""
    label_end: str = ""
    names: Callable[[Collection, str, Path, Path], frozenset[str]] | None = None

    def pairing(self, home: Path, domain: str) -> Pairing:
        """Its folders in a copy."""
        images, labels = (home / it.format(domain, LONG.get(domain)) for it in (self.images, self.labels))
        return Pairing(images, labels, self.image_end, self.label_end)


def _from_places(
    collection: Collection, domain: str, root: Path
) -> tuple[tuple[Path, ...], tuple[Path, ...], Encoding]:
    """Read the first of the places of a layout that a copy has."""

    def place_of(home: Path, domain: str) -> Place | None:
        return next((it for it in PLACES[collection.layout] if it.pairing(home, domain).labelled()), None)

    home, there = _home(collection, root, lambda folder, domain: place_of(folder, domain) is not None)
    place = place_of(home, domain)
    if place is None:
        raise _no_domain(collection, domain, home, there)
    where = place.pairing(home, domain)
    names = None if place.names is None else place.names(collection, domain, home, where.images)
    files, label_files = where.files(names)
    if names is not None and len(files) < len(names):
        missing = min(names - {file.stem for file in files})
        raise FewshiftError(
            f"{len(names):,} images of {domain!r} are listed and {len(files):,} found in {where.images}, the first "
            f"that is missing is {missing}: {collection.where}"
        )
    if len(files) != ALSO_PUBLISHED.get((collection.name, domain)):
        _check_count(collection, domain, where.images, len(files))
    return files, label_files, place.encoding


def _listed(collection: Collection, domain: str, home: Path, _: Path) -> frozenset[str]:
    """Names from val.txt, from a list called as RobustNet's are, or from GTAV's split.mat."""
    lists = [home / f"{domain}.txt", home / f"{collection.name}_split_{domain}.txt"]
    for file in lists:
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            return frozenset(Path(line.split()[0]).stem for line in lines if line.strip())
    if (home / "split.mat").is_file():
        return _from_mat(home / "split.mat", domain)
    raise FewshiftError(
        f"which images of {collection.title} in {home} are those of {domain!r} is not known, {lists[0].name} is not "
        f"there: {collection.where}"
    )


def _from_mat(file: Path, domain: str) -> frozenset[str]:
    """Images are called after their numbers, 00001 and so on."""
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        return frozenset(f"{int(number):05d}" for number in loadmat(file)[f"{domain}Ids"].ravel())
    except Exception as error:  # readers raise whatever a broken file leads them to
        raise FewshiftError(
            f"{file} does not say which images are those of {domain!r}: extract it again, or write {domain}.txt with "
            "one name in each line"
        ) from error


def _sequence(_: Collection, domain: str, __: Path, images: Path) -> frozenset[str]:
    """CamVid's names begin with the sequence that an image is from."""
    stems = (path.stem for path in images.iterdir())
    return frozenset(stem for stem in stems if stem.startswith(street.CAMVID_SEQUENCES[domain]))


LONG = {"train": "training", "val": "validation"}
ALSO_PUBLISHED = {("gtav", "train"): 12_388}  # the list of RobustNet leaves 15 of its images out

TRAIN_IDS = Encoding(street.TRAIN_IDS)
VISTAS = Encoding(street.MAPILLARY_IDS)
GTAV = Encoding(street.CITYSCAPES_IDS, street.GTAV_COLOURS, strict=False)
SYNTHIA = Encoding(street.SYNTHIA_IDS, first_channel=True)

PLACES: dict[str, tuple[Place, ...]] = {
    "cityscapes": tuple(
        Place(f"{above[0]}leftImg8bit/{{0}}", f"{above[1]}gtFine/{{0}}", encoding, "_leftImg8bit", end)
        for above in (("", ""), ("leftImg8bit_trainvaltest/", "gtFine_trainvaltest/"))
        for end, encoding in CITYSCAPES.items()
    ),
    "bdd100k": (
        Place("images/10k/{0}", "labels/sem_seg/masks/{0}", TRAIN_IDS),
        Place("images/{0}", "labels/{0}", TRAIN_IDS, label_end="_train_id"),
        Place("seg/images/{0}", "seg/labels/{0}", TRAIN_IDS, label_end="_train_id"),
    ),
    "mapillary": (
        Place("{1}/images", "{1}/labels", VISTAS),
        Place("{1}/images", "{1}/v1.2/labels", VISTAS),
    ),
    "gtav": (Place("images", "labels", GTAV, names=_listed),),
    "synthia": (
        Place("RGB", "GT/LABELS", SYNTHIA, names=_listed),
        Place("RAND_CITYSCAPES/RGB", "RAND_CITYSCAPES/GT/LABELS", SYNTHIA, names=_listed),
    ),
    "camvid": (
        Place("{0}/images", "{0}/labels", Encoding(street.CAMVID_IDS)),
        Place(
            "701_StillsRaw_full",
            "LabeledApproved_full",
            Encoding(colours=street.CAMVID_COLOURS),
            label_end="_L",
            names=_sequence,
        ),
    ),
}


def _digits(domain: str, classes: tuple[str, ...], steps: Preprocess) -> Domain:
    if replace(steps, mean=(0.0,), std=(1.0,)) != replace(digits.PREPROCESS, mean=(0.0,), std=(1.0,)):
        raise FewshiftError(f"digits are 28x28 grey pixels, not {steps.mode} of {steps.crop}: leave preprocess out")
    pixels, labels = digits.PLACES[domain].read()
    return Domain(pixels, labels, classes, steps)


def _home(collection: Collection, root: Path, holds: Callable[[Path, str], bool]) -> tuple[Path, list[str]]:
    """The collection's folder, below `root` or `root` itself, and the domains it holds."""
    named = [_child(root, name) for name in (collection.name, *collection.folders)]
    for folder in (*filter(None, named), root):
        if there := [domain for domain in collection.domains if holds(folder, domain)]:
            return folder, there
    return root / collection.name, []


def _child(folder: Path, name: str) -> Path | None:
    """The folder of that name, or of one that differs in case, spaces and dashes: "Real World" is "real_world"."""
    if (folder / name).is_dir():
        return folder / name
    alike = sorted(path for path in folder.iterdir() if _plain(path.name) == _plain(name) and path.is_dir())
    return alike[0] if alike else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _images(folder: Path) -> list[Path]:
    try:
        return image_files(folder)
    except FewshiftError:  # an empty class is counted with the others, and reported with them
        return []


# --- the numbers expected and found


def _no_domain(collection: Collection, domain: str, place: Path, there: Sequence[str]) -> FewshiftError:
    names = f" ({', '.join(there)})" if there else ""
    return FewshiftError(
        f"domain {domain!r} of {collection.title} ({_number(collection, domain)} images) is not in {place}, "
        f"{len(collection.domains)} domains expected and {len(there)} found{names}: {collection.where}"
    )


def _check_classes(collection: Collection, domain: str, place: Path, labels: Sequence[int]) -> None:
    found = torch.tensor(labels, dtype=torch.long).bincount(minlength=collection.class_count).tolist()
    expected = collection.class_counts.get(domain) if collection.counts else None
    for label, count in enumerate(found):
        if count == 0 or (expected and count != expected[label]):
            name = repr(collection.classes[label]) if collection.classes else str(label)
            raise FewshiftError(
                f"class {name} of {collection.title}, domain {domain!r}, has {count:,} images in {place}, "
                f"{f'{expected[label]:,}' if expected else 'some'} expected "
                f"({_number(collection, domain)} images of {collection.class_count} classes in all, "
                f"{len(labels):,} of {sum(map(bool, found))} found): {collection.where}"
            )


def _check_count(collection: Collection, domain: str, place: Path, found: int) -> None:
    expected = collection.counts.get(domain) if collection.counts else None
    if found == 0 or expected not in (None, found):
        raise FewshiftError(
            f"domain {domain!r} of {collection.title} has {found:,} images in {place}, "
            f"{_number(collection, domain)} expected: {collection.where}"
        )


def _number(collection: Collection, domain: str) -> str:
    return f"{collection.counts[domain]:,}" if collection.counts else "some"

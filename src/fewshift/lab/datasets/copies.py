"""A domain of a data set, read from the copy on the user's disk.

Nothing is downloaded. A copy that is not what was published (another number of images, a class that is missing) is
refused with the numbers expected and found: results on it could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fewshift.core.labels import IMAGES, PIXELS, Labels
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes, joined_scenes
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.datasets.collection import Collection, data_root, find_home, no_domain
from fewshift.lab.datasets.domain import Domain, joined
from fewshift.lab.datasets.layouts import READERS, present, read_digits, read_list
from fewshift.lab.datasets.scene_layouts import read_scenes

JOIN = "+"


def load_domain(
    collection: Collection | str, domain: str, root: str | Path | None = None, preprocess: Preprocess | None = None
) -> Domain:
    """One domain of a collection below `root` (or below FEWSHIFT_DATA), as the network is to see it.

    Images are at root/<collection>/<domain>/<class>/ or where the published archive has them; `root` may also be the
    collection's own folder. "a+b" are two domains as one.
    """
    known = _known(collection, domain, IMAGES)
    if JOIN in domain:
        return joined([load_domain(known, part, root, preprocess) for part in domain.split(JOIN)])
    steps = preprocess or known.preprocess
    if known.layout == "digits":
        return read_digits(domain, known.classes, steps)
    files, labels, classes = READERS[known.layout](known, domain, data_root(root))
    return Domain(tuple(files), torch.tensor(labels), classes, steps, known.skip_rare)


def load_scenes(
    collection: Collection | str, domain: str, root: str | Path | None = None, preprocess: Preprocess | None = None
) -> Scenes:
    """The same for a collection that has a label for each pixel: pairs of images and label files."""
    known = _known(collection, domain, PIXELS)
    if JOIN in domain:
        return joined_scenes([load_scenes(known, part, root, preprocess) for part in domain.split(JOIN)])
    files, label_files, encoding = read_scenes(known, domain, data_root(root))
    return Scenes(files, label_files, known.classes, preprocess or known.preprocess, encoding, known.palette)


LOADERS: dict[Labels, Callable[..., Domain | Scenes]] = {IMAGES: load_domain, PIXELS: load_scenes}


def _known(collection: Collection | str, domain: str, kind: Labels) -> Collection:
    known = collection if isinstance(collection, Collection) else find_collection(collection)
    if known.labels is not kind:
        reader = LOADERS[known.labels].__name__
        raise FewshiftError(f"{known.name} has a label for each {known.labels.unit}: read it with {reader}")
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
    files, labels = read_list(Path(file), Path(root), len(classes), offset)
    files = present(files, f"compare {file} with the images in {root}")
    return Domain(tuple(files), torch.tensor(labels), tuple(classes), preprocess)


def listed(
    file: Path, collection: Collection, root: str | Path | None = None, preprocess: Preprocess | None = None
) -> Domain:
    """The images of a list of one's own, with paths below the collection's folder and labels from 0."""
    home, _ = find_home(collection, data_root(root))
    return from_list(file, home, collection.classes, preprocess=preprocess or collection.preprocess)


def load_validation(
    collection: Collection | str, domain: str, root: str | Path | None = None, preprocess: Preprocess | None = None
) -> Domain:
    """The images of a domain that its published list keeps for validation, in the order of the list.

    Lists lie beside the domains, or in a folder such as pacs_splits beside that of the images. Labels are from 1.
    """
    known = _known(collection, domain, IMAGES)
    if not known.validation:
        raise FewshiftError(f"{known.title} has no published validation lists: use a network of `fewshift train`")
    home, there = find_home(known, data_root(root))
    if domain not in there:
        raise no_domain(known, domain, home, there)
    name = known.validation.format(domain)
    places = [folder / name for folder in (home.parent / f"{known.name}_splits", home)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise FewshiftError(f"the published list {name} is not in {places[0].parent}: put it there")
    return from_list(file, home, known.classes, 1, preprocess=preprocess or known.preprocess)

"""The facts about a data set, where a copy of it lies on disk, and whether that has the published numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fewshift.core.labels import IMAGES, Labels
from fewshift.errors import FewshiftError
from fewshift.images.cityscapes import RGB
from fewshift.images.class_names import plain_name
from fewshift.images.preprocess import Preprocess

DATA_VARIABLE = "FEWSHIFT_DATA"


@dataclass(frozen=True)
class Collection:
    """One data set: the facts that do not depend on a copy of it."""

    name: str
    title: str
    domains: tuple[str, ...]
    targets: tuple[str, ...]  # the domains that networks are adapted to
    split: str
    classes: tuple[str, ...]  # in the order of the labels; empty where the copy's lists name them
    preprocess: Preprocess  # of test images
    recipe: str
    licence: str
    where: str
    counts: Mapping[str, int] | None  # images of each domain; None accepts any number
    metric: str = "accuracy"  # a name in `core.metrics.METRICS`
    layout: str = "folders"  # of a copy: a name in `layouts.READERS` or `scene_layouts.PLACES`, or digits
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # and of each class, where published
    folders: tuple[str, ...] = ()  # other names its folder may have
    skip_rare: bool = False  # whether classes with fewer images than shots are left out of a support
    unnamed: int = 0  # how many classes there are where `classes` is empty
    labels: Labels = IMAGES  # of each image, or of each pixel: such domains are scenes
    palette: tuple[RGB, ...] = ()  # of scenes: a colour for each class
    support_from: Mapping[str, str] = field(default_factory=dict)  # target -> the domain that its support is drawn from
    validation: str = ""  # the published list of a domain's images that networks are not trained on, where there is one

    def support_domain(self, target: str) -> str:
        """The domain that the support of a target is drawn from: the target itself, less the support, by default."""
        return self.support_from.get(target, target)

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return len(self.classes) or self.unnamed


def data_root(option: str | Path | None = None) -> Path:
    """The folder that holds the data sets: `option`, or the one that FEWSHIFT_DATA names."""
    folder = option or os.environ.get(DATA_VARIABLE)
    if not folder:
        raise FewshiftError(f"no data folder is known: pass --data-root FOLDER or set {DATA_VARIABLE}")
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise FewshiftError(f"no such data folder {root}: check --data-root and {DATA_VARIABLE}")
    return root


def find_home(
    collection: Collection, root: Path, holds: Callable[[Path, str], object] | None = None
) -> tuple[Path, list[str]]:
    """The collection's folder, below `root` or `root` itself, and the domains it holds: by default as folders."""
    holds = holds or child_folder
    named = [child_folder(root, name) for name in (collection.name, *collection.folders)]
    for folder in (*filter(None, named), root):
        if there := [domain for domain in collection.domains if holds(folder, domain)]:
            return folder, there
    return root / collection.name, []


def child_folder(folder: Path, name: str) -> Path | None:
    """The folder of that name, or of one that differs in case, spaces and dashes: "Real World" is "real_world"."""
    if (folder / name).is_dir():
        return folder / name
    alike = sorted(path for path in folder.iterdir() if plain_name(path.name) == plain_name(name) and path.is_dir())
    return alike[0] if alike else None


def no_domain(collection: Collection, domain: str, place: Path, there: Sequence[str]) -> FewshiftError:
    """The sentence about a domain that a copy does not have."""
    names = f" ({', '.join(there)})" if there else ""
    return FewshiftError(
        f"domain {domain!r} of {collection.title} ({_number(collection, domain)} images) is not in {place}, "
        f"{len(collection.domains)} domains expected and {len(there)} found{names}: {collection.where}"
    )


def check_classes(collection: Collection, domain: str, place: Path, labels: Sequence[int]) -> None:
    """Raise one sentence when a class has another number of images than was published, or none."""
    counts = torch.tensor(labels, dtype=torch.long).bincount(minlength=collection.class_count).tolist()
    expected = collection.class_counts.get(domain) if collection.counts else None
    for label, count in enumerate(counts):
        if count == 0 or (expected and count != expected[label]):
            name = repr(collection.classes[label]) if collection.classes else str(label)
            raise FewshiftError(
                f"class {name} of {collection.title}, domain {domain!r}, has {count:,} images in {place}, "
                f"{f'{expected[label]:,}' if expected else 'some'} expected "
                f"({_number(collection, domain)} images of {collection.class_count} classes in all, "
                f"{len(labels):,} of {sum(map(bool, counts))} found): {collection.where}"
            )


def check_count(collection: Collection, domain: str, place: Path, count: int) -> None:
    """Raise one sentence when a domain has another number of images than was published, or none."""
    expected = collection.counts.get(domain) if collection.counts else None
    if count == 0 or expected not in (None, count):
        raise FewshiftError(
            f"domain {domain!r} of {collection.title} has {count:,} images in {place}, "
            f"{_number(collection, domain)} expected: {collection.where}"
        )


def _number(collection: Collection, domain: str) -> str:
    return f"{collection.counts[domain]:,}" if collection.counts else "some"

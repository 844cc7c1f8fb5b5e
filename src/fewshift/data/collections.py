"""The data sets of the benchmark: what each consists of, and one of its domains as a dataset.

Nothing is downloaded. A copy that is not what was published (another number of images, a class that is missing) is
refused with the numbers expected and found: results on it could not be compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fewshift.data import digits, wilds
from fewshift.data.folders import image_files, open_image
from fewshift.data.preprocess import IMAGENET, Preprocess
from fewshift.errors import FewshiftError
from fewshift.target import others

DATA_VARIABLE = "FEWSHIFT_DATA"
READ_AT_ONCE = 32  # images a worker process decodes and hands over together

Metric = Literal["accuracy", "macro_recall", "macro_f1"]
Layout = Literal["folders", "lists", "camelyon17", "iwildcam", "digits"]


@dataclass(frozen=True)
class Collection:
    """One data set: the facts that do not depend on a copy of it."""

    name: str
    title: str
    domains: tuple[str, ...]
    targets: tuple[str, ...]  # the domains that networks are adapted to
    split: str
    classes: tuple[str, ...]  # in the order of the labels; empty where the copy's lists name them
    metric: Metric
    preprocess: Preprocess  # of test images
    recipe: str
    licence: str
    where: str
    layout: Layout
    counts: Mapping[str, int] | None  # images of each domain; None accepts any number
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # and of each class, where published
    folders: tuple[str, ...] = ()  # other names its folder may have
    skip_rare: bool = False  # whether classes with fewer images than shots are left out of a support
    unnamed: int = 0  # how many classes there are where `classes` is empty

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return len(self.classes) or self.unnamed


@dataclass(eq=False)
class Domain:
    """The labelled images of one domain, read when asked for: a dataset of (tensor, label).

    `source` is files, or the pixels themselves, resized and cropped: bytes, or floats in [0, 1].
    """

    source: tuple[Path, ...] | Tensor
    labels: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess
    skip_rare: bool = False  # whether classes with fewer images than shots are left out of a support

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if isinstance(self.source, Tensor):
            image = _normalised(self.source[index], self.preprocess)
        else:
            image = _read(self.preprocess, self.source[index])
        return image, int(self.labels[index])

    def images(self, indices: Tensor | Sequence[int], workers: int = 0) -> Tensor:
        """The images at `indices` as one tensor, decoded by as many processes as there are `workers`.

        Processes take a moment to start: they pay for hundreds of images, not for a batch.
        """
        chosen = _positions(indices)
        if isinstance(self.source, Tensor):
            return _normalised(self.source[chosen], self.preprocess)
        return _read_all([self.source[it] for it in chosen.tolist()], partial(_read, self.preprocess), workers)

    def batches(self, batches: Sequence[Tensor], workers: int = 0) -> Iterator[Tensor]:
        """The images of one batch of indices after the other; `workers` decode those to come meanwhile."""
        if isinstance(self.source, Tensor) or not workers:
            yield from (self.images(batch) for batch in batches)
            return
        loader = DataLoader(_Batches(self, batches), batch_size=None, num_workers=workers, generator=torch.Generator())
        for images in loader:
            if isinstance(images, FewshiftError):
                raise images
            yield images

    def without(self, indices: Tensor | Sequence[int]) -> Tensor:
        """The indices that may be used for evaluation once those at `indices` were seen as support."""
        return others(_positions(indices), len(self))

    def cached(self, workers: int = 0) -> Domain:
        """The same domain, decoded into memory: one byte for each value, and the same tensors."""
        if isinstance(self.source, Tensor):
            return self
        return replace(self, source=_read_all(self.source, partial(_read_bytes, self.preprocess), workers))


def load_domain(
    collection: Collection | str,
    domain: str,
    root: str | Path | None = None,
    preprocess: Preprocess | None = None,
) -> Domain:
    """One domain of a collection below `root` (or below FEWSHIFT_DATA), as the network is to see it.

    Images are at root/<collection>/<domain>/<class>/ or where the published archive has them; `root` may also be the
    collection's own folder.
    """
    known = collection if isinstance(collection, Collection) else find_collection(collection)
    if domain not in known.domains:
        raise FewshiftError(f"{known.name} has no domain {domain!r}: use one of {', '.join(known.domains)}")
    steps = preprocess or known.preprocess
    if known.layout == "digits":
        return _digits(domain, known.classes, steps)
    files, labels, classes = READERS[known.layout](known, domain, data_root(root))
    return Domain(tuple(files), torch.tensor(labels), classes, steps, known.skip_rare)


def from_list(
    file: str | Path, root: str | Path, classes: Sequence[str], offset: int = 0, *, preprocess: Preprocess
) -> Domain:
    """The images of a list file with one "path label" in each line, paths below `root`, labels from `offset`.

    PACS' published splits are such lists, with labels from 1.
    """
    files, labels = wilds.read_list(Path(file), Path(root), len(classes), offset)
    found = wilds.present(files, f"compare {file} with the images in {root}")
    return Domain(tuple(found), torch.tensor(labels), tuple(classes), preprocess)


def find_collection(name: str) -> Collection:
    """The collection of that name, or one sentence with those there are."""
    if name not in COLLECTIONS:
        raise FewshiftError(f"unknown data set {name!r}: use one of {', '.join(COLLECTIONS)}")
    return COLLECTIONS[name]


def data_root(option: str | Path | None = None) -> Path:
    """The folder that holds the data sets: the one given, or the one FEWSHIFT_DATA names."""
    given = option or os.environ.get(DATA_VARIABLE)
    if not given:
        raise FewshiftError(f"no data folder is known: pass --data-root FOLDER or set {DATA_VARIABLE}")
    root = Path(given).expanduser()
    if not root.is_dir():
        raise FewshiftError(f"no such data folder {root}: check --data-root and {DATA_VARIABLE}")
    return root


def describe() -> list[dict[str, Any]]:
    """One row for each collection, as plain values."""
    return [
        {
            "name": it.name,
            "title": it.title,
            "domains": list(it.domains),
            "targets": list(it.targets),
            "classes": it.class_count,
            "images": sum(it.counts.values()) if it.counts else None,
            "metric": it.metric,
            "split": it.split,
            "recipe": it.recipe,
            "licence": it.licence,
            "where": it.where,
        }
        for it in COLLECTIONS.values()
    ]


# --- copies on disk

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


def _digits(domain: str, classes: tuple[str, ...], steps: Preprocess) -> Domain:
    if replace(steps, mean=(0.0,), std=(1.0,)) != replace(digits.PREPROCESS, mean=(0.0,), std=(1.0,)):
        raise FewshiftError(f"digits are 28x28 grey pixels, not {steps.mode} of {steps.crop}: leave preprocess out")
    pixels, labels = {"mnist": digits.mnist, "uci": digits.uci}[domain]()
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


# --- pixels


def _positions(indices: Tensor | Sequence[int]) -> Tensor:
    if isinstance(indices, Tensor) and indices.dtype == torch.bool:
        raise FewshiftError("indices are a mask: give the positions of its true values")
    return torch.as_tensor(indices, dtype=torch.long)


def _read(steps: Preprocess, file: Path) -> Tensor:
    image = open_image(file, steps.mode)
    try:
        return steps(image)
    except FewshiftError as error:
        raise FewshiftError(f"{file}: {error}") from error


def _read_bytes(steps: Preprocess, file: Path) -> Tensor:
    plain = replace(steps, mean=(0.0,) * steps.channels, std=(1.0,) * steps.channels)
    return (_read(plain, file) * 255).round().to(torch.uint8)


def _normalised(pixels: Tensor, steps: Preprocess) -> Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (steps.mean, steps.std))
    return ((pixels if pixels.is_floating_point() else pixels.float() / 255) - mean) / std


@dataclass
class _Batches(Dataset[Tensor | FewshiftError]):
    """Batches of a domain; an error is handed over as a value."""

    domain: Domain
    batches: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor | FewshiftError:
        try:
            return self.domain.images(self.batches[index])
        except FewshiftError as error:
            return error


@dataclass
class _Portions(Dataset[Tensor | FewshiftError]):
    """Files in portions. An error is handed over as a value: raised in a worker, it would come with a traceback."""

    files: Sequence[Path]
    read: Callable[[Path], Tensor]

    def __len__(self) -> int:
        return math.ceil(len(self.files) / READ_AT_ONCE)

    def __getitem__(self, index: int) -> Tensor | FewshiftError:
        start = index * READ_AT_ONCE
        try:
            return _stacked([self.read(file) for file in self.files[start : start + READ_AT_ONCE]])
        except FewshiftError as error:
            return error


def _read_all(files: Sequence[Path], read: Callable[[Path], Tensor], workers: int) -> Tensor:
    if not files:
        raise FewshiftError("no images are asked for: give at least one index")
    portions = _Portions(files, read)
    source: Iterable[Tensor | FewshiftError] = (portions[index] for index in range(len(portions)))
    if workers:
        # a generator of its own: the loader would draw a seed from the global one
        source = DataLoader(portions, batch_size=None, num_workers=workers, generator=torch.Generator())
    images, start = torch.empty(0), 0
    for portion in source:
        if isinstance(portion, FewshiftError):
            raise portion
        if not start:
            images = portion.new_empty(len(files), *portion.shape[1:])
        _same(portion.shape[1:], images.shape[1:])
        images[start : start + len(portion)] = portion
        start += len(portion)
    return images


def _stacked(images: Sequence[Tensor]) -> Tensor:
    for image in images:
        _same(image.shape, images[0].shape)
    return torch.stack(list(images))


def _same(shape: torch.Size, first: torch.Size) -> None:
    if shape != first:
        raise FewshiftError(
            f"images have different shapes {tuple(first)} and {tuple(shape)}: preprocess them to one crop size"
        )


# --- the descriptions


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


STANDARD = replace(IMAGENET, resize=224)
ONE_LEFT_OUT = "leave one domain out: all images of the target, less the support"
PAIRS = "one source domain and one target domain: all images of the target, less the support"
ERM = "SGD, rate 1e-3 with cosine decay, momentum 0.9, weight decay 5e-4"

_DESCRIBED = (
    Collection(
        name="pacs",
        title="PACS",
        domains=("art_painting", "cartoon", "photo", "sketch"),
        targets=("art_painting", "cartoon", "photo", "sketch"),
        split=ONE_LEFT_OUT,
        classes=_words("dog elephant giraffe guitar horse house person"),
        metric="accuracy",
        preprocess=STANDARD,
        recipe=f"ResNet-18 from ImageNet, train lists of the three other domains, 150 epochs of 2 x 64 images, {ERM}",
        licence="none stated; for research",
        where="get the images from the page of 'Deeper, Broader and Artier Domain Generalization' (Li et al. 2017)",
        layout="folders",
        counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        class_counts={
            "art_painting": (379, 255, 285, 184, 201, 295, 449),
            "cartoon": (389, 457, 346, 135, 324, 288, 405),
            "photo": (189, 202, 182, 186, 199, 280, 432),
            "sketch": (772, 740, 753, 608, 816, 80, 160),
        },
        folders=("kfold",),
    ),
    Collection(
        name="visda",
        title="VisDA-2017",
        domains=("train", "validation"),
        targets=("validation",),
        split="synthetic images (train) to real ones (validation): all of validation, less the support",
        classes=_words("aeroplane bicycle bus car horse knife motorcycle person plant skateboard train truck"),
        metric="macro_recall",
        preprocess=STANDARD,
        recipe="ResNet-101, the checkpoint published with CSG (contrastive syn-to-real generalisation)",
        licence="none stated; for research, the real images are from COCO under Flickr's terms",
        where="get train.tar and validation.tar of the classification track from the VisDA-2017 challenge page",
        layout="folders",
        counts={"train": 152_397, "validation": 55_388},
        folders=("visda2017", "visda17", "visda-c"),
    ),
    Collection(
        name="office31",
        title="Office-31",
        domains=("amazon", "dslr", "webcam"),
        targets=("amazon", "dslr", "webcam"),
        split=PAIRS,
        classes=_words(
            "back_pack bike bike_helmet bookcase bottle calculator desk_chair desk_lamp desktop_computer file_cabinet "
            "headphones keyboard laptop_computer letter_tray mobile_phone monitor mouse mug paper_notebook pen phone "
            "printer projector punchers ring_binder ruler scissors speaker stapler tape_dispenser trash_can"
        ),
        metric="macro_recall",
        preprocess=STANDARD,
        recipe=f"ResNet-50 from ImageNet, all of the source domain, 50 epochs of batches of 32, {ERM}, RandAugment",
        licence="none stated; for research",
        where="get the images from the page of 'Adapting Visual Category Models to New Domains' (Saenko et al. 2010)",
        layout="folders",
        counts={"amazon": 2817, "dslr": 498, "webcam": 795},
        folders=("office", "domain_adaptation_images"),
    ),
    Collection(
        name="officehome",
        title="Office-Home",
        domains=("Art", "Clipart", "Product", "Real World"),
        targets=("Art", "Clipart", "Product", "Real World"),
        split=PAIRS,
        classes=_words(
            "Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards "
            "Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork "
            "Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven "
            "Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver "
            "Shelf Sink Sneakers Soda Speaker Spoon TV Table Telephone ToothBrush Toys Trash_Can Webcam"
        ),
        metric="accuracy",
        preprocess=STANDARD,
        recipe=f"ResNet-50 from ImageNet, all of the source domain, 50 epochs of batches of 64, {ERM}, RandAugment",
        licence="for non-commercial research and teaching",
        where="get the images from the Office-Home page of 'Deep Hashing Network' (Venkateswara et al. 2017)",
        layout="folders",
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        folders=("OfficeHomeDataset_10072016",),
    ),
    Collection(
        name="camelyon17",
        title="Camelyon17-WILDS",
        domains=tuple(f"hospital{number}" for number in range(5)),
        targets=("hospital2",),
        split="hospitals 0, 3 and 4 train, 1 validates, 2 is the test hospital: all its patches, less the support",
        classes=("normal", "tumor"),
        metric="accuracy",
        preprocess=replace(IMAGENET, resize=96, crop=96),
        recipe="DenseNet-121 from scratch, published by WILDS for 10 seeds: SGD, rate 1e-3, no augmentation",
        licence="CC0 1.0",
        where="get camelyon17_v1.0 from the WILDS data page",
        layout="camelyon17",
        counts=dict(
            zip((f"hospital{number}" for number in range(5)), (59_436, 34_904, 85_054, 129_838, 146_722), strict=True)
        ),
        folders=("camelyon17_v1.0",),
    ),
    Collection(
        name="iwildcam",
        title="iWildCam2020-WILDS",
        domains=("train", "id_val", "id_test", "val", "test"),
        targets=("test",),
        split="by camera: the photographs of the test cameras, less the support",
        classes=tuple(str(number) for number in range(182)),
        metric="macro_f1",
        # WILDS squeezes the photograph to 448x448, where this keeps its proportions and cuts the sides
        preprocess=replace(IMAGENET, resize=448, crop=448),
        recipe="ResNet-50 from ImageNet, published by WILDS for 3 seeds: Adam, rate 3e-5, 12 epochs, no augmentation",
        licence="Community Data License Agreement, Permissive, 1.0",
        where="get iwildcam_v2.0 from the WILDS data page",
        layout="iwildcam",
        counts={"train": 129_809, "id_val": 7314, "id_test": 8154, "val": 14_961, "test": 42_791},
        folders=("iwildcam_v2.0",),
        skip_rare=True,
    ),
    Collection(
        name="domainnet",
        title="DomainNet",
        domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        targets=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        split=PAIRS,
        classes=(),
        unnamed=345,
        metric="accuracy",
        preprocess=STANDARD,
        recipe=f"not in the paper; as for Office-Home: ResNet-50 from ImageNet, one source domain, {ERM}, RandAugment",
        licence="for non-commercial research",
        where="get the images and the train and test lists of the cleaned version from the DomainNet page of "
        "'Moment Matching for Multi-Source Domain Adaptation' (Peng et al. 2019)",
        layout="lists",
        counts={
            "clipart": 48_129,
            "infograph": 51_605,
            "painting": 72_266,
            "quickdraw": 172_500,
            "real": 172_947,
            "sketch": 69_128,
        },
    ),
    Collection(
        name="digits",
        title="Digits: MNIST and UCI",
        domains=("mnist", "uci"),
        targets=("uci",),
        split="5,000 MNIST digits, of which 4,000 train the source network, to 1,797 of UCI: all, less the support",
        classes=tuple(str(digit) for digit in range(10)),
        metric="accuracy",
        preprocess=digits.PREPROCESS,
        recipe="a narrow ResNet of ten layers on MNIST: `python -m fewshift.data.digits`, SGD, 12 epochs, one cycle",
        licence="MNIST CC BY-SA 3.0, UCI CC BY 4.0",
        where="nothing to get: both come with the library's dependencies",
        layout="digits",
        counts={"mnist": 5000, "uci": 1797},
    ),
)

COLLECTIONS: dict[str, Collection] = {collection.name: collection for collection in _DESCRIBED}

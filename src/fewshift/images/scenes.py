"""Scenes: images with a label for every pixel, kept as pairs of files in two folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from PIL import ExifTags
from torch import Tensor

from fewshift.core.draws import others
from fewshift.core.labels import PIXELS, Labels
from fewshift.core.losses import IGNORE
from fewshift.core.randomness import checked_seed
from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.cityscapes import RGB
from fewshift.images.class_names import class_numbers, plain_name
from fewshift.images.folders import image_files, open_image
from fewshift.images.formats import is_image_entry, opened
from fewshift.images.label_files import PALETTE_FILE, Encoding, palette_of, read_palette
from fewshift.images.preprocess import Preprocess
from fewshift.images.walking import entries_below

VOID = frozenset({"void", "ignore", "unlabelled", "unlabeled"})  # names for pixels without a label


@dataclass(eq=False)
class Scenes:
    """Images and their label files, read on access: a dataset of (tensor, class numbers).

    Images may differ in size. `palette` has a colour for each class, for pictures.
    """

    files: tuple[Path, ...]
    label_files: tuple[Path, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess
    encoding: Encoding
    palette: tuple[RGB, ...]
    kind: ClassVar[Labels] = PIXELS

    def __post_init__(self) -> None:
        if len(self.files) != len(self.label_files):
            raise FewshiftError(f"{len(self.files)} images and {len(self.label_files)} label files: give one for each")
        if len(self.classes) > IGNORE:
            raise FewshiftError(
                f"the network has {len(self.classes)} classes, and a label of a pixel is a number below {IGNORE}: "
                "use one that has fewer"
            )
        if not self.classes or len(self.palette) != len(self.classes):
            raise FewshiftError(
                f"{len(self.classes)} classes and {len(self.palette)} colours: give a colour for each class"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, labels = self.pixels(index)
        return self.preprocess.normalise(pixels), labels.long()

    def pixels(self, index: int) -> tuple[Tensor, Tensor]:
        """One image (channels, height, width) and its class numbers (height, width), resized and cropped, as bytes."""
        file, label_file = self.files[index], self.label_files[index]
        image, labels = open_image(file, self.preprocess.mode), self.encoding.read(label_file)
        if image.size != labels.shape[::-1]:
            sizes = [f"{width}x{height}" for width, height in (image.size, labels.shape[::-1])]
            turned = image.size == labels.shape and _is_turned(file)
            raise FewshiftError(
                f"{file} is {sizes[0]} pixels{' upright, by its EXIF orientation,' * turned} and {label_file} is "
                f"{sizes[1]}: {'turn the labels too' if turned else 'label every image in its own size'}"
            )
        try:
            return self.preprocess.pixels(image), self.preprocess.labels(labels)
        except FewshiftError as error:
            raise FewshiftError(f"{file}: {error}") from error

    def size(self, index: int) -> tuple[int, int]:
        """Width and height of one image as it was taken and labelled."""
        with opened(self.label_files[index]) as image:
            return image.size

    def subset(self, indices: Tensor | Sequence[int]) -> Scenes:
        """The scenes at `indices`, in that order, with the same classes."""
        chosen = positions(indices).tolist()
        files, label_files = (tuple(paths[at] for at in chosen) for paths in (self.files, self.label_files))
        return replace(self, files=files, label_files=label_files)

    def without(self, indices: Tensor | Sequence[int]) -> Tensor:
        """The indices left for evaluation when those at `indices` are the support."""
        return others(positions(indices), len(self))


def draw_scenes(total: int, shots: int, seed: int) -> Tensor:
    """Indices of `shots` scenes of `total`, drawn at random; the draw for k is part of the draw for k + 1."""
    if shots > total:
        plural = "is 1 labelled image" if total == 1 else f"are {total:,} labelled images"
        raise FewshiftError(f"there {plural}, {shots} shots asked: add {shots - total} or ask for {total}")
    return torch.randperm(total, generator=torch.Generator().manual_seed(checked_seed(seed)))[:shots]


def joined_scenes(parts: Sequence[Scenes]) -> Scenes:
    """All scenes of several domains, one domain after the other."""
    first, *rest = parts
    if any((part.classes, part.encoding) != (first.classes, first.encoding) for part in rest):
        raise FewshiftError("domains with different classes or labels cannot be joined: join those of one data set")
    files = tuple(file for part in parts for file in part.files)
    return replace(first, files=files, label_files=tuple(file for part in parts for file in part.label_files))


def _is_turned(file: Path) -> bool:
    """Whether the EXIF orientation turns a photograph."""
    with opened(file) as image:
        return bool(image.getexif().get(ExifTags.Base.Orientation, 1) > 1)


def positions(indices: Tensor | Sequence[int]) -> Tensor:
    """Indices as a tensor; a mask is an error."""
    if isinstance(indices, Tensor) and indices.dtype == torch.bool:
        raise FewshiftError("indices are a mask: give the positions of its true values")
    return torch.as_tensor(indices, dtype=torch.long)


# --- folders


@dataclass(frozen=True)
class Pairing:
    """Two folders whose files belong together by name, at any depth: images/a.jpg with labels/a.png."""

    images: Path
    labels: Path
    image_end: str = ""  # what a name has after the part that both share
    label_end: str = ""

    def files(self, wanted: Set[str] | None = None) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Images and label files in the same order; `wanted` are shared names without folders, all by default."""
        images = _by_name(image_files(self.images), self.images, self.image_end, wanted)
        labels = _by_name(_label_files(self.labels), self.labels, self.label_end, wanted)
        alone = [
            f"{len(names)} of {len(those)} {kind}{'s' * (len(those) > 1)} in {place} "
            f"{'has' if len(names) == 1 else 'have'} no {other}, the first is {those[min(names)].name}"
            for those, these, kind, place, other in (
                (images, labels, "image", self.images, "label PNG"),
                (labels, images, "label file", self.labels, "image"),
            )
            if (names := those.keys() - these.keys())
        ]
        if alone:
            raise FewshiftError(f"{', and '.join(alone)}: add what is missing or remove what is alone")
        return tuple(images.values()), tuple(labels[name] for name in images)

    def labelled(self) -> bool:
        """Whether both folders exist, and the labels have a file that ends in `label_end`."""
        ends = (path.stem.endswith(self.label_end) for path in _label_files(self.labels))
        return self.images.is_dir() and self.labels.is_dir() and any(ends)


CITYSCAPES = {
    "_gtFine_labelIds": Encoding(cityscapes.CITYSCAPES_IDS),
    "_gtFine_labelTrainIds": Encoding(cityscapes.TRAIN_IDS),
}


def scene_folder(
    root: str | Path,
    preprocess: Preprocess,
    classes: Sequence[str] | None = None,
    palette: str | Path | None = None,
    *,
    wanted: Set[str] | None = None,
) -> Scenes:
    """Read root/images and root/labels, or Cityscapes as it is published (all of it, a split or a city).

    `classes` are the names of a network's outputs, in order. A palette file, by default root/palette.txt, has one "red
    green blue name" per line: void and unlabelled are ignored, and lines of the same name are one class. Label files
    are then colour images, or index files whose values are line numbers from 0. Without a palette, the values of index
    files are positions in `classes`. With both, names are compared: a palette may lack some of the classes, but cannot
    add any. A palette also names classes that are only numbers. `wanted` are the names, without folders and suffixes,
    of the scenes to read; all by default.
    """
    root = Path(root)
    where = scene_layout(root)
    if where is None:
        raise FewshiftError(
            f"{root} has no labelled scenes: put images into {root}/images and label PNGs of the same names into "
            f"{root}/labels"
        )
    table = root / PALETTE_FILE if palette is None else Path(palette)
    if palette is not None or table.is_file():
        names, encoding, colours = _painted(table, classes)
    elif where.label_end in CITYSCAPES:
        names, numbers = _matched(cityscapes.CLASSES, classes, str(root))
        ids = CITYSCAPES[where.label_end].values or {}
        encoding = Encoding({raw: own if own == IGNORE else numbers[own] for raw, own in ids.items()})
        colours = dict(zip(numbers, cityscapes.PALETTE, strict=True))
    elif classes is not None:
        names, encoding, colours = tuple(classes), Encoding.index(len(classes)), {}
    else:
        raise FewshiftError(
            f"the meaning of the labels in {where.labels} is not known: pass classes, the names in the network's "
            f"order, or write {table} with one 'red green blue name' per line"
        )
    files, label_files = where.files(wanted)
    shown = tuple(colours.get(number, colour) for number, colour in enumerate(palette_of(names)))
    return Scenes(files, label_files, names, preprocess, encoding, shown)


def scene_layout(root: str | Path) -> Pairing | None:
    """Where a folder has its images and labels; None if it has no scenes."""
    root = Path(root)
    _refuse_labels(root)
    if (root / "images").is_dir() and (root / "labels").is_dir():
        return Pairing(root / "images", root / "labels")
    inside = root / "leftImg8bit" if (root / "leftImg8bit").is_dir() else root.absolute()
    for images in (inside, *inside.parents):
        labels = images.parent / "gtFine" / inside.relative_to(images)
        if images.name == "leftImg8bit" and labels.is_dir():
            ways = [Pairing(inside, labels, "_leftImg8bit", end) for end in CITYSCAPES]
            return next((way for way in ways if way.labelled()), ways[0])
    return None


def _refuse_labels(root: Path) -> None:
    """Raise an error for the label folder of Cityscapes, and name the folder of its images."""
    inside = root.absolute()
    for labels in (inside, *inside.parents):
        images = labels.parent / "leftImg8bit" / inside.relative_to(labels)
        if labels.name == "gtFine" and images.is_dir():
            raise FewshiftError(f"{root} has the labels of Cityscapes, not its images: give {images}")


def _painted(file: Path, classes: Sequence[str] | None) -> tuple[tuple[str, ...], Encoding, dict[int, RGB]]:
    """Class names, the encoding of label files and the colour of each class, from a palette file."""
    lines = read_palette(file)
    known = set(classes or ())  # a class of the network may be called "void"
    own = tuple(dict.fromkeys(name for name, _ in lines if name in known or name.casefold() not in VOID))
    if not own:
        raise FewshiftError(f"{file} names no classes: write one 'red green blue name' per line")
    names, numbers = _matched(own, classes, str(file))
    number_of = dict(zip(own, numbers, strict=True))
    colours: dict[RGB, int] = {}
    for name, colour in lines:
        if colours.setdefault(colour, number_of.get(name, IGNORE)) != number_of.get(name, IGNORE):
            raise FewshiftError(f"{file} paints two classes {colour}, the second is {name!r}: give each its colour")
    values = {position: number_of.get(name, IGNORE) for position, (name, _) in enumerate(lines)}
    shown = {number_of[name]: colour for name, colour in reversed(lines) if name in number_of}
    return names, Encoding(values, colours, check_table=True), shown


def _matched(own: Sequence[str], classes: Sequence[str] | None, whose: str) -> tuple[tuple[str, ...], list[int]]:
    """The names to use, and the position of each of `own` in them."""
    if classes is None or tuple(classes) == tuple(map(str, range(len(own)))):
        return tuple(own), list(range(len(own)))
    if tuple(classes) == tuple(map(str, range(len(classes)))):
        raise FewshiftError(
            f"{whose} names {len(own)} classes, and the network has {len(classes)} outputs without names: pass "
            "--classes (classes=), a name for each output in their order"
        )
    numbers = class_numbers(own, classes, whose, plain_name, "give it the network's name, or void")
    return tuple(classes), list(numbers.values())


def _label_files(folder: Path) -> Iterator[Path]:
    return (Path(entry.path) for entry in entries_below(folder) if is_image_entry(entry, {".png"}))


def _by_name(files: Iterable[Path], root: Path, end: str, wanted: Set[str] | None) -> dict[str, Path]:
    """Files by what their path has before `end` and the suffix."""
    named: dict[str, Path] = {}
    for file in files:
        name = file.relative_to(root).with_suffix("").as_posix()
        if not name.endswith(end):
            continue
        name = name.removesuffix(end)
        if wanted is not None and name.rpartition("/")[2] not in wanted:
            continue
        if name in named:
            raise FewshiftError(f"{named[name]} and {file} have the same name: rename one")
        named[name] = file
    return named

"""Scenes: images with a label for every pixel, kept as pairs of files.

A label file is read as it is stored, pixel for pixel, and checked before anything is resized: a value that is no class
is named with the number of its pixels, because what is passed over in a label file is missed in every score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from fewshift.core.losses import IGNORE
from fewshift.core.support import others
from fewshift.errors import FewshiftError
from fewshift.images import street
from fewshift.images.folders import image_files, open_image
from fewshift.images.palettes import palette_of
from fewshift.images.preprocess import Preprocess, opened
from fewshift.images.street import RGB

Array = np.ndarray[Any, Any]

PALETTE_FILE = "palette.txt"
VOID = frozenset({"void", "ignore", "unlabelled", "unlabeled"})  # names of what is not labelled
COLOURED = frozenset({"RGB", "RGBA"})  # image modes
BLACK: RGB = (0, 0, 0)
MANY = 5  # values or colours that an error names


# --- label files


@dataclass(frozen=True)
class Encoding:
    """How a label file becomes class numbers: by the value of a pixel, by its colour, or by what the file has.

    `values` maps what an index file stores and `colours` what a colour image shows to a class, or to 255. A file with
    a colour table is an index file where `values` are given, unless its table is asked too. What is not listed is an
    error, or ignored if not `strict`; the value 255 is always ignored.
    """

    values: Mapping[int, int] | None = None
    colours: Mapping[RGB, int] | None = None
    strict: bool = True
    first_channel: bool = False  # whether the values of a colour image are those of its first channel, as in SYNTHIA
    ask_table: bool = False  # whether the colour table of a file is heard against its values, as with a palette file

    def __post_init__(self) -> None:
        if not self.values and not self.colours:
            raise FewshiftError("an encoding knows neither values nor colours: give one of them")

    @classmethod
    def index(cls, classes: int) -> Encoding:
        """Of files whose values are the class numbers."""
        return cls(values={number: number for number in range(classes)})

    def read(self, file: Path) -> Array:
        """The class of every pixel of a label file (height, width), as bytes."""
        with opened(file) as image:
            coloured = image.mode in COLOURED
            if self.first_channel and coloured:
                stored = np.asarray(_low_bytes(image))[..., 0]
            elif self.colours is not None and (coloured or self.values is None):
                stored = np.asarray(image.convert("RGB"))
            else:
                stored = np.asarray(image.getchannel(0) if image.mode == "LA" else image)
            table = _colour_table(image) if self.ask_table and image.mode == "P" else None
        try:
            return self.decode(stored) if table is None else self._by_table(stored, table).decode(stored)
        except FewshiftError as error:
            raise FewshiftError(f"{file}: {error}") from error

    def decode(self, stored: Array) -> Array:
        """The classes, as bytes, of stored values (height, width) or colours (height, width, 3)."""
        if stored.ndim == 3 and self.colours is not None:
            red, green, blue = (stored[..., channel].astype(np.int64) for channel in range(3))
            known = {_code(*colour): number for colour, number in self.colours.items()}
            return self._looked_up(red << 16 | green << 8 | blue, known, _unknown_colours)
        if stored.ndim == 3:
            raise FewshiftError(
                f"the labels are colours, whose classes are not known: write {PALETTE_FILE} with one 'red green blue "
                "name' in each line, or save class numbers"
            )
        if stored.dtype.kind not in "bui":
            raise FewshiftError(f"the labels are {stored.dtype}, not whole numbers: save class numbers")
        return self._looked_up(stored.astype(np.int64), {IGNORE: IGNORE, **(self.values or {})}, _unknown_values)

    def _by_table(self, stored: Array, table: Sequence[RGB]) -> Encoding:
        """The encoding of one file: a value is the class that its table paints it, or else the number of a line.

        Colours decide if all that occur are the palette's. Black, of which tables are full where nothing was meant,
        and the grey of a value's own number state nothing: by themselves they may agree with the lines, no more.
        """
        lines, colours = {IGNORE: IGNORE, **(self.values or {})}, self.colours or {}
        values = np.unique(stored).tolist()
        painted = {it: colours[table[it]] for it in values if table[it] in colours}
        stated = {it: number for it, number in painted.items() if table[it] not in (BLACK, (it, it, it))}
        used = set(values) - {IGNORE} | painted.keys()
        numbered, known = used <= lines.keys(), used == painted.keys()
        doubtful = IGNORE not in stated and painted.get(IGNORE, IGNORE) != IGNORE
        if known and (stated or not numbered) and not doubtful:
            return replace(self, values=painted)
        one_each = len({table[it] for it in used}) == len(used)  # what is all black is not painted
        heard = painted if doubtful or (known and one_each) else stated
        if against := [it for it, number in heard.items() if (numbered or it == IGNORE) and lines[it] != number]:
            colour = " ".join(map(str, table[against[0]]))
            raise FewshiftError(
                f"value {against[0]} means one thing by its number and another by the colour {colour} that the "
                "file's own table gives it: save class numbers without a colour table, or a colour image"
            )
        if stated and not numbered:
            codes = np.array([_code(*it) for it in table])[stored[~np.isin(stored, [*painted, IGNORE])]]
            raise _unknown_colours(codes, {_code(*it): number for it, number in colours.items()})
        return self

    def _looked_up(
        self, codes: Array, known: Mapping[int, int], refusal: Callable[[Array, Mapping[int, int]], FewshiftError]
    ) -> Array:
        """The class of each code, from a table that has one more entry, for all codes beyond it."""
        missing = -1 if self.strict else IGNORE
        table = np.full(max(known) + 2, missing, dtype=np.int16)
        table[list(known)] = list(known.values())
        # a negative number is a huge one where there is no sign
        found = table[np.minimum(codes.astype(np.uint64), len(table) - 1)]
        if (unknown := codes[found < 0]).size:
            raise refusal(unknown, known)
        return found.astype(np.uint8)


def _code(red: int, green: int, blue: int) -> int:
    return red << 16 | green << 8 | blue


def _colour_table(image: Image.Image) -> list[RGB]:
    """The colour of each of 256 values; black where a table ends before."""
    table = np.zeros((IGNORE + 1, 3), np.uint8)
    own = np.array(image.getpalette("RGB") or [], np.uint8).reshape(-1, 3)
    table[: len(own)] = own
    return [(red, green, blue) for red, green, blue in table.tolist()]


def _low_bytes(image: Image.Image) -> Image.Image:
    """The image with the low byte of 16-bit colours, where small numbers are; Pillow keeps the high one."""
    if image.format == "PNG":
        image.tile = [(*it[:3], it[3].replace("16B", "16L")) for it in image.tile]  # type: ignore[attr-defined]
    return image


def _unknown_values(values: Array, known: Mapping[int, int]) -> FewshiftError:
    usable = sorted(set(known) - {IGNORE})
    told = f"{usable[0]} to {usable[-1]}" if usable == list(range(usable[0], usable[-1] + 1)) else _some(usable)
    found = _counted("value", values, str)
    return FewshiftError(
        f"the labels have {found}, outside the classes: use {told}, and {IGNORE} where nothing is labelled, or tell in "
        f"{PALETTE_FILE} what they mean"
    )


def _unknown_colours(codes: Array, known: Mapping[int, int]) -> FewshiftError:
    told = _counted("colour", codes, lambda code: f"{code >> 16} {code >> 8 & 255} {code & 255}")
    return FewshiftError(
        f"the labels have {told}, not among the {len(known)} of the palette: add to it or repaint what is wrong"
    )


def _counted(what: str, codes: Array, name: Callable[[int], str]) -> str:
    """Which codes there are and how often: "values 37 (120 pixels), 90 (1 pixel)"."""
    found, counts = (it.tolist() for it in np.unique(codes, return_counts=True))
    told = [f"{name(it)} ({count:,} pixel{'s' * (count > 1)})" for it, count in zip(found, counts, strict=True)]
    return f"{what}{'s' * (len(told) > 1)} {_some(told)}"


def _some(things: Sequence[Any]) -> str:
    rest = f" and {len(things) - MANY} more" if len(things) > MANY else ""
    return ", ".join(map(str, things[:MANY])) + rest


# --- pairs of files


@dataclass(eq=False)
class Scenes:
    """Images and their label maps, read when asked for: a dataset of (tensor, class numbers).

    Images may differ in size. `palette` has a colour for each class, for pictures.
    """

    files: tuple[Path, ...]
    label_files: tuple[Path, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess
    encoding: Encoding
    palette: tuple[RGB, ...]

    def __post_init__(self) -> None:
        if len(self.files) != len(self.label_files):
            raise FewshiftError(f"{len(self.files)} images and {len(self.label_files)} label files: give one for each")
        if not 0 < len(self.classes) <= IGNORE or len(self.palette) != len(self.classes):
            raise FewshiftError(
                f"{len(self.classes)} classes and {len(self.palette)} colours: give a colour for each of 1 to {IGNORE} "
                "classes"
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

    def original(self, index: int) -> Image.Image:
        """One image as it was taken, in colour."""
        return open_image(self.files[index], "RGB")

    def subset(self, indices: Tensor | Sequence[int]) -> Scenes:
        """The scenes at `indices`, in that order, with the same classes."""
        chosen = _positions(indices).tolist()
        files, label_files = (tuple(its[it] for it in chosen) for its in (self.files, self.label_files))
        return replace(self, files=files, label_files=label_files)

    def without(self, indices: Tensor | Sequence[int]) -> Tensor:
        """The indices that may be used for evaluation once those at `indices` were seen as support."""
        return others(_positions(indices), len(self))


def joined_scenes(parts: Sequence[Scenes]) -> Scenes:
    """All scenes of several domains, one domain after the other."""
    first, *rest = parts
    if any((it.classes, it.encoding) != (first.classes, first.encoding) for it in rest):
        raise FewshiftError("domains with different classes or labels cannot be joined: join those of one data set")
    files = tuple(file for it in parts for file in it.files)
    return replace(first, files=files, label_files=tuple(file for it in parts for file in it.label_files))


def _is_turned(file: Path) -> bool:
    """Whether a photograph is shown upright in another orientation than it is stored in."""
    with opened(file) as image:
        return bool(image.getexif().get(ExifTags.Base.Orientation, 1) > 1)


def _positions(indices: Tensor | Sequence[int]) -> Tensor:
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
        """Images and label files in the same order: all, or those whose common name, without folders, is wanted."""
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
        """Whether there are both folders, and a label file with such a name."""
        ends = (path.stem.endswith(self.label_end) for path in self.labels.rglob("*.png"))
        return self.images.is_dir() and self.labels.is_dir() and any(ends)


CITYSCAPES = {
    "_gtFine_labelIds": Encoding(street.CITYSCAPES_IDS),
    "_gtFine_labelTrainIds": Encoding(street.TRAIN_IDS),
}


def scene_folder(
    root: str | Path, preprocess: Preprocess, classes: Sequence[str] | None = None, palette: str | Path | None = None
) -> Scenes:
    """Read root/images and root/labels, or Cityscapes as it is published (all of it, a split or a city).

    Without `classes`, those a network was trained with, they come from a palette file, root/palette.txt if there is
    one: "red green blue name" in each line, where void and unlabelled are ignored and lines of the same name are one
    class. Label files may then be colour images or index files, whose values are positions of lines, from 0. With
    `classes` and no palette the values of index files are positions in it. With both, names are compared: a palette
    may lack some of the classes, but cannot add any; it names classes that are mere numbers.
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
        names, numbers = _matched(street.CLASSES, classes, str(root))
        encoding = _renumbered(CITYSCAPES[where.label_end], numbers)
        colours = dict(zip(numbers, street.PALETTE, strict=True))
    elif classes is not None:
        names, encoding, colours = tuple(classes), Encoding.index(len(classes)), {}
    else:
        raise FewshiftError(
            f"what the values of the labels in {where.labels} mean is not known: pass classes, the names in the "
            f"network's order, or write {table} with one 'red green blue name' in each line"
        )
    files, label_files = where.files()
    shown = tuple(colours.get(number, colour) for number, colour in enumerate(palette_of(names)))
    return Scenes(files, label_files, names, preprocess, encoding, shown)


def scene_layout(root: str | Path) -> Pairing | None:
    """Where a folder has its images and labels; None for one that is no folder of scenes."""
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
    """One sentence for the labels of Cityscapes, given in place of the images beside them."""
    inside = root.absolute()
    for labels in (inside, *inside.parents):
        images = labels.parent / "leftImg8bit" / inside.relative_to(labels)
        if labels.name == "gtFine" and images.is_dir():
            raise FewshiftError(f"{root} has the labels of Cityscapes, not its images: give {images}")


def read_palette(file: str | Path) -> list[tuple[str, RGB]]:
    """The name and the colour in each line of a palette file; empty lines and comments (#) are left out."""
    file = Path(file)
    if not file.is_file():
        raise FewshiftError(f"no such palette {file}: check the path")
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        *colour, name = line.split(maxsplit=3)
        if len(colour) != 3 or not all(it.isdecimal() and int(it) <= 255 for it in colour):
            raise FewshiftError(
                f"line {number} of {file} is {line[:80]!r}: write red, green and blue from 0 to 255 and a name"
            )
        lines.append((name.strip(), (int(colour[0]), int(colour[1]), int(colour[2]))))
    return lines


def _painted(file: Path, classes: Sequence[str] | None) -> tuple[tuple[str, ...], Encoding, dict[int, RGB]]:
    """Class names, the encoding of label files and the colour of each class, from a palette file."""
    lines = read_palette(file)
    own = tuple(dict.fromkeys(name for name, _ in lines if name.casefold() not in VOID))
    if not own:
        raise FewshiftError(f"{file} names no classes: write one 'red green blue name' in each line")
    names, numbers = _matched(own, classes, str(file))
    number_of = dict(zip(own, numbers, strict=True))
    colours: dict[RGB, int] = {}
    for name, colour in lines:
        if colours.setdefault(colour, number_of.get(name, IGNORE)) != number_of.get(name, IGNORE):
            raise FewshiftError(f"{file} paints two classes {colour}, the second is {name!r}: give each its colour")
    values = {position: number_of.get(name, IGNORE) for position, (name, _) in enumerate(lines)}
    shown = {number_of[name]: colour for name, colour in reversed(lines) if name in number_of}
    return names, Encoding(values, colours, ask_table=True), shown


def _matched(own: Sequence[str], classes: Sequence[str] | None, whose: str) -> tuple[tuple[str, ...], list[int]]:
    """The names to use, and for each of `own` its position there."""
    if classes is None or tuple(classes) == tuple(map(str, range(len(own)))):
        return tuple(own), list(range(len(own)))
    if tuple(classes) == tuple(map(str, range(len(classes)))):
        raise FewshiftError(
            f"{whose} names {len(own)} classes, and the network has {len(classes)} outputs without names: pass "
            "--classes (classes=), a name for each output in their order"
        )
    known = {_plain(name): number for number, name in enumerate(classes)}
    if unknown := [name for name in own if _plain(name) not in known]:
        raise FewshiftError(
            f"{whose} has a class {unknown[0]!r} that is none of the network's {len(classes)} ({_some(classes)}): "
            "give it the network's name, or void"
        )
    return tuple(classes), [known[_plain(name)] for name in own]


def _renumbered(encoding: Encoding, numbers: Sequence[int]) -> Encoding:
    values = encoding.values or {}
    return replace(
        encoding, values={it: number if number == IGNORE else numbers[number] for it, number in values.items()}
    )


def _label_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.suffix.lower() == ".png")
    return sorted(path for path in found if not any(it.startswith(".") for it in path.relative_to(folder).parts))


def _by_name(files: Sequence[Path], root: Path, end: str, wanted: Set[str] | None) -> dict[str, Path]:
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


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())

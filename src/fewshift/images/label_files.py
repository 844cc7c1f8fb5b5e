"""Label files: the class of every pixel, read from PNGs and written to them, and the colours that show it.

A label file is read as it is stored, pixel for pixel, and checked before anything is resized. A value that is no class
is an error that names it and counts its pixels: a label that is skipped is missing from every score.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from fewshift.core._files import whole
from fewshift.core.losses import IGNORE
from fewshift.errors import FewshiftError
from fewshift.files.parsing import whole_number
from fewshift.images import cityscapes
from fewshift.images.cityscapes import RGB
from fewshift.images.class_names import plain_name, refuse_repeated, some
from fewshift.images.formats import opened

Array = np.ndarray[Any, Any]
Palette = Sequence[RGB]

PALETTE_FILE = "palette.txt"
ORIGIN = "fewshift"  # the key of a label file's note
COLOURED = frozenset({"RGB", "RGBA"})  # image modes
BLACK: RGB = (0, 0, 0)  # the colour of unlabelled pixels
MANY = 5  # values or colours that an error names


# --- reading


@dataclass(frozen=True)
class Encoding:
    """How a label file becomes class numbers: by the value of a pixel, or by its colour.

    `values` maps what an index file stores, `colours` what a colour image shows, to a class or to 255. A file with a
    colour table is an index file where `values` are known. Anything unlisted is an error, or ignored if not `strict`;
    the value 255 is always ignored.
    """

    values: Mapping[int, int] | None = None
    colours: Mapping[RGB, int] | None = None
    strict: bool = True
    first_channel: bool = False  # whether a colour image stores its values in the first channel, as SYNTHIA does
    check_table: bool = False  # whether a file's colour table must not contradict its values

    def __post_init__(self) -> None:
        if not self.values and not self.colours:
            raise FewshiftError("an encoding knows neither values nor colours: give one of them")

    @classmethod
    def index(cls, classes: int) -> Encoding:
        """The encoding of files whose values are the class numbers."""
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
            shown = np.asarray(image.convert("RGB")) if self.check_table and image.mode == "P" else None
        try:
            return self.decode(stored) if shown is None else self._decode_both(stored, shown)
        except FewshiftError as error:
            raise FewshiftError(f"{file}: {error}") from error

    def decode(self, stored: Array) -> Array:
        """The classes, as bytes, of stored values (height, width) or colours (height, width, 3)."""
        if stored.ndim == 3 and self.colours is None:
            raise FewshiftError(
                f"the labels are colours with unknown classes: write {PALETTE_FILE} with one 'red green blue name' "
                "per line, or save class numbers"
            )
        if stored.ndim == 2 and stored.dtype.kind not in "bui":
            raise FewshiftError(f"the labels are {stored.dtype}, not whole numbers: save class numbers")
        classes = self._looked_up(stored)
        unknown = classes < 0
        if self.strict and unknown.any():
            raise self._refusal(stored[unknown])
        return np.where(unknown, IGNORE, classes).astype(np.uint8)

    def _decode_both(self, values: Array, colours: Array) -> Array:
        """The classes of an index file with a colour table: by value, by colour, or an error where the two differ."""
        by_value, by_colour = self._looked_up(values), self._looked_up(colours)
        if (by_value < 0).any():
            return self.decode(values if (by_colour < 0).any() else colours)
        if (against := (by_colour >= 0) & (by_colour != by_value)).any():
            value, colour = values[against][0], " ".join(map(str, colours[against][0]))
            raise FewshiftError(
                f"value {value} is one class by its number and another by its colour {colour} in the file's table: "
                "save class numbers without a colour table, or a colour image"
            )
        return by_value.astype(np.uint8)

    def _looked_up(self, stored: Array) -> Array:
        """The class of each value (height, width) or colour (height, width, 3); -1 where none is known."""
        if stored.ndim == 3:
            codes, known = _coded(stored), {_code(*colour): number for colour, number in (self.colours or {}).items()}
        else:
            codes, known = stored.astype(np.int64), {IGNORE: IGNORE, **(self.values or {})}
        table = np.full(max(known) + 2, -1, dtype=np.int16)
        table[list(known)] = list(known.values())
        # the last entry stands for all codes beyond; as unsigned numbers, negative codes are beyond too
        classes: Array = table[np.minimum(codes.astype(np.uint64), len(table) - 1)]
        return classes

    def _refusal(self, unknown: Array) -> FewshiftError:
        """The error that counts unknown values (n,) or colours (n, 3)."""
        if unknown.ndim == 2:
            counts = _counted("colour", _coded(unknown), lambda code: f"{code >> 16} {code >> 8 & 255} {code & 255}")
            return FewshiftError(
                f"the labels have {counts}, not among the {len(self.colours or {})} of the palette: add to it or "
                "repaint what is wrong"
            )
        usable = sorted(set(self.values or {}) - {IGNORE})
        gapless = usable == list(range(usable[0], usable[-1] + 1))
        allowed = f"{usable[0]} to {usable[-1]}" if gapless else some(usable, MANY)
        return FewshiftError(
            f"the labels have {_counted('value', unknown.astype(np.int64), str)}, outside the classes: use {allowed}, "
            f"and {IGNORE} where nothing is labelled, or write in {PALETTE_FILE} what they mean"
        )


def _code(red: int, green: int, blue: int) -> int:
    return red << 16 | green << 8 | blue


def _coded(colours: Array) -> Array:
    red, green, blue = (colours[..., channel].astype(np.int64) for channel in range(3))
    codes: Array = red << 16 | green << 8 | blue
    return codes


def _low_bytes(image: Image.Image) -> Image.Image:
    """The image with the low byte of 16-bit colours, where small numbers are; Pillow keeps the high one."""
    if image.format == "PNG":
        image.tile = [(*tile[:3], tile[3].replace("16B", "16L")) for tile in image.tile]  # type: ignore[attr-defined]
    return image


def _counted(what: str, codes: Array, name: Callable[[int], str]) -> str:
    """Which codes occur and how often: "values 37 (120 pixels), 90 (1 pixel)"."""
    counts = zip(*(column.tolist() for column in np.unique(codes, return_counts=True)), strict=True)
    parts = [f"{name(code)} ({count:,} pixel{'s' * (count > 1)})" for code, count in counts]
    return f"{what}{'s' * (len(parts) > 1)} {some(parts, MANY)}"


def read_palette(file: str | Path) -> list[tuple[str, RGB]]:
    """The name and the colour in each line of a palette file; empty lines and comments (#) are left out."""
    file = Path(file)
    if not file.is_file():
        raise FewshiftError(f"no such palette {file}: check the path")
    return _palette_lines(file.read_text(encoding="utf-8", errors="replace"), file)


def _palette_lines(text: str, file: Path) -> list[tuple[str, RGB]]:
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        *words, name = line.split(maxsplit=3)
        colour = [value for value in map(whole_number, words) if value is not None and value <= IGNORE]
        if len(colour) != 3 or len(words) != 3:
            raise FewshiftError(
                f"line {number} of {file} is {line[:80]!r}: write red, green and blue from 0 to 255 and a name"
            )
        lines.append((name.strip(), (colour[0], colour[1], colour[2])))
    return lines


def read_labels(file: str | Path) -> Tensor:
    """The values of an index PNG (height, width), as stored."""
    with opened(file) as image:
        return torch.from_numpy(np.array(image))


# --- colours

# Okabe and Ito's seven, then four that stay as far from them, and from black, for eyes without red or green cones
FIRST_COLOURS: tuple[RGB, ...] = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
    (0, 0, 255), (150, 255, 165), (0, 0, 75), (90, 45, 0),
)  # fmt: skip


def palette_of(classes: Sequence[str]) -> tuple[RGB, ...]:
    """A colour for each class: those of Cityscapes where it has all the names, the default ones otherwise."""
    known = {plain_name(name): colour for name, colour in zip(cityscapes.CLASSES, cityscapes.PALETTE, strict=True)}
    names = [plain_name(name) for name in classes]
    cityscapes_alone = known.keys() >= set(names) and len(set(names)) == len(names)
    return tuple(known[name] for name in names) if cityscapes_alone else default_palette(len(classes))


def default_palette(classes: int) -> tuple[RGB, ...]:
    """A colour for each class, always the same ones: the first eleven, then those of Pascal VOC."""
    further = (_pascal_colour(number) for number in range(1, classes - len(FIRST_COLOURS) + 1))
    return (*FIRST_COLOURS, *further)[:classes]


def _pascal_colour(number: int) -> RGB:
    """The colour of a class in Pascal VOC: its bits, the lowest first, are high bits of red, green and blue in turn."""
    red, green, blue = (
        sum((number >> 3 * place + channel & 1) << 7 - place for place in range(3)) for channel in range(3)
    )
    return red, green, blue


def colour_table(palette: Palette) -> npt.NDArray[np.uint8]:
    """A colour for each of 256 values; values without one, and unlabelled pixels, are black."""
    table = np.zeros((IGNORE + 1, 3), np.uint8)
    table[: len(palette)] = palette
    table[IGNORE] = BLACK
    return table


# --- writing


def indexed(labels: Tensor, palette: Palette) -> Image.Image:
    """Labels (H, W) as an image of mode "P": its values are classes, and viewers show them in colours."""
    image = Image.fromarray(labels.cpu().numpy().astype(np.uint8))
    image.putpalette(colour_table(palette).tobytes())
    return image


def resized_labels(labels: Tensor, size: tuple[int, int]) -> Tensor:
    """Labels in another width and height. Each pixel takes the nearest label: numbers in between mean nothing."""
    image = Image.fromarray(labels.cpu().numpy())
    return labels if image.size == size else torch.from_numpy(np.array(image.resize(size, Image.Resampling.NEAREST)))


def write_labels(
    path: str | Path, labels: Tensor, palette: Palette, *, origin: tuple[str, float] | None = None
) -> Path:
    """Write a PNG that programs read as class numbers and people see in colours.

    `origin`, words for what made these labels and how confident it was, is stored in the file for `origin_of`.
    """
    notes = PngInfo()
    if origin is not None:
        notes.add_text(ORIGIN, f"{origin[0]} {origin[1]!r}")
    with whole(path) as draft:
        indexed(labels, palette).save(draft, "png", optimize=True, pnginfo=notes)
    return Path(path)


def origin_of(path: str | Path) -> tuple[str, float] | None:
    """What made the labels in a file, and how confident it was; None if the file is missing or does not say."""
    if not Path(path).is_file():
        return None
    try:
        with opened(path) as image:
            name, _, confidence = str(image.info.get(ORIGIN, "")).rpartition(" ")
            return (name, float(confidence)) if name else None
    except (FewshiftError, ValueError):
        return None


def write_palette(path: str | Path, classes: Sequence[str], palette: Palette) -> Path:
    """Write what the colours of label files mean, for `read_palette`, which has to find the same classes."""
    path = Path(path)
    refuse_repeated(classes)
    with whole(path) as draft:
        draft.write_text("".join(starmap(_palette_line, zip(classes, palette, strict=True))), encoding="utf-8")
    return path


def _palette_line(name: str, colour: RGB) -> str:
    """A class in a line of its own, or one sentence if its name cannot stand there."""
    line = f"{' '.join(map(str, colour))} {name}\n"
    try:
        readable = name.encode() and _palette_lines(line, Path(PALETTE_FILE)) == [(name, colour)]
    except (FewshiftError, UnicodeEncodeError):
        readable = False
    if not readable:
        raise FewshiftError(
            f"the class name {name!r} cannot stand in a line of {PALETTE_FILE}: give it a name (classes=) without line "
            "breaks, and without spaces at its ends"
        )
    return line


def write_overlay(path: str | Path, image: Image.Image, labels: Tensor, palette: Palette) -> Path:
    """Write a JPEG of the image beneath its labels."""
    with whole(path) as draft:
        picture = io.BytesIO()  # Pillow does not notice that a disk takes a part of a JPEG
        overlay(image, labels, palette).save(picture, "jpeg", quality=90)
        draft.write_bytes(picture.getvalue())
    return Path(path)


def overlay(image: Image.Image, labels: Tensor, palette: Palette, strength: float = 0.5) -> Image.Image:
    """An image blended with the colours of its labels; unlabelled pixels stay as they are."""
    image = image.convert("RGB")
    colours = Image.fromarray(colour_table(palette)[labels.cpu().numpy()])
    labelled = Image.fromarray(np.where(labels.cpu().numpy() == IGNORE, 0, 255).astype(np.uint8))
    return Image.composite(Image.blend(image, colours, strength), image, labelled)

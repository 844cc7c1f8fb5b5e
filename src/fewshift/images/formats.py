"""Which image files can be read here, which only look like images, and which files of a folder are left out.

`opened` and `picture` are the only ways to Pillow's decoders.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError, features

from fewshift.core.left_out import LeftOut
from fewshift.errors import FewshiftError
from fewshift.images.walking import Entry, entries_below, is_ordinary

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
HEIC, AVIF = frozenset({".heic", ".heif"}), frozenset({".avif"})
UNREAD = frozenset(
    {".arw", ".cr2", ".cr3", ".dng", ".exr", ".hdr", ".j2k", ".jfif", ".jp2", ".jpe", ".jxl", ".nef", ".orf", ".psd"}
    | {".raf", ".raw", ".rw2", ".svg", ".tga"}
)
# by Pillow's names, those first that it always has at hand. It knows more: PostScript called .png goes to Ghostscript
DECODED = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
# of a file: where Pillow refuses to open one, half a gigabyte in RGB; photographs of 108 million pixels are below it
MAX_FILE_PIXELS = 178_956_970  # ours cannot be switched off elsewhere
EXTRA = 'pip install "fewshift[heic]"'


def readable() -> frozenset[str]:
    """The suffixes that are read here: HEIC needs pillow-heif, AVIF a Pillow that knows it."""
    heic = HEIC if find_spec("pillow_heif") else frozenset[str]()
    avif = AVIF if _knows_avif() else frozenset[str]()
    return IMAGE_SUFFIXES | heic | avif


def looks_like_an_image(path: Path) -> bool:
    """Whether a suffix is that of an image, whether it can be read here or not."""
    return path.suffix.lower() in IMAGE_SUFFIXES | HEIC | AVIF | UNREAD


def unreadable(files: Iterable[Path]) -> list[Path]:
    """The images among these files whose format cannot be read here."""
    return [file for file in files if looks_like_an_image(file) and file.suffix.lower() not in readable()]


def remedy(files: Iterable[Path]) -> str | None:
    """What makes images readable that are not: the extra, another format; None if there are none such."""
    suffixes = {file.suffix.lower() for file in files if looks_like_an_image(file)} - readable()
    steps = [f"{EXTRA} to read HEIC and AVIF"] * bool(suffixes & (HEIC | AVIF))
    others = sorted(suffixes - HEIC - AVIF)
    return ", and ".join(steps + [f"save {' '.join(others)} as JPEG or PNG"] * bool(others)) or None


def picture(file: Path | BinaryIO) -> Image.Image:
    """A picture in one of the formats that are decoded here, by its content."""
    further = [name for name in ("AVIF", "HEIF") if name in Image.OPEN or (name == "AVIF" and _knows_avif())]
    return Image.open(file, formats=(*DECODED, *further))


@contextmanager
def opened(path: str | Path) -> Iterator[Image.Image]:
    """Open an image file for the block; raise one sentence if that fails.

    The size is checked before a pixel is decoded: a few hundred bytes can claim gigabytes.
    """
    path = Path(path)
    try:
        ordinary = path.is_file()
    except OSError as error:  # a name that is too long, or a folder that is closed
        raise FewshiftError(f"cannot open {path}: {error.strerror}: check the path and who may use it") from error
    if not ordinary:
        raise FewshiftError(
            f"{path} is not an ordinary file: replace or remove it"
            if path.exists()
            else f"no such image {path}: check the path"
        )
    if path.stat().st_size == 0:
        raise FewshiftError(f"{path} is empty: replace or remove it")
    _teach_pillow(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # from half of our limit on
            with picture(path) as image:
                if image.width * image.height > MAX_FILE_PIXELS:
                    raise Image.DecompressionBombError  # noqa: TRY301 - one sentence for Pillow's limit and ours
                yield image
    except Image.DecompressionBombError as error:
        raise FewshiftError(
            f"{path} claims more than {MAX_FILE_PIXELS / 1e6:.0f} million pixels: shrink or remove it"
        ) from error
    except UnidentifiedImageError as error:
        raise FewshiftError(f"{path} is not an image: {remedy([path]) or 'replace or remove it'}") from error
    except FewshiftError as error:
        raise FewshiftError(f"{path}: {error}") from error
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise FewshiftError(f"{path} is damaged and cannot be decoded: replace or remove it") from error


def _knows_avif() -> bool:
    return "avif" in features.modules and bool(features.check("avif"))


def _teach_pillow(path: Path) -> None:
    """Let Pillow read HEIC if this is such a file: importing the library takes a third of a second."""
    if path.suffix.lower() in HEIC and find_spec("pillow_heif"):
        import_module("pillow_heif").register_heif_opener()


def left_out_below(root: str | Path) -> LeftOut | None:
    """The files of a folder that are not read, hidden ones too; None if there are none. Images among them are named."""
    known = readable()
    entries = [entry for entry in entries_below(root) if not is_image_entry(entry, known)]
    strange = tuple(Path(entry.path) for entry in entries if not is_ordinary(entry))
    ordinary = (Path(entry.path) for entry in entries if is_ordinary(entry) and not entry.name.startswith("."))
    images = tuple(path for path in ordinary if looks_like_an_image(path))
    return LeftOut(len(entries), images, strange) if entries else None


def is_image_entry(entry: Entry, suffixes: Set[str]) -> bool:
    """Whether what was met below a folder is an image with one of these suffixes."""
    # a broken link counts: opening it raises an error, skipping it would hide it
    return not entry.name.startswith(".") and Path(entry.name).suffix.lower() in suffixes and is_ordinary(entry)

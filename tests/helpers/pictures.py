"""Pictures and label maps to read, and what a pixel means, looked up one by one."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fewshift.core.losses import IGNORE
from fewshift.images.preprocess import Preprocess

AS_IS = Preprocess(None, None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
Array = np.ndarray[Any, Any]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Random colours."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pattern(height: int, width: int, classes: int = 3, seed: int = 0) -> Array:
    """Class numbers in patches of a few pixels."""
    coarse = np.random.default_rng(seed).integers(0, classes, (height // 3 + 1, width // 3 + 1), dtype=np.uint8)
    return coarse.repeat(3, 0).repeat(3, 1)[:height, :width]


def save(path: Path, image: Image.Image | Array | None = None) -> Path:
    """Write a picture, or an array of bytes, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = picture(6, 6) if image is None else image
    (image if isinstance(image, Image.Image) else Image.fromarray(image.astype(np.uint8))).save(path)
    return path


def save_scene(
    root: Path, name: str, labels: Array, images: str = "images", its_labels: str = "labels", end: str = ""
) -> None:
    """A picture in which brightness is the class, and its label file."""
    save(root / images / f"{name}.png", np.stack([labels.astype(np.uint8) * 10] * 3, -1))
    save(root / its_labels / f"{name}{end}.png", labels)


def save_cityscapes(root: Path, kind: str = "labelIds", above: tuple[str, str] = ("", "")) -> Array:
    """Two cities as they are published, with label files of other kinds beside those that are read."""
    stored = pattern(12, 15, classes=34 if kind == "labelIds" else 19)
    for name in ("train/aachen/aachen_000000_000019", "val/lindau/lindau_000000_000019"):
        save(root / f"{above[0]}leftImg8bit" / f"{name}_leftImg8bit.png", np.stack([stored * 7] * 3, -1))
        save(root / f"{above[1]}gtFine" / f"{name}_gtFine_{kind}.png", stored)
        save(root / f"{above[1]}gtFine" / f"{name}_gtFine_color.png", np.zeros((12, 15, 3)))
    return stored


def png(width: int, height: int, depth: int, channels: int, rows: bytes) -> bytes:
    """A PNG made by hand, for what Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, {3: 2, 4: 6}[channels], 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def save_16_bits(path: Path, pixels: Array) -> None:
    """A colour PNG with 16 bits per channel."""
    height, width, channels = pixels.shape
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    path.write_bytes(png(width, height, 16, channels, rows))


def by_hand(pixels: Array, known: Mapping[Any, int], other: int = IGNORE) -> Array:
    """The class of one pixel after the other."""
    classes = np.empty(pixels.shape[:2], np.uint8)
    for row in range(pixels.shape[0]):
        for column in range(pixels.shape[1]):
            value = pixels[row, column]
            classes[row, column] = known.get(tuple(value.tolist()) if value.ndim else int(value), other)
    return classes

"""Small pictures of image files: made when they are asked for, and kept in memory up to a bound."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from fewshift.images.formats import opened
from fewshift.images.preprocess import in_mode

SIDES = {"small": 240, "large": 1280}  # pixels of the longer side
QUALITY = {"small": 78, "large": 88}
TINY = 128  # pixels: such images are sent as they are, without loss
MOST_BYTES = 96 * 2**20


@dataclass(frozen=True)
class SmallPicture:
    """An encoded picture."""

    content: bytes
    kind: str  # its media type


class Thumbnails:
    """Pictures by key; those that were not asked for longest are forgotten first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._size = most_bytes, 0
        self._kept: OrderedDict[object, SmallPicture] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object, make: Callable[[], SmallPicture]) -> SmallPicture:
        """The picture that is kept under a key, or a new one."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        picture = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = picture
                self._size += len(picture.content)
            while self._size > self._most and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                self._size -= len(old.content)
        return picture


def small_picture(file: Path, size: str) -> SmallPicture:
    """A picture of a file, upright; an error says why there is none."""
    side = SIDES[size]
    with opened(file) as image:
        image.draft("RGB", (side, side))  # lets a JPEG be decoded at a fraction of its size
        image.thumbnail((side * 2, side * 2), Image.Resampling.NEAREST, reducing_gap=2.0)
        picture = in_mode(ImageOps.exif_transpose(image), "RGB")
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return encoded_picture(picture, QUALITY[size])


def encoded_picture(picture: Image.Image, quality: int = 88) -> SmallPicture:
    """JPEG, or PNG where every pixel can be seen."""
    file = io.BytesIO()
    if max(picture.size) <= TINY:
        picture.save(file, "PNG")
        return SmallPicture(file.getvalue(), "image/png")
    picture.save(file, "JPEG", quality=quality)
    return SmallPicture(file.getvalue(), "image/jpeg")

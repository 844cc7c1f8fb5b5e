"""The leak guard: whether images that a network was adapted on are among those it is judged on.

The same picture is found by a hash of its pixels, so that it may lie in two files of different names or formats. A
picture that was saved again with losses has other pixels; it is found by what it looks like:

1. the grey image at 32x32 pixels, the signs of its 64 lowest frequencies (without the mean): 64 bits, of which at most
   10 may differ. They survive brightness, contrast and size, but two drawings of a guitar can have them in common;
2. so the grey images at 16x16 pixels decide: they must correlate by more than 0.99.

Measured on PACS, over all pairs within 2,000 images of a domain (1,670 photographs): 0 of 1.4 million pairs of
photographs and 0 of 2.0 million of sketches are flagged, 4 of paintings and 3 of cartoons, and these seven are the same
picture twice. Tiny pictures have little to differ in: 1 of 1.4 million pairs of MNIST's digits is flagged, and 54 of
UCI's, drawn on 8x8 pixels. Every one of 400 images is recognised when it was saved as JPEG of quality 20, in grey, at
a quarter or twice its size or with less contrast; 68 % are with 30 % more light, 56 % with 1 % cut off at every side,
none with 5 % cut off or mirrored. Neighbouring frames of a film are flagged now and then.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fewshift.core.support import Support, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images import image_files, open_image, scene_layout
from fewshift.images.inputs import Steps
from fewshift.images.preprocess import Preprocess, in_mode
from fewshift.lab.datasets.domain import Domain

NEAR = 10  # of 64 bits that may differ
ALIKE = 0.99  # correlation of thumbnails
SIDE = 32  # pixels of the grey image; a thumbnail has half of them
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, as grey pictures are made of colour ones
FLAT = 1e-4  # a deviation below this part of the largest value is no picture
AT_ONCE = 64  # images
MANY = 3  # pairs that a sentence names

Array = np.ndarray[Any, Any]


class LeakWarning(UserWarning):
    """An evaluation image looks like a support image."""


# --- one image


def content_hash(image: Any) -> str:
    """A hash of the pixels of a picture, an array or a tensor: the same for the same picture in any file or mode.

    Bytes are a picture: (height, width, channels) in an array, (channels, height, width) in a tensor; grey ones equal
    colour ones of the same shades. Of other values the shape and the numbers count, as float32.
    """
    pixels = _pixels(image)
    if pixels.is_floating_point():
        pixels = pixels.float() + 0.0  # there are two zeros
    digest = hashlib.blake2b(f"{pixels.dtype} {tuple(pixels.shape)}".encode(), digest_size=16)
    digest.update(pixels.contiguous().numpy().tobytes())
    return digest.hexdigest()


def refuse_repeats(images: Iterable[Any]) -> None:
    """One sentence when a picture is in a support twice: held out, it would be judged by networks that saw it."""
    seen: dict[str, int] = {}
    pairs = [
        (first, it) for it, image in enumerate(images) if (first := seen.setdefault(content_hash(image), it)) != it
    ]
    if pairs:
        more = f", and so are {len(pairs) - 1} more" if len(pairs) > 1 else ""
        raise FewshiftError(
            f"support images {pairs[0][0]} and {pairs[0][1]} (from 0) are the same picture{more}: "
            "remove one of them, or pass validate=None"
        )


def perceptual_hash(image: Any) -> int:
    """64 bits of what a picture looks like: the signs of the lowest frequencies of its grey image."""
    pixels = _pixels(image)
    if not _is_picture(pixels):
        raise FewshiftError(f"a tensor of shape {tuple(pixels.shape)} is no image: give (channels, height, width)")
    return int(_look(pixels.unsqueeze(0))[0][0])


def _pixels(image: Any) -> Tensor:
    """The values of one image: bytes (3, height, width) of a picture, or whatever a tensor has."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and (image.ndim == 2 or image.shape[-1] in (1, 3, 4)):
        image = Image.fromarray(image.squeeze(2) if image.shape[2:] == (1,) else image)
    if isinstance(image, Image.Image):
        return torch.from_numpy(np.array(in_mode(image, "RGB"))).permute(2, 0, 1)
    try:
        values = torch.as_tensor(image).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FewshiftError(f"a {type(image).__name__} is no image: give tensors, arrays or pictures") from error
    if values.dtype == torch.uint8 and values.ndim == 3 and len(values) == 1:
        values = values.expand(3, -1, -1)
    return values


def _is_picture(pixels: Tensor) -> bool:
    return pixels.ndim == 3 and pixels.numel() > 0


def _look(pictures: Tensor) -> tuple[Array, Array]:
    """Hashes (N,) and thumbnails (N, 256), of unit length, of pictures (N, channels, height, width)."""
    weights = pictures.new_tensor(LUMINANCE if pictures.shape[1] == 3 else [1.0], dtype=torch.float32)
    grey = (pictures.float() * weights.view(-1, 1, 1)).mean(1, keepdim=True)
    grey = F.interpolate(grey, size=(SIDE, SIDE), mode="bilinear", antialias=True)
    largest = grey.flatten(1).abs().amax(1)
    grey = grey - grey.mean((2, 3), keepdim=True)
    flat = grey.flatten(1).square().mean(1).sqrt() <= FLAT * largest
    grey[flat] = 0  # what rounding leaves of a single shade is no picture
    frequencies = (COSINES @ grey[:, 0] @ COSINES.T)[:, LOWEST[0], LOWEST[1]]
    hashes = np.packbits((frequencies > 0).numpy(), axis=1).view(">u8")[:, 0].astype(np.uint64)
    thumbnails = F.avg_pool2d(grey, 2).flatten(1)
    return hashes, F.normalize(thumbnails).numpy()


def _cosines() -> Tensor:
    """The matrix of the discrete cosine transform."""
    steps = torch.arange(SIDE, dtype=torch.float32)
    return torch.cos(math.pi / SIDE * (steps + 0.5) * steps.unsqueeze(1))


def _lowest() -> tuple[list[int], list[int]]:
    """Rows and columns of the 64 lowest frequencies, without the mean."""
    places = [(row, column) for row in range(SIDE) for column in range(SIDE) if row + column]
    places = sorted(places, key=lambda place: (sum(place), place))[:64]
    return [row for row, _ in places], [column for _, column in places]


COSINES, LOWEST = _cosines(), _lowest()
BITS = np.array([number.bit_count() for number in range(256)], np.uint8)


# --- many images


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """What is needed to recognise images without keeping them."""

    content: tuple[str, ...]
    perceptual: Array  # (N,) 64 bits each; empty where tensors are no pictures
    thumbnails: Array  # (N, 256)
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.content)

    def name(self, index: int, whose: str) -> str:
        """A file, or whose image it is."""
        return self.names[index] if self.names else f"{whose} image {index}"


def fingerprints(images: Any, preprocess: Steps = None, names: Sequence[str] | None = None) -> Fingerprints:
    """Of a tensor, a support set, a dataset, files, or a folder with images anywhere below it.

    Files are recognised as the pictures they show; with `preprocess`, as the tensors a network sees, which is how the
    items of a dataset are. Whatever else an item holds beside its image is not looked at.
    """
    if isinstance(images, Fingerprints):
        return images
    files = _paths(images)
    content: list[str] = []
    looks: list[tuple[Array, Array]] = []
    for portion in _portions(images if files is None else _read(files, preprocess)):
        content += [content_hash(image) for image in portion]
        if len(portion) and _is_picture(portion[0]):
            looks.append(_look(portion))
    if not content:
        raise FewshiftError("there are no images to compare: give at least one")
    known = tuple(names) if names is not None else _names(images, files)
    if known is not None and len(known) != len(content):
        raise FewshiftError(f"{len(known)} names for {len(content)} images: give one for each")
    hashes, thumbnails = (np.concatenate(it) for it in zip(*looks, strict=True)) if looks else (_none(), _none())
    if len(hashes) != len(content):  # some are no pictures
        hashes, thumbnails = _none(), _none()
    return Fingerprints(tuple(content), hashes, thumbnails, known)


def _none() -> Array:
    return np.empty(0, np.uint64)


def _paths(images: Any) -> list[Path] | None:
    """The files, if it is files that were given, or a folder of them."""
    if isinstance(images, (str, Path)):
        where = scene_layout(images)
        return image_files(images if where is None else where.images)
    if isinstance(images, (list, tuple)) and images and all(isinstance(it, (str, Path)) for it in images):
        return [Path(it) for it in images]
    return None


def _stored(images: Any) -> list[Path] | None:
    """The same, or the files that a dataset of ours reads."""
    files = images.source if isinstance(images, Domain) else getattr(images, "files", None)
    return _paths(files) if isinstance(files, tuple) else _paths(images)


def _names(images: Any, files: list[Path] | None) -> tuple[str, ...] | None:
    known = files or _stored(images)
    return None if known is None else tuple(map(str, known))


def _read(files: Sequence[Path], steps: Steps) -> Iterator[Any]:
    """One picture after the other, or the tensor a network sees."""
    for file in files:
        image = open_image(file, steps.mode if isinstance(steps, Preprocess) else "RGB")
        yield image if steps is None else steps(image)


def _portions(images: Any) -> Iterator[Tensor]:
    """Images as stacks, of many where they are one tensor."""
    images = images.images if isinstance(images, Support) else images
    if _is_pair(images):
        images = images[0]
    if isinstance(images, Unlabelled):
        yield from (images.batch(index) for index in torch.arange(len(images)).split(1))
    elif isinstance(images, Tensor):
        yield from images.detach().cpu().split(AT_ONCE)
    elif isinstance(images, Iterator) or callable(getattr(images, "__getitem__", None)):
        items = images if isinstance(images, Iterator) else (images[index] for index in range(len(images)))
        for item in items:
            yield _pixels(item[0] if isinstance(item, (tuple, list)) else item).unsqueeze(0)
    else:
        raise FewshiftError(f"cannot read images from {type(images).__name__}: give a tensor, a dataset or a folder")


def _is_pair(images: Any) -> bool:
    """Whether it is images and labels, as a support set may be given."""
    pair = isinstance(images, (tuple, list)) and len(images) == 2
    return pair and all(isinstance(it, (Tensor, np.ndarray)) for it in images) and images[0].ndim > images[1].ndim


# --- two sets of images


@dataclass(frozen=True)
class Leaks:
    """Which images are in both sets: positions (support, evaluation), and of similar ones how many bits differ."""

    identical: tuple[tuple[int, int], ...]
    near: tuple[tuple[int, int, int], ...]
    support: Fingerprints = field(repr=False)
    evaluation: Fingerprints = field(repr=False)

    def __bool__(self) -> bool:
        return bool(self.identical or self.near)

    def told(self, pairs: Sequence[tuple[int, ...]]) -> str:
        """The first few pairs by name."""
        named = [
            f"{self.support.name(pair[0], 'support')} and {self.evaluation.name(pair[1], 'evaluation')}"
            for pair in pairs[:MANY]
        ]
        rest = f", and {len(pairs) - MANY} more" if len(pairs) > MANY else ""
        return "; ".join(named) + rest

    def to_json(self) -> dict[str, Any]:
        """Give the pairs as JSON knows them, by name."""
        return {
            "identical": [
                [self.support.name(i, "support"), self.evaluation.name(j, "evaluation")] for i, j in self.identical
            ],
            "near": [
                [self.support.name(i, "support"), self.evaluation.name(j, "evaluation"), bits]
                for i, j, bits in self.near
            ],
        }


def find_leaks(
    support: Any,
    evaluation: Any,
    *,
    preprocess: Steps = None,
    support_names: Sequence[str] | None = None,
    evaluation_names: Sequence[str] | None = None,
) -> Leaks:
    """Images that are in both sets, given in any form that `fingerprints` takes, or as fingerprints.

    Where both sets are on disk their pictures are compared, whatever a network would see of them. Where one is tensors
    `preprocess` makes them of the other's files.
    """
    if (files := _stored(support)) and (others := _stored(evaluation)):
        ours, theirs = fingerprints(files, None, support_names), fingerprints(others, None, evaluation_names)
    else:
        for given, other in ((support, evaluation), (evaluation, support)):
            if preprocess is None and _paths(given) and not isinstance(other, Fingerprints):
                raise FewshiftError(
                    "image files are to be compared with tensors: pass preprocess, the steps that made the tensors"
                )
        ours = fingerprints(support, preprocess, support_names)
        theirs = fingerprints(evaluation, preprocess, evaluation_names)
    identical = _identical(ours, theirs)
    return Leaks(identical, _near(ours, theirs, set(identical)), ours, theirs)


def refuse_leaks(found: Leaks) -> None:
    """One sentence when an image is in both sets, and a `LeakWarning` when one looks like another."""
    if found.identical:
        count = len({pair[0] for pair in found.identical})
        raise FewshiftError(
            f"{_counted(count, found)} also among the {len(found.evaluation):,} evaluation images "
            f"({found.told(found.identical)}): remove them from one of the two, a score on what was learned from "
            "says nothing"
        )
    if found.near:
        count = len({pair[0] for pair in found.near})
        warnings.warn(
            f"{_counted(count, found)} nearly the same as some of the {len(found.evaluation):,} evaluation images "
            f"({found.told(found.near)}): look at them, and remove one of each two that show the same",
            LeakWarning,
            stacklevel=2,
        )


def _counted(count: int, found: Leaks) -> str:
    return f"{count} of the {len(found.support):,} support images {'is' if count == 1 else 'are'}"


def _identical(support: Fingerprints, evaluation: Fingerprints) -> tuple[tuple[int, int], ...]:
    places: dict[str, list[int]] = defaultdict(list)
    for index, content in enumerate(evaluation.content):
        places[content].append(index)
    return tuple((index, other) for index, content in enumerate(support.content) for other in places.get(content, []))


def _near(
    support: Fingerprints, evaluation: Fingerprints, identical: set[tuple[int, int]]
) -> tuple[tuple[int, int, int], ...]:
    if not len(support.perceptual) or not len(evaluation.perceptual):
        return ()
    found = []
    for index, mine in enumerate(support.perceptual):
        bits = distances(mine, evaluation.perceptual)
        close = np.flatnonzero(bits <= NEAR)
        alike = evaluation.thumbnails[close] @ support.thumbnails[index] > ALIKE
        found += [(index, int(it), int(bits[it])) for it in close[alike] if (index, int(it)) not in identical]
    return tuple(found)


def distances(one: Any, many: Array) -> Array:
    """How many of the 64 bits of one hash differ from those of each of many."""
    differing = np.bitwise_xor(np.uint64(one), many)
    counts: Array = BITS[differing.view(np.uint8).reshape(len(many), 8)].sum(1)
    return counts

"""The leak guard: whether images that a network was adapted to are among those it is judged on.

A hash of the pixels finds the same picture in files of any name or format. A picture that was saved again with losses
has other pixels; two steps find what looks the same:

1. the signs of the 64 lowest frequencies (without the mean) of the grey image at 32x32 pixels: at most 10 of these 64
   bits may differ. They survive brightness, contrast and size, but two drawings of a guitar can share them;
2. so the grey images at 16x16 pixels decide: they must correlate by more than 0.99.

Measured on PACS, over all pairs within 2,000 images of a domain (1,670 photographs): no pair of photographs (1.4
million) or sketches (2.0 million) is flagged, 4 of paintings and 3 of cartoons, and these seven are the same picture
twice. Tiny pictures have little room to differ: 1 of 1.4 million pairs of MNIST digits is flagged, and 54 of UCI
digits, drawn on 8x8 pixels. All of 400 images are recognised as JPEG of quality 20, in grey, at a quarter or twice the
size, or with less contrast; 68 % with 30 % more light, 56 % with 1 % cut off on every side, none with 5 % cut off or
mirrored. Neighbouring frames of a film are flagged now and then.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.fft import dctn  # type: ignore[import-untyped]
from torch import Tensor

from fewshift.core.support import Support, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.in_memory import items_of
from fewshift.images.inputs import Steps, files_of
from fewshift.images.preprocess import Preprocess, in_mode

NEAR = 10  # of 64 bits that may differ
ALIKE = 0.99  # correlation of thumbnails
SIDE = 32  # pixels of the grey image; a thumbnail has half of them
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue
FLAT = 1e-4  # a deviation below this share of the largest value is no picture
AT_ONCE = 64  # images
MANY = 3  # pairs that a sentence names

Array = np.ndarray[Any, Any]


class LeakWarning(UserWarning):
    """An evaluation image looks like a support image."""


@runtime_checkable
class HasFiles(Protocol):
    """A dataset that knows the file of each of its images."""

    files: tuple[Path, ...] | None


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


def repeats(support: Support) -> list[tuple[int, int]]:
    """The positions of a picture's first copy and of each further one."""
    first: dict[str, int] = {}
    places = [(first.setdefault(content_hash(image), index), index) for index, image in enumerate(support.images)]
    return [(earlier, index) for earlier, index in places if earlier != index]


def refuse_repeats(support: Support) -> None:
    """Raise an error if a support has a picture twice: held out, it would be judged by networks that saw it."""
    pairs = [
        (_name(support.files, earlier, "support"), _name(support.files, index, "support"))
        for earlier, index in repeats(support)
    ]
    if pairs:
        raise FewshiftError(
            f"{_listed(pairs)}: each pair is the same picture, and one would judge a network that saw the other: "
            "remove one of each, or judge by other labelled images"
        )


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
    grey[flat] = 0  # a single shade leaves only rounding errors
    frequencies = dctn(grey[:, 0].numpy(), axes=(1, 2))[:, LOWEST[0], LOWEST[1]]
    hashes = np.ascontiguousarray(np.packbits(frequencies > 0, axis=1)).view(">u8")[:, 0].astype(np.uint64)
    thumbnails = F.avg_pool2d(grey, 2).flatten(1)
    return hashes, F.normalize(thumbnails).numpy()


def _lowest() -> tuple[list[int], list[int]]:
    """Rows and columns of the 64 lowest frequencies, without the mean."""
    places = [(row, column) for row in range(SIDE) for column in range(SIDE) if row + column]
    places = sorted(places, key=lambda place: (sum(place), place))[:64]
    return [row for row, _ in places], [column for _, column in places]


LOWEST = _lowest()


# --- many images


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """Enough to recognise images without keeping them."""

    content: tuple[str, ...]
    perceptual: Array  # (N,) 64 bits each; empty if some tensor is no picture
    thumbnails: Array  # (N, 256)
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.content)

    def name(self, index: int, whose: str) -> str:
        """A file, or the position of the image."""
        return _name(self.names, index, whose)


def _name(files: Sequence[str | Path] | None, index: int, whose: str) -> str:
    return str(files[index]) if files else f"{whose} image {index} (from 0)"


def fingerprints(images: Any, preprocess: Steps = None) -> Fingerprints:
    """The fingerprints of a tensor, a support set, a dataset, files, or a folder with images anywhere below it.

    Files count as the pictures they show; with `preprocess`, as the tensors a network sees, like the items of a
    dataset. Anything else in an item is ignored.
    """
    if isinstance(images, Fingerprints):
        return images
    files = files_of(images)
    content: list[str] = []
    looks: list[tuple[Array, Array]] = []
    for portion in _portions(images if files is None else _read(files, preprocess)):
        content += [content_hash(image) for image in portion]
        if len(portion) and _is_picture(portion[0]):
            looks.append(_look(portion))
    if not content:
        raise FewshiftError("there are no images to compare: give at least one")
    hashes, thumbnails = np.empty(0, np.uint64), np.empty(0)
    if sum(len(portion[0]) for portion in looks) == len(content):  # otherwise some are no pictures
        hashes, thumbnails = (np.concatenate(column) for column in zip(*looks, strict=True))
    return Fingerprints(tuple(content), hashes, thumbnails, _names(images, files))


def _stored(images: Any) -> list[Path] | None:
    """Image files, or the files that a dataset reads. A support has its images in memory: its files only name them."""
    if isinstance(images, HasFiles) and not isinstance(images, Support):
        return None if images.files is None else list(images.files)
    return files_of(images)


def _names(images: Any, files: list[Path] | None) -> tuple[str, ...] | None:
    known = files or (images.files if isinstance(images, HasFiles) else None)
    return None if known is None else tuple(map(str, known))


def _read(files: Sequence[Path], steps: Steps) -> Iterator[Any]:
    """One picture after the other, or the tensor that a network sees."""
    for file in files:
        image = open_image(file, steps.mode if isinstance(steps, Preprocess) else "RGB")
        yield image if steps is None else steps(image)


def _portions(images: Any) -> Iterator[Tensor]:
    """Stacks of images: of many where they are one tensor, of one otherwise."""
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
    elif callable(getattr(images, "__iter__", None)):
        yield from (
            torch.as_tensor(batch[0] if isinstance(batch, (tuple, list)) else batch) for batch in items_of(images)
        )
    else:
        raise FewshiftError(f"cannot read images from {type(images).__name__}: give a tensor, a dataset or a folder")


def _is_pair(images: Any) -> bool:
    """Whether these are images with their labels, as a support set may be."""
    pair = isinstance(images, (tuple, list)) and len(images) == 2
    return pair and all(isinstance(part, (Tensor, np.ndarray)) for part in images) and images[0].ndim > images[1].ndim


# --- two sets of images


@dataclass(frozen=True)
class Leaks:
    """Images that are in both sets: positions (support, evaluation), and for similar ones how many bits differ."""

    identical: tuple[tuple[int, int], ...]
    near: tuple[tuple[int, int, int], ...]
    support: Fingerprints = field(repr=False)
    evaluation: Fingerprints = field(repr=False)

    def __bool__(self) -> bool:
        return bool(self.identical or self.near)

    def names(self, pair: tuple[int, ...]) -> tuple[str, str]:
        """The two images of a pair: their files, or their positions."""
        return self.support.name(pair[0], "support"), self.evaluation.name(pair[1], "evaluation")

    def to_json(self) -> dict[str, Any]:
        """The pairs by name, as JSON knows them."""
        return {
            "identical": [[*self.names(pair)] for pair in self.identical],
            "near": [[*self.names(pair), pair[2]] for pair in self.near],
        }


def find_leaks(support: Any, evaluation: Any, *, preprocess: Steps = None) -> Leaks:
    """Images that are in both sets; each is anything that `fingerprints` takes, or fingerprints.

    Where both sets are on disk, their whole pictures are compared, whatever a network would see of them. Where one is
    tensors, `preprocess` makes tensors from the files of the other.
    """
    if (files := _stored(support)) and (others := _stored(evaluation)):
        ours, theirs = fingerprints(files), fingerprints(others)
    else:
        for one, other in ((support, evaluation), (evaluation, support)):
            if preprocess is None and files_of(one) and not isinstance(other, Fingerprints):
                raise FewshiftError(
                    "image files cannot be compared with tensors: pass preprocess, the steps that made the tensors"
                )
        ours, theirs = fingerprints(support, preprocess), fingerprints(evaluation, preprocess)
    identical = _identical(ours, theirs)
    return Leaks(identical, _near(ours, theirs, set(identical)), ours, theirs)


def refuse_leaks(leaks: Leaks) -> None:
    """Raise an error when an image is in both sets, and a `LeakWarning` when one looks like another."""
    total = f"{len(leaks.evaluation):,} evaluation images"
    if leaks.identical:
        raise FewshiftError(
            f"{_counted(leaks, leaks.identical)} also among the {total} ({_named(leaks, leaks.identical)}): remove "
            "them from one of the two, since a score on images that were learned from says nothing"
        )
    if leaks.near:
        warnings.warn(
            f"{_counted(leaks, leaks.near)} nearly the same as some of the {total} ({_named(leaks, leaks.near)}): "
            "look at them, and remove one of each pair that shows the same",
            LeakWarning,
            stacklevel=2,
        )


def _counted(leaks: Leaks, pairs: Sequence[tuple[int, ...]]) -> str:
    count = len({pair[0] for pair in pairs})
    return f"{count} of the {len(leaks.support):,} support images {'is' if count == 1 else 'are'}"


def _named(leaks: Leaks, pairs: Sequence[tuple[int, ...]]) -> str:
    return _listed([leaks.names(pair) for pair in pairs])


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    rest = f", and {len(pairs) - MANY} more" if len(pairs) > MANY else ""
    return "; ".join(" and ".join(pair) for pair in pairs[:MANY]) + rest


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
    pairs = []
    for index, own in enumerate(support.perceptual):
        bits = np.bitwise_count(own ^ evaluation.perceptual)
        close = np.flatnonzero(bits <= NEAR)
        alike = close[evaluation.thumbnails[close] @ support.thumbnails[index] > ALIKE].tolist()
        pairs += [(index, other, int(bits[other])) for other in alike if (index, other) not in identical]
    return tuple(pairs)

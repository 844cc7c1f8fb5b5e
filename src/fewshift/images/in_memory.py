"""Labelled images that a program holds: tensors, pairs of image and label, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fewshift.core._arguments import as_tensor, checked_images
from fewshift.core.labels import extent
from fewshift.core.losses import IGNORE
from fewshift.core.randomness import private_randomness
from fewshift.core.support import Support
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import FileSteps, Preprocess

COLOURS = (1, 3, 4)
Classes = tuple[str, ...] | None


def is_tensors(source: Any) -> bool:
    """Whether this is one tensor of images and one of labels."""
    return isinstance(source, (tuple, list)) and len(source) == 2 and isinstance(source[0], (Tensor, np.ndarray))


def from_tensors(source: Any, classes: Classes) -> Support:
    """A support set from (images, labels)."""
    images = checked_images(as_tensor(source[0]))
    labels = checked_images(as_tensor(source[1], "labels"), "labels")
    for index, (image, label) in enumerate(zip(images, labels, strict=False)):
        if label.ndim > 1:
            _check_map(image, label, f"image {index}")
    return Support(images, labels, classes)


def from_dataset(source: Any, steps: FileSteps | None, classes: Classes) -> Support:
    """A support set from (image, label) pairs, batches of them, or a list of images and one of labels."""
    if _is_columns(source):
        images, labels = source
        if len(images) != len(labels):
            raise FewshiftError(f"there are {len(images)} images and {len(labels)} labels: give one for each")
        source = list(zip(images, labels, strict=True))
    own = getattr(source, "classes", None)
    known = classes or (tuple(own) if isinstance(own, (list, tuple)) else None)
    try:
        items = items_of(source)
        if items and _is_batch(items[0]):
            return _from_batches(items, known)
        files = _files_of(source, items)
        names = [f"image {index}" for index in range(len(items))] if files is None else list(map(str, files))
        pixels = any(_is_map(item[1]) for item in items)
        read = [
            _scene(item[0], item[1], steps, name) if pixels else (image_tensor(item[0], steps, name), item[1])
            for item, name in zip(items, names, strict=True)
        ]
    except (TypeError, KeyError, IndexError) as error:
        raise FewshiftError(
            f"cannot read a support set from {type(source).__name__}: give (images, labels) tensors, a dataset of "
            "(image, label) pairs, batches of them, a list of (path, label), a folder of class folders, one with "
            "images/ and labels/, or a CSV file"
        ) from error
    if pixels:
        return Support(tuple(image for image, _ in read), tuple(label for _, label in read), known, files=files)
    for name, (image, _) in zip(names, read, strict=True):
        if image.shape != read[0][0].shape:
            shapes = [tuple(read[0][0].shape), tuple(image.shape)]
            raise FewshiftError(
                f"support images have different shapes {shapes}, the first are {names[0]} and {name}: pass preprocess= "
                "with one crop size"
            )
    stacked = torch.stack([image for image, _ in read]) if read else torch.empty(0, 1)
    return Support(stacked, as_tensor([label for _, label in read], "labels"), known, files=files)


def items_of(source: Any) -> list[Any]:
    """All items: of a sequence by their numbers, of anything else in turn, without touching global random states."""
    if callable(getattr(source, "__len__", None)) and callable(getattr(source, "__getitem__", None)):
        return [source[index] for index in range(len(source))]
    with private_randomness(0):  # a loader draws from the global states
        return list(source)


def _files_of(source: Any, items: Sequence[Any]) -> tuple[Path, ...] | None:
    """The files that a torchvision dataset lists, or that pictures were opened from."""
    samples = getattr(source, "samples", None)
    listed = [sample[0] for sample in samples] if isinstance(samples, list) else []
    if len(listed) != len(items):
        listed = [getattr(item[0], "filename", None) for item in items]
    known = [Path(file) for file in listed if isinstance(file, (str, Path)) and str(file)]
    return tuple(known) if known and len(known) == len(items) else None


# --- batches


def _is_batch(item: Any) -> bool:
    """Whether an item is images with their labels, not one of each: a single label has 0 dimensions, or 2."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    images, labels = item
    return isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.ndim in (1, 3)


def _from_batches(batches: Iterable[Any], classes: Classes) -> Support:
    for number, batch in enumerate(batches):
        if not _is_batch(batch) or len(batch[0]) != len(batch[1]):
            raise FewshiftError(f"batch {number} is no images with as many labels: give (images, labels) batches")
    pairs = [(image, label) for images, labels in batches for image, label in zip(images, labels, strict=True)]
    for index, (image, label) in enumerate(pairs):
        if label.ndim > 1:
            _check_map(image, label, f"image {index}")
    return Support(tuple(image for image, _ in pairs), tuple(label for _, label in pairs), classes)


# --- one image, one label


def image_tensor(image: Any, steps: FileSteps | None, name: str) -> Tensor:
    """One image as a network takes it."""
    if isinstance(image, np.ndarray) and (steps is None or isinstance(steps, Preprocess)):
        image = _of_array(image, steps)
    if isinstance(steps, Preprocess) and isinstance(image, Tensor):
        return image  # pictures are preprocessed, tensors already are
    try:
        made = image if steps is None else steps(image)
    except FewshiftError as error:
        raise FewshiftError(f"{name}: {error}") from error
    if not isinstance(made, Tensor):
        raise FewshiftError("the dataset's images are not tensors: pass preprocess= to make them so")
    return made


def _of_array(image: np.ndarray, steps: Preprocess | None) -> Image.Image | Tensor:
    """A picture, if it is to be preprocessed and its pixels are as cameras give them: bytes, the colours last."""
    colours = image.shape[2:] or (1,)
    if steps is None or image.dtype != np.uint8 or image.ndim not in (2, 3) or colours[0] not in COLOURS:
        return as_tensor(image)
    return Image.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[2:] == (1,) else image))


def _is_map(label: Any) -> bool:
    return isinstance(label, Image.Image) or (isinstance(label, (Tensor, np.ndarray)) and label.ndim > 1)


def _is_columns(source: Any) -> bool:
    """Whether this is a list of images and one of labels, which have fewer dimensions, not a dataset of two pairs."""
    if not isinstance(source, (tuple, list)) or len(source) != 2:
        return False
    if not all(isinstance(column, (tuple, list)) and len(column) for column in source):
        return False
    images, labels = ([_dimensions(entry) for entry in column] for column in source)
    return min(images) > max(labels)


def _dimensions(thing: Any) -> int:
    if isinstance(thing, Image.Image):
        return 3 if len(thing.getbands()) > 1 else 2
    return thing.ndim if isinstance(thing, (Tensor, np.ndarray)) else 0


def _scene(image: Any, label: Any, steps: FileSteps | None, name: str) -> tuple[Tensor, Tensor]:
    """One image and its label map; with a Preprocess, pictures are resized and cropped together."""
    numbers = np.array(label) if isinstance(label, Image.Image) else label
    if isinstance(steps, Preprocess) and isinstance(image, Image.Image):
        _check_sizes(image.size[::-1], tuple(np.shape(numbers)), name)
        return steps(image), steps.labels(numbers).long()
    tensor, labels = image_tensor(image, steps, name), as_tensor(numbers, "labels")
    _check_map(tensor, labels, name)
    return tensor, labels.long()


def _check_map(image: Tensor, label: Tensor, name: str) -> None:
    if label.is_floating_point() or label.is_complex():
        raise FewshiftError(
            f"the labels of {name} are {str(label.dtype).removeprefix('torch.')}, not integers: give a class "
            f"number for each pixel, {IGNORE} where there is none"
        )
    _check_sizes(tuple(image.shape[1:]), tuple(label.shape), name)


def _check_sizes(image: tuple[int, ...], label: tuple[int, ...], name: str) -> None:
    if image != label:
        raise FewshiftError(
            f"{name} is {extent(image)} pixels and its labels are {extent(label)}: give one label for each pixel"
        )

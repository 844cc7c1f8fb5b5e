"""Whatever a user has, as what a method takes: tensors, datasets, folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fewshift.core.labels import Augment
from fewshift.core.losses import IGNORE
from fewshift.core.support import Support, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files, labelled_folder, open_image
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes, scene_folder, scene_layout

Steps = Preprocess | Callable[[Any], Tensor] | None


def as_support(support: Any, steps: Steps, augment: Augment | None, classes: Sequence[str] | None) -> Support:
    """A support set from tensors, a dataset of (image, label) pairs, or a folder.

    A label is a class number, or one for each pixel: a tensor, an array or an index image. A folder has class folders,
    or images/ and labels/. Scenes of different sizes stay as they are.
    """
    if isinstance(classes, str):
        raise FewshiftError(f"classes={classes!r} is one word: give a list of names")
    names = None if classes is None else tuple(classes)
    if isinstance(support, Support):
        return replace(support, augment=augment or support.augment, classes=names or support.classes)
    if isinstance(support, (str, Path)):
        checked = _for_folder(steps, support)
        if scene_layout(support) is not None:
            return as_support(scene_folder(support, checked, names), None, augment, None)
        folder = labelled_folder(support, checked, classes=names)
        tensors, numbers = folder.tensors()
        return Support(tensors, numbers, folder.classes, augment)
    if isinstance(support, (tuple, list)) and len(support) == 2 and isinstance(support[0], (Tensor, np.ndarray)):
        images, labels = torch.as_tensor(support[0]), _labels(support[1])
        for index, (image, label) in enumerate(zip(images, labels, strict=False)):
            if label.ndim > 1:
                _check_map(image, label, index)
        return Support(images, labels, names, augment)
    if isinstance(support, Scenes):
        support, steps = _with_steps(support, steps), None
    if _is_columns(support):
        support = _pairs(*support)
    try:
        pairs = [support[index] for index in range(len(support))]
        dense = any(_is_map(pair[1]) for pair in pairs)
        read = [
            _scene(pair[0], pair[1], steps, index) if dense else (_image(pair[0], steps), pair[1])
            for index, pair in enumerate(pairs)
        ]
    except (TypeError, KeyError, IndexError) as error:
        raise FewshiftError(
            f"cannot read a support set from {type(support).__name__}: give (images, labels) tensors, "
            "a dataset of (image, label) pairs, a folder of class folders, or one with images/ and labels/"
        ) from error
    own = getattr(support, "classes", None)
    known = names or (tuple(own) if isinstance(own, (list, tuple)) else None)
    if dense:
        return Support(tuple(image for image, _ in read), tuple(label for _, label in read), known, augment)
    shapes = {tuple(image.shape) for image, _ in read}
    if len(shapes) > 1:
        raise FewshiftError(
            f"support images have different shapes {sorted(shapes)[:2]}: pass preprocess= with one crop size"
        )
    stacked = torch.stack([image for image, _ in read]) if read else torch.empty(0, 1)
    return Support(stacked, _labels([label for _, label in read]), known, augment)


def as_unlabelled(images: Any, steps: Steps, augment: Augment | None) -> Unlabelled | None:
    """Unlabelled images from a tensor, a dataset, or a folder with images anywhere below it."""
    if images is None or isinstance(images, Unlabelled):
        return images
    if isinstance(images, (str, Path)):
        checked, where = _for_folder(steps, images), scene_layout(images)
        folder = images if where is None else where.images  # label files are pictures too
        return Unlabelled(ImageFiles(tuple(image_files(folder)), checked), augment)
    if isinstance(images, Scenes):
        return Unlabelled(_with_steps(images, steps), augment)
    if isinstance(images, (Tensor, np.ndarray)):
        return Unlabelled(torch.as_tensor(images), augment)
    if callable(getattr(images, "__len__", None)) and callable(getattr(images, "__getitem__", None)):
        return Unlabelled(Prepared(images, steps), augment)
    raise FewshiftError(f"cannot read images from {type(images).__name__}: give a tensor, a dataset or a folder")


@dataclass(frozen=True)
class ImageFiles:
    """Images on disk without labels, read when asked for."""

    files: tuple[Path, ...]
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.preprocess(open_image(self.files[index], self.preprocess.mode))


@dataclass(frozen=True)
class Prepared:
    """A user's dataset: the image of each item, preprocessed; whatever else an item holds is not looked at."""

    items: Any
    steps: Steps

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        item = self.items[index]
        return _image(item[0] if isinstance(item, (tuple, list)) else item, self.steps)


def _for_folder(steps: Steps, folder: Any) -> Preprocess:
    if not isinstance(steps, Preprocess):
        raise FewshiftError(f"images from {folder} need preprocessing: pass preprocess=fewshift.Preprocess(...)")
    return steps


def _with_steps(scenes: Scenes, steps: Steps) -> Scenes:
    if steps is not None and not isinstance(steps, Preprocess):
        raise FewshiftError("labels of scenes are resized with the images: pass preprocess=fewshift.Preprocess(...)")
    return scenes if steps is None else replace(scenes, preprocess=steps)


def _is_map(label: Any) -> bool:
    return isinstance(label, Image.Image) or (isinstance(label, (Tensor, np.ndarray)) and label.ndim > 1)


def _is_columns(support: Any) -> bool:
    """Whether this is a list of images and one of labels, which have fewer dimensions, not a dataset of two pairs."""
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        return False
    if not all(isinstance(it, (tuple, list)) and len(it) for it in support):
        return False
    images, labels = ([_dimensions(it) for it in column] for column in support)
    return min(images) > max(labels)


def _pairs(images: Sequence[Any], labels: Sequence[Any]) -> list[tuple[Any, Any]]:
    if len(images) != len(labels):
        raise FewshiftError(f"there are {len(images)} images and {len(labels)} labels: give one for each")
    return list(zip(images, labels, strict=True))


def _dimensions(thing: Any) -> int:
    if isinstance(thing, Image.Image):
        return 3 if len(thing.getbands()) > 1 else 2
    return thing.ndim if isinstance(thing, (Tensor, np.ndarray)) else 0


def _scene(image: Any, label: Any, steps: Steps, index: int) -> tuple[Tensor, Tensor]:
    """One image and its label map; with a Preprocess, pictures are resized and cropped together."""
    numbers = np.array(label) if isinstance(label, Image.Image) else label
    if isinstance(steps, Preprocess) and isinstance(image, Image.Image):
        _check_sizes(image.size[::-1], tuple(np.shape(numbers)), index)
        return steps(image), steps.labels(numbers).long()
    tensor, labels = _image(image, steps), _labels(numbers)
    _check_map(tensor, labels, index)
    return tensor, labels.long()


def _check_map(image: Tensor, label: Tensor, index: int) -> None:
    if label.is_floating_point() or label.is_complex():
        raise FewshiftError(
            f"the labels of image {index} are {str(label.dtype).removeprefix('torch.')}, not integers: give a class "
            f"number for each pixel, {IGNORE} where there is none"
        )
    _check_sizes(tuple(image.shape[1:]), tuple(label.shape), index)


def _check_sizes(image: tuple[int, ...], label: tuple[int, ...], index: int) -> None:
    if image != label:
        sizes = ["x".join(map(str, reversed(size))) for size in (image, label)]
        raise FewshiftError(
            f"image {index} is {sizes[0]} pixels and its labels are {sizes[1]}: give one label for each pixel"
        )


def _image(image: Any, steps: Steps) -> Tensor:
    if isinstance(steps, Preprocess) and isinstance(image, Tensor):
        return image  # pictures are preprocessed, tensors are so already
    tensor = image if steps is None else steps(image)
    if not isinstance(tensor, Tensor):
        raise FewshiftError("the dataset's images are not tensors: pass preprocess= to make them so")
    return tensor


def _labels(labels: Any) -> Tensor:
    try:
        if isinstance(labels, np.ndarray) and not labels.flags.writeable:
            labels = labels.copy()  # a tensor would share memory that is not to be written
        return torch.as_tensor(np.asarray(labels) if isinstance(labels, (list, tuple)) else labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FewshiftError("labels are not numbers: give one class index, counted from 0, for each image") from error

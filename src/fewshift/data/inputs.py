"""Whatever a user has, as what a method takes: tensors, datasets, folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshift.data.folders import image_files, labelled_folder, open_image
from fewshift.data.preprocess import Preprocess
from fewshift.errors import FewshiftError
from fewshift.target import Augment, Support, Unlabelled

Steps = Preprocess | Callable[[Any], Tensor] | None


def as_support(support: Any, steps: Steps, augment: Augment | None, classes: Sequence[str] | None) -> Support:
    """A support set from tensors, a dataset of (image, label) pairs, or a folder of class folders."""
    if isinstance(classes, str):
        raise FewshiftError(f"classes={classes!r} is one word: give a list of names")
    names = None if classes is None else tuple(classes)
    if isinstance(support, Support):
        return replace(support, augment=augment or support.augment, classes=names or support.classes)
    if isinstance(support, (str, Path)):
        folder = labelled_folder(support, _for_folder(steps, support), classes=names)
        tensors, numbers = folder.tensors()
        return Support(tensors, numbers, folder.classes, augment)
    if isinstance(support, (tuple, list)) and len(support) == 2 and isinstance(support[0], (Tensor, np.ndarray)):
        return Support(torch.as_tensor(support[0]), _labels(support[1]), names, augment)
    try:
        pairs = [support[index] for index in range(len(support))]
        images = [_image(pair[0], steps) for pair in pairs]
        numbers = _labels([pair[1] for pair in pairs])
    except (TypeError, KeyError, IndexError) as error:
        raise FewshiftError(
            f"cannot read a support set from {type(support).__name__}: give (images, labels) tensors, "
            "a dataset of (image, label) pairs, or a folder of class folders"
        ) from error
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise FewshiftError(
            f"support images have different shapes {sorted(shapes)[:2]}: pass preprocess= with one crop size"
        )
    own = getattr(support, "classes", None)
    known = names or (tuple(own) if isinstance(own, (list, tuple)) else None)
    return Support(torch.stack(images) if images else torch.empty(0, 1), numbers, known, augment)


def as_unlabelled(images: Any, steps: Steps, augment: Augment | None) -> Unlabelled | None:
    """Unlabelled images from a tensor, a dataset, or a folder with images anywhere below it."""
    if images is None or isinstance(images, Unlabelled):
        return images
    if isinstance(images, (str, Path)):
        checked = _for_folder(steps, images)
        return Unlabelled(ImageFiles(tuple(image_files(images)), checked), augment)
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


def _image(image: Any, steps: Steps) -> Tensor:
    tensor = image if steps is None else steps(image)
    if not isinstance(tensor, Tensor):
        raise FewshiftError("the dataset's images are not tensors: pass preprocess= to make them so")
    return tensor


def _labels(labels: Any) -> Tensor:
    try:
        return torch.as_tensor(np.asarray(labels) if isinstance(labels, (list, tuple)) else labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FewshiftError("labels are not numbers: give one class index, counted from 0, for each image") from error

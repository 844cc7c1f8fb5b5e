"""Whatever a user has, as what a method takes: folders, lists of files with labels, tensors, datasets, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewshift.core._arguments import as_tensor, checked_images, checked_names
from fewshift.core.draws import draw_support
from fewshift.core.labels import IMAGES, Augment, Stack
from fewshift.core.left_out import LeftOut
from fewshift.core.support import Support, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.folders import ImageFolder, image_files, labelled_files, labelled_folder, read_tensor
from fewshift.images.formats import left_out_below, looks_like_an_image
from fewshift.images.in_memory import from_dataset, from_tensors, image_tensor, is_tensors, items_of
from fewshift.images.label_lists import is_label_list, read_label_list
from fewshift.images.preprocess import FileSteps, Preprocess, Transform, as_steps
from fewshift.images.scenes import Scenes, draw_scenes, scene_folder, scene_layout
from fewshift.images.sliding_window import Size, output_shape

Steps = FileSteps | Callable[[Any], Any] | None
"""How a picture becomes a tensor; None if it is one."""
Labelled = ImageFolder | Scenes | Support
"""Labelled images: a dataset of (tensor, label) with `classes`, `files` and the `kind` of its labels."""


def as_support(
    source: Any,
    preprocess: Steps = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    *,
    shots: int | None = None,
    seed: int = 0,
    network: nn.Module | None = None,
) -> Support:
    """A support set from whatever `as_labelled` takes: of all its images, or of `shots` drawn with `seed`.

    `shots` counts images per class, or with pixel labels all images. The draw for k is part of the draw for k + 1.
    """
    labelled = as_labelled(source, preprocess, classes, network=network)
    chosen = None if shots is None else _drawn(labelled, shots, seed)
    if isinstance(labelled, Support):
        support = labelled if chosen is None else labelled.part(chosen)
        return replace(support, augment=augment or support.augment)
    if chosen is not None:
        labelled = labelled.subset(chosen.tolist())
    images: Stack
    labels: Stack
    if isinstance(labelled, ImageFolder):
        images, labels = labelled.tensors()
    else:
        pairs = [labelled[index] for index in range(len(labelled))]
        images, labels = tuple(image for image, _ in pairs), tuple(label for _, label in pairs)
    return Support(images, labels, labelled.classes, augment, files=labelled.files, left_out=left_out(source))


def as_labelled(
    source: Any,
    preprocess: Steps = None,
    classes: Sequence[str] | None = None,
    *,
    network: nn.Module | None = None,
    window: Size | None = None,
    stride: Size | None = None,
) -> Labelled:
    """Labelled images from a folder, a list of files, (images, labels), a dataset of such pairs, or batches of them.

    A folder has class folders, or images/ and labels/. A list of files is a CSV, what Label Studio exports, COCO-style
    JSON (`read_label_list`), or a list of (path, label). Files are read on access. In memory, a label is a class
    number, or one for each pixel: a tensor, an array or an index image. Scenes of different sizes stay as they are.
    With a `network`, its outputs name the classes of scenes where nothing else does, and must label pixels.
    """
    names, steps, source = checked_names(classes), as_steps(preprocess), _with_listed_labels(source)
    if isinstance(source, Support):
        return replace(source, classes=names or source.classes)
    if isinstance(source, ImageFolder) and not isinstance(steps, Transform):
        return replace(source, classes=names or source.classes)
    if isinstance(source, Scenes):
        return replace(_prepared(source, steps), classes=names or source.classes)
    if isinstance(source, (str, Path)):
        return _from_path(source, _for_files(steps, source), names, network, window, stride)
    if (pairs := _paths_with_labels(source)) is not None:
        return labelled_files(pairs, _for_files(steps, "a list of files"), names, "the list")
    return from_tensors(source, names) if is_tensors(source) else from_dataset(source, steps, names)


def _from_path(
    root: str | Path,
    steps: FileSteps,
    classes: tuple[str, ...] | None,
    network: nn.Module | None,
    window: Size | None,
    stride: Size | None,
) -> ImageFolder | Scenes:
    if is_label_list(root):
        return labelled_files(read_label_list(root).rows, steps, classes, str(root))
    where = scene_layout(root)
    if where is None:
        return labelled_folder(root, steps, classes)
    steps = _for_scenes(steps)
    if network is not None:
        shape = output_for(network, image_files(where.images), steps, window, stride)
        if len(shape) == 1:
            raise FewshiftError(
                f"{root} has pixel labels, and the {type(network).__name__} has one output per image: "
                "make one folder per class, or use a network that labels pixels"
            )
        classes = output_names(classes, shape[0])
    return scene_folder(root, steps, classes)


def _paths_with_labels(source: Any) -> list[tuple[Path, Any]] | None:
    """(path, label) pairs, from a list of such or from a list of paths and one of labels; None if it is neither."""
    if not isinstance(source, (list, tuple)) or not source:
        return None
    if len(source) == 2 and all(isinstance(column, (list, tuple)) for column in source) and _are_images(source[0]):
        if len(source[0]) != len(source[1]):
            raise FewshiftError(f"there are {len(source[0])} paths and {len(source[1])} labels: give one for each")
        source = list(zip(*source, strict=True))
    if not all(isinstance(row, (list, tuple)) and len(row) == 2 and isinstance(row[0], (str, Path)) for row in source):
        first = source[0][0] if isinstance(source[0], (list, tuple)) and source[0] else source[0]
        if isinstance(first, (str, Path)):
            raise FewshiftError(f"{source[0]!r} is no pair of a path and a label: give (path, label) for each image")
        return None
    return [(Path(path), label) for path, label in source]


def _with_listed_labels(source: Any) -> Any:
    """(images, labels) with the labels as a list too, where an array or a column of a table has those of a list."""
    if isinstance(source, (list, tuple)) and len(source) == 2 and isinstance(source[0], (list, tuple)):
        images, labels = source
        if callable(getattr(labels, "tolist", None)) and getattr(labels, "ndim", 0) == 1 and len(labels) == len(images):
            return images, labels.tolist()
    return source


def _are_images(paths: Sequence[Any]) -> bool:
    return all(isinstance(path, (str, Path)) and looks_like_an_image(Path(path)) for path in paths)


def _drawn(labelled: Labelled, shots: int, seed: int) -> Tensor:
    """Positions of so many images per class, or with pixel labels in all."""
    if not isinstance(shots, int) or isinstance(shots, bool) or shots < 1:
        raise FewshiftError(f"shots={shots!r} is no number of images: give 1, 2, ...")
    if labelled.kind is IMAGES and not isinstance(labelled, Scenes):
        numbers = labelled.targets if isinstance(labelled, Support) else labelled.labels
        return draw_support(numbers, shots, seed, labelled.classes)
    return draw_scenes(len(labelled), shots, seed)


# --- what a network answers


def output_for(
    network: nn.Module, files: Iterable[Path], preprocess: FileSteps, window: Size | None, stride: Size | None
) -> tuple[int, ...]:
    """The shape of the output for the first image that can be read: (classes,) or (classes, height, width)."""
    refusal = FewshiftError("there are no images: give some")
    for number, file in enumerate(files):
        try:
            image = read_tensor(file, preprocess)
        except FewshiftError as error:
            refusal = refusal if number else error
            continue
        shape = output_shape(network, image, window, stride)
        if len(shape) > 1:
            _for_scenes(preprocess)
        return shape
    raise refusal


def output_names(classes: Sequence[str] | None, outputs: int) -> tuple[str, ...]:
    """A name for each output of a network; numbers where it has none."""
    names = tuple(map(str, range(outputs))) if classes is None else tuple(classes)
    if len(names) != outputs:
        raise FewshiftError(
            f"{len(names)} class names for a network with {outputs} outputs: pass --classes (classes=), a name for "
            "each output in their order"
        )
    return names


# --- images without labels


def as_unlabelled(
    images: Any, preprocess: Steps, augment: Augment | None, labelled: Support | None = None
) -> Unlabelled | None:
    """Unlabelled images from a tensor, a dataset, batches, a folder with images anywhere below it, or a list of files.

    Labels that they come with are ignored. A tensor has to have as many dimensions as `labelled` images.
    """
    if images is None or isinstance(images, Unlabelled):
        return images
    steps = as_steps(preprocess)
    if isinstance(images, (str, Path)):
        steps = _for_files(steps, images)
    if (files := files_of(images)) is not None:
        return Unlabelled(ImageFiles(tuple(files), _for_files(steps, images)), augment, left_out(images))
    if isinstance(images, Scenes):
        return Unlabelled(_prepared(images, steps), augment)
    if isinstance(images, (Tensor, np.ndarray)):
        images = checked_images(as_tensor(images, "unlabelled images"), "unlabelled images")
        if labelled is not None and images.ndim != labelled.images[0].ndim + 1:
            raise FewshiftError(
                f"an unlabelled image has shape {tuple(images.shape[1:])} and a labelled one "
                f"{tuple(labelled.images[0].shape)}: give a tensor of (images, channels, height, width)"
            )
        return Unlabelled(images, augment)
    if callable(getattr(images, "__len__", None)) and callable(getattr(images, "__getitem__", None)):
        return Unlabelled(Prepared(images, steps), augment)
    if callable(getattr(images, "__iter__", None)):
        batches = (batch[0] if isinstance(batch, (tuple, list)) else batch for batch in items_of(images))
        return Unlabelled(torch.cat([as_tensor(batch, "unlabelled images") for batch in batches]), augment)
    raise FewshiftError(f"cannot read images from {type(images).__name__}: give a tensor, a dataset or a folder")


def files_of(images: Any) -> list[Path] | None:
    """The image files, if these are a folder, a file with labels, a list of paths, or one of (path, label)."""
    if isinstance(images, (str, Path)):
        if is_label_list(images):
            return [file for file, _ in read_label_list(images).rows]
        return image_files(images_below(images))
    if isinstance(images, (list, tuple)) and images and all(isinstance(file, (str, Path)) for file in images):
        return [Path(file) for file in images]
    pairs = _paths_with_labels(images)
    return None if pairs is None else [file for file, _ in pairs]


def left_out(images: Any) -> LeftOut | None:
    """The files of a folder that are no images that can be read, or the images of a list that have no label."""
    if not isinstance(images, (str, Path)):
        return None
    if is_label_list(images):
        return read_label_list(images).left_out
    return left_out_below(images_below(images))


def images_below(folder: str | Path) -> Path:
    """Where the images of a folder are: label files are pictures too, and stay out."""
    where = scene_layout(folder)
    return Path(folder) if where is None or where.images == Path(folder).absolute() else where.images


@dataclass(frozen=True)
class ImageFiles:
    """Images on disk without labels, read on access."""

    files: tuple[Path, ...]
    preprocess: FileSteps

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return read_tensor(self.files[index], self.preprocess)


@dataclass(frozen=True)
class Prepared:
    """A user's dataset: the preprocessed image of each item. Anything else in an item is ignored."""

    items: Any
    steps: FileSteps | None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        item = self.items[index]
        return image_tensor(item[0] if isinstance(item, (tuple, list)) else item, self.steps, f"image {index}")


# --- preprocessing


def _for_files(steps: FileSteps | None, where: Any) -> FileSteps:
    if steps is None:
        raise FewshiftError(
            f"images from {where} need preprocessing: pass preprocess=fewshift.Preprocess(...), or a function from a "
            "picture to a tensor"
        )
    return steps


def _for_scenes(steps: FileSteps) -> Preprocess:
    if isinstance(steps, Transform):
        raise FewshiftError(
            f"labels of pixels are resized and cropped like their images, which {steps.name} does not do: pass "
            "preprocess=fewshift.Preprocess(...)"
        )
    return steps


def _prepared(scenes: Scenes, steps: FileSteps | None) -> Scenes:
    return scenes if steps is None else replace(scenes, preprocess=_for_scenes(steps))

"""Whatever a user has, as what a method takes: tensors, datasets, folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fewshift.core.labels import IMAGES, Augment, extent
from fewshift.core.losses import IGNORE
from fewshift.core.support import Support, Unlabelled, draw_support
from fewshift.errors import FewshiftError
from fewshift.images.folders import ImageFolder, image_files, labelled_folder, open_image
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes, draw_scenes, scene_folder, scene_layout
from fewshift.images.sliding_window import Size, output_shape

Steps = Preprocess | Callable[[Any], Tensor] | None
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
    if isinstance(labelled, ImageFolder):
        images, labels = labelled.tensors()
        return Support(images, labels, labelled.classes, augment, files=labelled.files)
    pairs = [labelled[index] for index in range(len(labelled))]
    maps = tuple(label for _, label in pairs)
    return Support(tuple(image for image, _ in pairs), maps, labelled.classes, augment, files=labelled.files)


def as_labelled(
    source: Any,
    preprocess: Steps = None,
    classes: Sequence[str] | None = None,
    *,
    network: nn.Module | None = None,
    window: Size | None = None,
    stride: Size | None = None,
) -> Labelled:
    """Labelled images from a folder, (images, labels), a dataset of such pairs, or a support set.

    A label is a class number, or one for each pixel: a tensor, an array or an index image. A folder has class folders,
    or images/ and labels/; it is read on access. Scenes of different sizes stay as they are. With a `network`, its
    outputs name the classes of scenes where nothing else does, and must label pixels.
    """
    if isinstance(classes, str):
        raise FewshiftError(f"classes={classes!r} is one word: give a list of names")
    names = None if classes is None else tuple(classes)
    if isinstance(source, Support):
        return replace(source, classes=names or source.classes)
    if isinstance(source, ImageFolder) and (preprocess is None or isinstance(preprocess, Preprocess)):
        return replace(source, classes=names or source.classes)
    if isinstance(source, Scenes):
        return replace(_prepared(source, preprocess), classes=names or source.classes)
    if isinstance(source, (str, Path)):
        return _from_folder(source, _for_files(preprocess, source), names, network, window, stride)
    return _from_tensors(source, names) if _is_tensors(source) else _from_dataset(source, preprocess, names)


def _from_folder(
    root: str | Path,
    preprocess: Preprocess,
    classes: tuple[str, ...] | None,
    network: nn.Module | None,
    window: Size | None,
    stride: Size | None,
) -> ImageFolder | Scenes:
    where = scene_layout(root)
    if where is None:
        return labelled_folder(root, preprocess, classes)
    if network is not None:
        shape = output_for(network, image_files(where.images), preprocess, window, stride)
        if len(shape) == 1:
            raise FewshiftError(
                f"{root} has pixel labels, and the {type(network).__name__} has one output per image: "
                "make one folder per class, or use a network that labels pixels"
            )
        classes = output_names(classes, shape[0])
    return scene_folder(root, preprocess, classes)


def _is_tensors(source: Any) -> bool:
    return isinstance(source, (tuple, list)) and len(source) == 2 and isinstance(source[0], (Tensor, np.ndarray))


def _from_tensors(source: Any, classes: tuple[str, ...] | None) -> Support:
    images, labels = torch.as_tensor(source[0]), _labels(source[1])
    for index, (image, label) in enumerate(zip(images, labels, strict=False)):
        if label.ndim > 1:
            _check_map(image, label, index)
    return Support(images, labels, classes)


def _drawn(labelled: Labelled, shots: int, seed: int) -> Tensor:
    """Positions of so many images per class, or with pixel labels in all."""
    if not isinstance(shots, int) or isinstance(shots, bool) or shots < 1:
        raise FewshiftError(f"shots={shots!r} is no number of images: give 1, 2, ...")
    if labelled.kind is IMAGES and not isinstance(labelled, Scenes):
        numbers = labelled.targets if isinstance(labelled, Support) else labelled.labels
        return draw_support(numbers, shots, seed, labelled.classes)
    return draw_scenes(len(labelled), shots, seed)


def _from_dataset(source: Any, preprocess: Steps, classes: tuple[str, ...] | None) -> Support:
    """A support set from a dataset of (image, label) pairs, or from a list of images and one of labels."""
    if _is_columns(source):
        images, labels = source
        if len(images) != len(labels):
            raise FewshiftError(f"there are {len(images)} images and {len(labels)} labels: give one for each")
        source = list(zip(images, labels, strict=True))
    try:
        pairs = [source[index] for index in range(len(source))]
        pixels = any(_is_map(pair[1]) for pair in pairs)
        read = [
            _scene(pair[0], pair[1], preprocess, index) if pixels else (_image(pair[0], preprocess), pair[1])
            for index, pair in enumerate(pairs)
        ]
    except (TypeError, KeyError, IndexError) as error:
        raise FewshiftError(
            f"cannot read a support set from {type(source).__name__}: give (images, labels) tensors, "
            "a dataset of (image, label) pairs, a folder of class folders, or one with images/ and labels/"
        ) from error
    own = getattr(source, "classes", None)
    known = classes or (tuple(own) if isinstance(own, (list, tuple)) else None)
    if pixels:
        return Support(tuple(image for image, _ in read), tuple(label for _, label in read), known)
    shapes = {tuple(image.shape) for image, _ in read}
    if len(shapes) > 1:
        raise FewshiftError(
            f"support images have different shapes {sorted(shapes)[:2]}: pass preprocess= with one crop size"
        )
    stacked = torch.stack([image for image, _ in read]) if read else torch.empty(0, 1)
    return Support(stacked, _labels([label for _, label in read]), known)


# --- what a network answers


def output_for(
    network: nn.Module, files: Sequence[Path], preprocess: Preprocess, window: Size | None, stride: Size | None
) -> tuple[int, ...]:
    """The shape of the output for the first image that can be read: (classes,) or (classes, height, width)."""
    refusal = FewshiftError("there are no images: give some")
    for number, file in enumerate(files):
        try:
            image = preprocess(open_image(file, preprocess.mode))
        except FewshiftError as error:
            refusal = refusal if number else error
            continue
        return output_shape(network, image, window, stride)
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


def as_unlabelled(images: Any, preprocess: Steps, augment: Augment | None) -> Unlabelled | None:
    """Unlabelled images from a tensor, a dataset, or a folder with images anywhere below it."""
    if images is None or isinstance(images, Unlabelled):
        return images
    if isinstance(images, (str, Path)):
        steps = _for_files(preprocess, images)
        return Unlabelled(ImageFiles(tuple(image_files(images_below(images))), steps), augment)
    if isinstance(images, Scenes):
        return Unlabelled(_prepared(images, preprocess), augment)
    if isinstance(images, (Tensor, np.ndarray)):
        return Unlabelled(torch.as_tensor(images), augment)
    if callable(getattr(images, "__len__", None)) and callable(getattr(images, "__getitem__", None)):
        return Unlabelled(Prepared(images, preprocess), augment)
    raise FewshiftError(f"cannot read images from {type(images).__name__}: give a tensor, a dataset or a folder")


def images_below(folder: str | Path) -> Path:
    """Where the images of a folder are: label files are pictures too, and stay out."""
    where = scene_layout(folder)
    return Path(folder) if where is None or where.images == Path(folder).absolute() else where.images


@dataclass(frozen=True)
class ImageFiles:
    """Images on disk without labels, read on access."""

    files: tuple[Path, ...]
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.preprocess(open_image(self.files[index], self.preprocess.mode))


@dataclass(frozen=True)
class Prepared:
    """A user's dataset: the preprocessed image of each item. Anything else in an item is ignored."""

    items: Any
    steps: Steps

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        item = self.items[index]
        return _image(item[0] if isinstance(item, (tuple, list)) else item, self.steps)


# --- one image, one label


def _for_files(steps: Steps, where: Any) -> Preprocess:
    if not isinstance(steps, Preprocess):
        raise FewshiftError(f"images from {where} need preprocessing: pass preprocess=fewshift.Preprocess(...)")
    return steps


def _prepared(scenes: Scenes, steps: Steps) -> Scenes:
    return scenes if steps is None else replace(scenes, preprocess=_for_files(steps, "scenes"))


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
        raise FewshiftError(
            f"image {index} is {extent(image)} pixels and its labels are {extent(label)}: give one label for each pixel"
        )


def _image(image: Any, steps: Steps) -> Tensor:
    if isinstance(steps, Preprocess) and isinstance(image, Tensor):
        return image  # pictures are preprocessed, tensors already are
    tensor = image if steps is None else steps(image)
    if not isinstance(tensor, Tensor):
        raise FewshiftError("the dataset's images are not tensors: pass preprocess= to make them so")
    return tensor


def _labels(labels: Any) -> Tensor:
    try:
        if isinstance(labels, np.ndarray) and not labels.flags.writeable:
            labels = labels.copy()  # a tensor would share read-only memory
        return torch.as_tensor(np.asarray(labels) if isinstance(labels, (list, tuple)) else labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FewshiftError("labels are not numbers: give one class index, counted from 0, for each image") from error

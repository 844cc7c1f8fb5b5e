"""Augmentations of a batch, as bytes: geometry of images and pixel labels together, colours of images alone.

Randomness is the global torch generator, which the trainer seeds for every epoch and gives back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift.core.losses import IGNORE
from fewshift.errors import FewshiftError

Size = tuple[int, int]  # height, width
Pair = tuple[Tensor, Tensor]  # images (n, channels, height, width) and labels (n,) or (n, height, width)
Augment = Callable[[Tensor, Tensor], Pair]

ENLARGED = 1.125
SCALES = (0.5, 2.0)
JITTER = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue
STRONG_JITTER = (0.8, 0.8, 0.8, 0.3)
BLUR = (0.15, 1.3)  # the least and the largest sigma, in pixels
REACH = 5  # pixels: four times the largest sigma


def augmentation(name: str, size: Size) -> Augment:
    """The augmentation of that name, giving images of `size`."""
    steps = AUGMENTATIONS[name](size)

    def augment(images: Tensor, labels: Tensor) -> Pair:
        for step in steps:
            images, labels = step(images, labels)
        return images, labels

    return augment


def check_augment(name: str, dense: bool) -> None:
    """One sentence when an augmentation is not for such labels."""
    if dense and "randaugment" in name:
        raise FewshiftError(f"augment={name} bends images and not the labels of their pixels: use scenes, crop or none")
    if not dense and name == "scenes":
        raise FewshiftError("augment=scenes is for images with pixel labels: use crop, enlarge or none")


def centre_crop(images: Tensor, labels: Tensor, size: Size) -> Pair:
    """The middle of each image."""
    top, left = ((have - want) // 2 for have, want in zip(images.shape[-2:], size, strict=True))
    return _cut(images, labels, [top] * len(images), [left] * len(images), size)


def random_crop(images: Tensor, labels: Tensor, size: Size) -> Pair:
    """A part of each image, anywhere in it."""
    _check_room(images, size)
    tops, lefts = (
        torch.randint(have - want + 1, (len(images),)).tolist()
        for have, want in zip(images.shape[-2:], size, strict=True)
    )
    return _cut(images, labels, tops, lefts, size)


def flip(images: Tensor, labels: Tensor) -> Pair:
    """Half of the images mirrored, left to right."""
    mirrored = torch.rand(len(images)) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    return images, torch.where(mirrored[:, None, None], labels.flip(-1), labels) if labels.ndim > 1 else labels


def shift(images: Tensor, labels: Tensor, pixels: int = 1) -> Pair:
    """Each image moved by up to so many pixels, black coming in."""
    size = images.shape[-2:]
    return random_crop(F.pad(images, [pixels] * 4), _padded(labels, pixels), (size[0], size[1]))


def enlarge(images: Tensor, labels: Tensor) -> Pair:
    """Half of the images 1.125 times as large, of which a random part is kept."""
    height, width = images.shape[-2:]
    chosen = torch.rand(len(images)) < 0.5
    if not chosen.any():
        return images, labels
    size = round(height * ENLARGED), round(width * ENLARGED)
    larger = F.interpolate(images[chosen], size, mode="bilinear"), _resized_labels(labels[chosen], size)
    cut, cut_labels = random_crop(*larger, (height, width))
    images, labels = images.clone(), labels.clone()
    images[chosen], labels[chosen] = cut, cut_labels
    return images, labels


def scale(images: Tensor, labels: Tensor, size: Size) -> Pair:
    """Each image 0.5 to 2 times as large, of which a random part of `size` is kept; what lies outside is ignored.

    The part is cut out first and then resized, which is the same and does not resize what is thrown away.
    """
    pairs = []
    for image, label in zip(images, labels, strict=True):
        factor = float(torch.empty(()).uniform_(*SCALES))
        window = max(1, round(size[0] / factor)), max(1, round(size[1] / factor))
        image_part, label_part = _window(image, label, window)
        larger = F.interpolate(image_part[None], size, mode="bilinear", antialias=factor < 1)
        pairs.append((larger[0], _resized_labels(label_part[None], size)[0]))
    return torch.stack([image for image, _ in pairs]), torch.stack([label for _, label in pairs])


def rand_augment(images: Tensor, labels: Tensor, operations: int, magnitude: int) -> Pair:
    """RandAugment as torchvision has it: so many random operations on each image, of a magnitude up to 30.

    It bends images and not their labels: for images with one label.
    """
    from torchvision.transforms import RandAugment

    change = RandAugment(operations, magnitude)
    return torch.stack([change(it) for it in _bytes(images)]), labels


def jitter(images: Tensor, labels: Tensor) -> Pair:
    """Brightness, contrast, saturation and hue of half of the images."""
    from torchvision.transforms import ColorJitter

    change = ColorJitter(*JITTER)
    return torch.stack([change(it) if torch.rand(()) < 0.5 else it for it in images]), labels


def photometric(images: Tensor) -> Tensor:
    """Each image with other colours, strongly changed, and blurred: the same things in the same places."""
    from torchvision.transforms import ColorJitter
    from torchvision.transforms.functional import gaussian_blur

    change, reach = ColorJitter(*STRONG_JITTER), min(REACH, *(side - 1 for side in images.shape[-2:]))
    sigmas = torch.empty(len(images)).uniform_(*BLUR).tolist()
    pairs = zip(images, sigmas, strict=True)
    return torch.stack([gaussian_blur(change(image), 2 * reach + 1, sigma) for image, sigma in pairs])


def _fitted(size: Size) -> Augment:
    return partial(centre_crop, size=size)


AUGMENTATIONS: dict[str, Callable[[Size], tuple[Augment, ...]]] = {
    "none": lambda size: (_fitted(size),),
    "shift": lambda size: (_fitted(size), shift),  # digits
    "crop": lambda size: (partial(random_crop, size=size), flip),
    "enlarge": lambda size: (_fitted(size), enlarge, flip),  # PACS
    "enlarge+randaugment": lambda size: (  # Office
        _fitted(size),
        enlarge,
        flip,
        partial(rand_augment, operations=2, magnitude=10),
    ),
    "randaugment": lambda size: (  # VisDA
        partial(rand_augment, operations=1, magnitude=6),
        partial(random_crop, size=size),
    ),
    "scenes": lambda size: (partial(scale, size=size), flip, jitter),
}


def _cut(images: Tensor, labels: Tensor, tops: list[int], lefts: list[int], size: Size) -> Pair:
    """The parts that begin at (top, left), one of each image."""
    _check_room(images, size)
    if tuple(images.shape[-2:]) == size:
        return images, labels
    height, width = size
    interleaved = images.is_contiguous(memory_format=torch.channels_last)
    parts = torch.empty(
        (*images.shape[:2], *size),
        dtype=images.dtype,
        memory_format=torch.channels_last if interleaved else torch.contiguous_format,
    )
    for part, image, top, left in zip(parts, images, tops, lefts, strict=True):
        part.copy_(image[:, top : top + height, left : left + width])
    if labels.ndim > 1:
        labels = torch.stack(
            [
                label[top : top + height, left : left + width]
                for label, top, left in zip(labels, tops, lefts, strict=True)
            ]
        )
    return parts, labels


def _window(image: Tensor, label: Tensor, size: Size) -> Pair:
    """A part of that size, anywhere in the image or around it."""
    top, left = (
        int(torch.randint(min(0, have - want), max(0, have - want) + 1, ()))
        for have, want in zip(label.shape, size, strict=True)
    )
    rows, columns = (
        slice(max(0, start), min(have, start + want))
        for start, have, want in zip((top, left), label.shape, size, strict=True)
    )
    around = [max(0, -left), max(0, left + size[1] - label.shape[1]), max(0, -top), max(0, top + size[0] - len(label))]
    return F.pad(image[:, rows, columns], around), F.pad(label[rows, columns], around, value=IGNORE)


def _resized_labels(labels: Tensor, size: Size) -> Tensor:
    """Each pixel takes the label of the nearest one."""
    if labels.ndim == 1:
        return labels
    rows, columns = (
        ((torch.arange(want) + 0.5) * have / want).long() for have, want in zip(labels.shape[1:], size, strict=True)
    )
    return labels[:, rows[:, None], columns]


def _padded(labels: Tensor, pixels: int) -> Tensor:
    return F.pad(labels, [pixels] * 4, value=IGNORE) if labels.ndim > 1 else labels


def _bytes(images: Tensor) -> Tensor:
    return (images * 255).round().byte() if images.is_floating_point() else images


def _check_room(images: Tensor, size: Size) -> None:
    height, width = images.shape[-2:]
    if height < size[0] or width < size[1]:
        raise FewshiftError(
            f"images of {width}x{height} pixels have no part of {size[1]}x{size[0]}: give a smaller crop"
        )

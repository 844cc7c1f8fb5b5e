"""Augmentations of a batch, by torchvision: geometry of images and pixel labels together, colours of images alone.

Randomness is the global torch generator, which the trainer seeds for every epoch and gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from fewshift.core.labels import IMAGES, PIXELS, Labels, extent
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
OUTSIDE: Mapping[Any, int] = {Tensor: 0, tv_tensors.Mask: IGNORE}  # black, and without a label
SHAPED: dict[Labels, Callable[[Tensor], Tensor]] = {IMAGES: lambda label: label, PIXELS: tv_tensors.Mask}


@dataclass(frozen=True)
class Augmentation:
    """The steps that give images of a size, and the kinds of labels they are for."""

    steps: Callable[[Size], tuple[nn.Module, ...]]
    kinds: tuple[Labels, ...] = (IMAGES, PIXELS)
    pads: bool = False  # whether images may be smaller than the size


def augmentation(name: str, size: Size, kind: Labels) -> Augment:
    """The augmentation of that name, giving images of `size`: each image of a batch is changed by itself."""
    chosen = AUGMENTATIONS[name]
    change, shaped = v2.Compose(chosen.steps(size)), SHAPED[kind]

    def augment(images: Tensor, labels: Tensor) -> Pair:
        if not chosen.pads and any(have < want for have, want in zip(images.shape[-2:], size, strict=True)):
            raise FewshiftError(
                f"images of {extent(images.shape[-2:])} pixels have no part of {extent(size)}: give a smaller crop"
            )
        pairs = [change(image, shaped(label)) for image, label in zip(images, labels, strict=True)]
        return torch.stack([image for image, _ in pairs]), torch.stack(
            [label.as_subclass(Tensor) for _, label in pairs]
        )

    return augment


def check_augment(name: str, kind: Labels) -> None:
    """Raise one sentence when an augmentation is not for such labels."""
    if kind not in AUGMENTATIONS[name].kinds:
        fitting = [other for other, known in AUGMENTATIONS.items() if kind in known.kinds]
        raise FewshiftError(f"augment={name} is not for labels of each {kind.unit}: use one of {', '.join(fitting)}")


def photometric(images: Tensor) -> Tensor:
    """Each image with other colours, strongly changed, and blurred: the same things in the same places."""
    reach = min(REACH, *(side - 1 for side in images.shape[-2:]))
    change = v2.Compose([v2.ColorJitter(*STRONG_JITTER), v2.GaussianBlur(2 * reach + 1, BLUR)])
    return torch.stack([change(image) for image in images])


class Zoom(v2.Transform):  # type: ignore[misc]
    """Makes an image, with its labels, 0.5 to 2 times as large."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """The new height and width."""
        factor = float(torch.empty(()).uniform_(*SCALES))
        return {"size": [max(1, round(side * factor)) for side in flat_inputs[0].shape[-2:]]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Of the image, or of its labels, which are never interpolated."""
        return functional.resize(inpt, params["size"], antialias=True)


def _enlarge(size: Size) -> nn.Module:
    """Half of the images 1.125 times as large, cut at random to the size they had."""
    larger = [round(side * ENLARGED) for side in size]
    change: nn.Module = v2.RandomApply([v2.Resize(larger, antialias=True), v2.RandomCrop(size)], p=0.5)
    return change


AUGMENTATIONS = {
    "none": Augmentation(lambda size: (v2.CenterCrop(size),)),
    "shift": Augmentation(  # digits: up to a pixel each way
        lambda size: (v2.CenterCrop(size), v2.RandomCrop(size, padding=1, fill=OUTSIDE))
    ),
    "crop": Augmentation(lambda size: (v2.RandomCrop(size), v2.RandomHorizontalFlip())),
    "enlarge": Augmentation(  # PACS
        lambda size: (v2.CenterCrop(size), _enlarge(size), v2.RandomHorizontalFlip())
    ),
    "enlarge+randaugment": Augmentation(  # Office; RandAugment bends images and not the labels of their pixels
        lambda size: (v2.CenterCrop(size), _enlarge(size), v2.RandomHorizontalFlip(), v2.RandAugment(2, 10)),
        kinds=(IMAGES,),
    ),
    "randaugment": Augmentation(  # VisDA
        lambda size: (v2.RandAugment(1, 6), v2.RandomCrop(size)), kinds=(IMAGES,)
    ),
    "scenes": Augmentation(
        lambda size: (
            Zoom(),
            v2.RandomCrop(size, pad_if_needed=True, fill=OUTSIDE),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(*JITTER)], p=0.5),
        ),
        kinds=(PIXELS,),
        pads=True,
    ),
}

"""Corruptions: what a worse camera, a cable or a careless export does to pictures, at three strengths each.

The images of a domain are corrupted after they were resized and cropped, as a network sees them. A size is a share of
the shorter side, so that a strength means much the same for digits of 28 pixels and photographs of 224, and at least so
many pixels: less would leave the digits as they are.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as ops

from fewshift.core.randomness import private_randomness
from fewshift.errors import FewshiftError
from fewshift.images.formats import picture
from fewshift.lab.datasets.domain import Domain

SEED = 0  # of the noise: the same for every draw of a support
AT_ONCE = 64  # images that are corrupted together

Size = tuple[float, float]  # a share of the shorter side, and the least number of pixels


def _noise(images: Tensor, deviation: float) -> Tensor:
    return torch.stack([ops.gaussian_noise(image, sigma=deviation) for image in images])


def _blur(images: Tensor, size: Size) -> Tensor:
    sigma = _pixels(images, size)
    blurred: Tensor = ops.gaussian_blur(images, 2 * max(1, round(3 * sigma)) + 1, sigma)
    return blurred


def _jpeg(images: Tensor, quality: int) -> Tensor:
    # not by torchvision's codec, which is to be removed
    whole = (images * 255).round().to(torch.uint8)
    return torch.stack([_saved(ops.to_pil_image(image), quality) for image in whole]) / 255


def _saved(image: Image.Image, quality: int) -> Tensor:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    with picture(file) as read:
        pixels: Tensor = ops.pil_to_tensor(read)
    return pixels


def _pixelation(images: Tensor, size: Size) -> Tensor:
    block, sides = _pixels(images, size), images.shape[-2:]
    coarse = ops.resize(
        images, [max(1, round(side / block)) for side in sides], InterpolationMode.BILINEAR, antialias=True
    )
    blocks: Tensor = ops.resize(coarse, list(sides), InterpolationMode.NEAREST)
    return blocks


def _pixels(images: Tensor, size: Size) -> float:
    share, least = size
    return max(share * min(images.shape[-2:]), least)


# the operation, and its argument for the strengths 1, 2 and 3
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float | Size, ...]]] = {
    "noise": (_noise, (0.05, 0.12, 0.25)),
    "blur": (_blur, ((0.006, 0.4), (0.015, 0.7), (0.03, 1.0))),  # the deviation
    "contrast": (ops.adjust_contrast, (0.75, 0.5, 0.25)),
    "brightness": (ops.adjust_brightness, (1.5, 2.0, 3.0)),
    "jpeg": (_jpeg, (20, 10, 4)),
    "pixelation": (_pixelation, ((1 / 64, 2), (1 / 32, 3), (1 / 16, 4))),  # the side of a block
    "inversion": (ops.solarize, (0.7, 0.4, 0.0)),  # pixels at least as bright as this are inverted
}
STRENGTHS = (1, 2, 3)
CORRUPTIONS = tuple(f"{name} {strength}" for name in OPERATIONS for strength in STRENGTHS)


def corrupted(domain: Domain, corruption: str) -> Domain:
    """The same images and labels, each image corrupted: "blur 2" is the second strength of blur."""
    if corruption not in CORRUPTIONS:
        raise FewshiftError(f"corruption={corruption!r} is unknown: choose one of {', '.join(CORRUPTIONS)}")
    name, strength = corruption.split()
    operation, levels = OPERATIONS[name]
    pixels = domain.cached().source
    assert isinstance(pixels, Tensor)
    whole = not pixels.is_floating_point()
    with private_randomness(SEED):
        parts = []
        for part in pixels.split(AT_ONCE):
            changed = operation(part / 255 if whole else part, levels[int(strength) - 1]).clamp(0, 1)
            parts.append((changed * 255).round().to(torch.uint8) if whole else changed)
    return replace(domain, source=torch.cat(parts))

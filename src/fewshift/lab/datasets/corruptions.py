"""Corruptions: what a worse camera, a cable or a careless export does to pictures, at three strengths each.

The images of a domain are corrupted after they were resized and cropped, as a network sees them. Sizes are shares of
the image, so that a strength means the same for digits of 28 pixels and photographs of 224.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as ops

from fewshift.core.randomness import private_randomness
from fewshift.errors import FewshiftError
from fewshift.lab.datasets.domain import Domain

SEED = 0  # of the noise: the same for every draw of a support
AT_ONCE = 64  # images that are corrupted together


def _noise(images: Tensor, deviation: float) -> Tensor:
    return torch.stack([ops.gaussian_noise(image, sigma=deviation) for image in images])


def _blur(images: Tensor, share: float) -> Tensor:
    sigma = share * min(images.shape[-2:])
    blurred: Tensor = ops.gaussian_blur(images, 2 * max(1, round(3 * sigma)) + 1, sigma)
    return blurred


def _jpeg(images: Tensor, quality: int) -> Tensor:
    bytes_ = (images * 255).round().to(torch.uint8)
    return torch.stack([ops.jpeg(image, quality) for image in bytes_]) / 255


def _pixelation(images: Tensor, block: float) -> Tensor:
    """Blocks of a share of the shorter side."""
    height, width = images.shape[-2:]
    few = min(height, width, round(1 / block))
    small = [max(1, round(few * side / min(height, width))) for side in (height, width)]
    coarse = ops.resize(images, small, InterpolationMode.BILINEAR, antialias=True)
    blocks: Tensor = ops.resize(coarse, [height, width], InterpolationMode.NEAREST)
    return blocks


# the operation, and its argument for the strengths 1, 2 and 3
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float, float, float]]] = {
    "noise": (_noise, (0.05, 0.12, 0.25)),
    "blur": (_blur, (0.006, 0.015, 0.03)),
    "contrast": (ops.adjust_contrast, (0.75, 0.5, 0.25)),
    "brightness": (ops.adjust_brightness, (1.5, 2.0, 3.0)),
    "jpeg": (_jpeg, (20, 10, 4)),
    "pixelation": (_pixelation, (1 / 64, 1 / 32, 1 / 16)),
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

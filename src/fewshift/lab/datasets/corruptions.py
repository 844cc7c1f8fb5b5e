"""Corruptions: what a worse camera, a cable or a careless export does to pictures, at three strengths each.

The images of a domain are corrupted after they were resized and cropped, as a network sees them. A size is a share of
the shorter side, so that a strength means much the same for digits of 28 pixels and photographs of 224, and at least so
many pixels: less would leave the digits as they are.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
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
SPOT = 0.06  # radius of a spot of dirt, as a share of the shorter side
GREY = 0.4
AIR = 0.85  # how bright haze is

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


def _posterisation(images: Tensor, bits: int) -> Tensor:
    coarse: Tensor = ops.posterize((images * 255).round().to(torch.uint8), bits)
    return coarse / 255


def _rotation(images: Tensor, degrees: float) -> Tensor:
    """What turns in from outside repeats the border: a camera that hangs askew shows no black corners."""
    margin = [max(images.shape[-2:]) // 2] * 4
    turned = ops.rotate(ops.pad(images, margin, padding_mode="edge"), degrees, InterpolationMode.BILINEAR)
    middle: Tensor = ops.center_crop(turned, list(images.shape[-2:]))
    return middle


def _motion(images: Tensor, size: Size) -> Tensor:
    """Blur along a horizontal line."""
    length = 2 * max(1, round(_pixels(images, size) / 2)) + 1
    line = images.new_full((images.shape[1], 1, 1, length), 1 / length)
    side = [length // 2, 0]
    return F.conv2d(ops.pad(images, side, padding_mode="edge"), line, groups=images.shape[1])


def _dirt(images: Tensor, share: float) -> Tensor:
    """Grey spots on the lens, in other places for each image, until they hide about such a share of it."""
    height, width = images.shape[-2:]
    radius = SPOT * min(height, width)
    count = round(share * height * width / (math.pi * radius**2))
    centres = torch.rand(len(images), count, 2) * torch.tensor([height, width])
    rows, columns = torch.arange(height).view(-1, 1), torch.arange(width).view(1, -1)
    dirty = images.clone()
    for image, spots in zip(dirty, centres, strict=True):
        for row, column in spots.tolist():
            image[:, (rows - row) ** 2 + (columns - column) ** 2 < radius**2] = GREY
    return dirty


def _haze(images: Tensor, share: float) -> Tensor:
    """Bright air in front of everything, that much of what the camera sees."""
    return (1 - share) * images + share * AIR


def _vignette(images: Tensor, share: float) -> Tensor:
    """Darker with the square of the distance to the centre; the corners lose such a share of their light."""
    height, width = images.shape[-2:]
    rows, columns = torch.linspace(-1, 1, height).view(-1, 1), torch.linspace(-1, 1, width).view(1, -1)
    return images * (1 - share * (rows**2 + columns**2) / 2)


def _grain(images: Tensor, share: float) -> Tensor:
    """Such a share of the pixels is black or white, half of them each."""
    chance = torch.rand(len(images), 1, *images.shape[-2:])
    return torch.where(chance < share / 2, 0.0, torch.where(chance < share, 1.0, images))


def _zoom(images: Tensor, share: float) -> Tensor:
    """The middle alone, with such a share of each side: a camera that stands too near."""
    sides = list(images.shape[-2:])
    middle = ops.center_crop(images, [max(1, round(side * share)) for side in sides])
    near: Tensor = ops.resize(middle, sides, InterpolationMode.BILINEAR, antialias=True)
    return near


def _tint(images: Tensor, light: tuple[float, float]) -> Tensor:
    """Warm light: so much is left of green and of blue; a grey camera sees their mean with red."""
    colours = images.new_tensor([1.0, *light])
    seen = colours if images.shape[1] == len(colours) else colours.mean().expand(images.shape[1])
    return images * seen.view(-1, 1, 1)


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
    "darkness": (ops.adjust_gamma, (1.6, 2.4, 4.0)),
    "posterisation": (_posterisation, (3, 2, 1)),  # bits that are left
    "rotation": (_rotation, (10, 20, 40)),  # degrees
    "motion": (_motion, ((0.03, 2), (0.07, 4), (0.14, 6))),  # the length
    "dirt": (_dirt, (0.1, 0.25, 0.5)),  # the share that is hidden, if spots did not overlap
    "haze": (_haze, (0.3, 0.5, 0.7)),  # the share of bright air
    "vignette": (_vignette, (0.5, 0.75, 1.0)),  # of the light, that corners lose
    "grain": (_grain, (0.01, 0.04, 0.12)),  # of the pixels
    "sharpening": (ops.adjust_sharpness, (3.0, 6.0, 12.0)),
    "zoom": (_zoom, (0.85, 0.7, 0.5)),  # the share of each side that is left
    "tint": (_tint, ((0.85, 0.6), (0.7, 0.4), (0.5, 0.15))),  # green and blue that are left
    "colour": (ops.adjust_hue, (0.1, 0.25, 0.5)),  # turns of the colour circle; grey stays grey
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

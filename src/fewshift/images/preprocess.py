"""From an image to the tensor a network was trained on.

Another size, crop or normalisation than in training is a domain shift of our own making, and adaptation would spend
itself on repairing it. So the steps are a value that travels with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fewshift.core.losses import IGNORE
from fewshift.core.randomness import watched_randomness
from fewshift.errors import FewshiftError

MODES = {1: "L", 3: "RGB"}  # channels -> image mode
MAX_PIXELS = 89_478_485  # of a tensor: a gigabyte in float32
FILTERS = tuple(filter.name.lower() for filter in Image.Resampling)
SIDES = ("shorter", "height")


@dataclass(frozen=True)
class Preprocess:
    """Shorter side to `resize`, centre crop of `crop` pixels, values to [0, 1], then (x - mean) / std per channel.

    Sizes and rounding are torchvision's, so that weights trained there see the same pixels here. None leaves a step
    out. An image smaller than the crop is centred on black. With `squeeze`, both sides become `resize`, whatever the
    proportions; with `side="height"`, the height does, in upright images too.
    """

    resize: int | None
    crop: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    squeeze: bool = False
    side: str = "shorter"

    def __post_init__(self) -> None:
        if len(self.mean) not in MODES or len(self.std) != len(self.mean):
            raise FewshiftError(
                f"preprocessing has {len(self.mean)} means and {len(self.std)} deviations: "
                "give one of each (grey) or three of each (colour)"
            )
        if not all(map(math.isfinite, self.mean)) or not all(0 < value < math.inf for value in self.std):
            raise FewshiftError(f"mean {self.mean}, std {self.std}: give finite means and positive deviations")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and not 1 <= size <= math.isqrt(MAX_PIXELS):
                raise FewshiftError(f"{name} is {size}: give a size from 1 to {math.isqrt(MAX_PIXELS)} pixels")
        if self.squeeze and self.resize is None:
            raise FewshiftError("squeeze without resize: give the size to squeeze to")
        if self.side not in SIDES:
            raise FewshiftError(f"unknown side {self.side!r}: use one of {', '.join(SIDES)}")
        if self.squeeze and self.side != "shorter":
            raise FewshiftError(f"squeeze resizes both sides, side={self.side!r} one: leave one of them out")
        if self.interpolation not in FILTERS:
            raise FewshiftError(f"unknown interpolation {self.interpolation!r}: use one of {', '.join(FILTERS)}")

    @property
    def channels(self) -> int:
        """The number of channels: 1 (grey) or 3 (colour)."""
        return len(self.mean)

    @property
    def mode(self) -> str:
        """The image mode that has these channels."""
        return MODES[self.channels]

    def __call__(self, image: Image.Image) -> Tensor:
        """The float32 tensor (channels, height, width) of one image."""
        return self.normalise(self.pixels(image))

    def pixels(self, image: Image.Image) -> Tensor:
        """The same image before normalisation, as bytes: a quarter of the memory."""
        image = self._shaped(in_mode(image, self.mode), Image.Resampling[self.interpolation.upper()], 0)
        return torch.from_numpy(np.array(image)).view(image.height, image.width, self.channels).permute(2, 0, 1)

    def labels(self, image: Any) -> Tensor:
        """The class numbers (height, width) of a label image after the same resizing and crop, as bytes.

        Each pixel takes the nearest number, because a number between two classes would be a third class. Pixels
        outside the image are ignored.
        """
        numbers = np.asarray(image)
        if numbers.ndim != 2 or numbers.dtype.kind not in "bui":
            raise FewshiftError(
                f"a label image has shape {numbers.shape} and {numbers.dtype} values: give one class number for each "
                "pixel"
            )
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) <= IGNORE:
            raise FewshiftError(
                f"class numbers are from {numbers.min()} to {numbers.max()}: use 0 to {IGNORE - 1}, {IGNORE} to ignore"
            )
        bytes_ = Image.fromarray(numbers.astype(np.uint8))
        return torch.from_numpy(np.array(self._shaped(bytes_, Image.Resampling.NEAREST, IGNORE)))

    def _shaped(self, image: Image.Image, resample: Image.Resampling, outside: int) -> Image.Image:
        """The resized and cropped image: images and labels share this geometry."""
        if self.resize is not None:
            size = (self.resize, self.resize) if self.squeeze else _scaled(image, self.resize, self.side)
            # Pillow's filters widen with the scale, hence no aliasing
            image = image if image.size == size else image.resize(size, resample)
        return image if self.crop is None else _centre(image, self.crop, outside)

    def normalise(self, pixels: Tensor) -> Tensor:
        """(x - mean) / std of images (..., channels, height, width): bytes, or floats in [0, 1]."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((pixels if pixels.is_floating_point() else pixels.float() / 255) - mean) / std

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON knows them."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Preprocess:
        """Read what `to_json` wrote; missing sizes mean no resizing and no crop, other fields have defaults."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise FewshiftError(f"unknown preprocessing {', '.join(map(repr, unknown))}: use only {', '.join(known)}")
        try:
            sizes = {name: _exactly(data.get(name), int, type(None)) for name in ("resize", "crop")}
            mean, std = (tuple(float(value) for value in data[name]) for name in ("mean", "std"))
            squeeze = _exactly(data.get("squeeze", False), bool)
        except (KeyError, TypeError, ValueError) as error:
            raise FewshiftError(
                f"preprocessing {dict(data)} cannot be read: give mean and std as lists of numbers, "
                "resize and crop as whole numbers or null, squeeze as true or false"
            ) from error
        interpolation, side = str(data.get("interpolation", "bilinear")), str(data.get("side", "shorter"))
        return cls(**sizes, mean=mean, std=std, interpolation=interpolation, squeeze=squeeze, side=side)


@dataclass(frozen=True)
class Transform:
    """A function from a picture to a float tensor, such as torchvision's `weights.transforms()`.

    It sees pictures upright and in RGB. What it normalises by is not known, and no delta or card can store it.
    """

    function: Callable[[Any], Any]
    mode: ClassVar[str] = "RGB"

    @property
    def name(self) -> str:
        """What the function is called."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(self, image: Any) -> Tensor:
        """The tensor of one image, or an error if the function makes none."""
        try:
            with watched_randomness() as drawn:
                tensor, random = self.function(image), drawn()
        except Exception as error:  # a user's function raises whatever it likes
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise FewshiftError(f"preprocess={self.name} failed ({reason}): let it take a PIL image") from error
        if random:
            raise FewshiftError(
                f"preprocess={self.name} is random: pass the preprocessing of evaluation, and random views as augment="
            )
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = f"{tensor.dtype} values" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise FewshiftError(
                f"preprocess={self.name} returns {kind.removeprefix('torch.')}: let it return a float tensor, as "
                "torchvision's ToTensor does"
            )
        return tensor


FileSteps = Preprocess | Transform
"""How a picture from a file becomes a tensor."""


def as_steps(preprocess: Any) -> FileSteps | None:
    """Preprocessing as files need it: a function becomes a `Transform`."""
    if preprocess is None or isinstance(preprocess, FileSteps):
        return preprocess
    if callable(preprocess):
        return Transform(preprocess)
    raise FewshiftError(
        f"preprocess={preprocess!r} is no preprocessing: pass fewshift.Preprocess(...), or a function from a picture "
        "to a tensor"
    )


IMAGENET = Preprocess(256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to grey ("L") or colour ("RGB"), eight bits per channel, as a viewer would show it.

    Sixteen-bit values are scaled, where Pillow would clip them to white; transparent pixels become white, because
    the colour stored beneath them is arbitrary.
    """
    if image.mode.startswith("I"):
        # 65535 / 257 = 255; mode "I" is how Pillow opens some 16-bit files
        image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if image.mode == "F":
        raise FewshiftError("the image has floating-point pixels of unknown range: save it with 8 or 16 bits")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image if image.mode == mode else image.convert(mode)


def _scaled(image: Image.Image, size: int, side: str) -> tuple[int, int]:
    """Width and height with the same proportions and that side of `size` pixels."""
    base = image.height if side == "height" else min(image.size)
    width, height = (size if length == base else max(1, size * length // base) for length in image.size)
    if width * height > MAX_PIXELS:
        raise FewshiftError(
            f"the image is {image.width}x{image.height} pixels, a strip that would grow to {width}x{height}: crop it"
        )
    return width, height


def _centre(image: Image.Image, size: int, outside: int) -> Image.Image:
    """The middle `size` x `size` pixels; pixels outside the image have the value `outside`."""
    # rounding is torchvision's: half to even when it cuts, the larger half right and below when it pads
    left, top = (round((side - size) / 2) if side > size else -((size - side) // 2) for side in image.size)
    canvas = Image.new(image.mode, (size, size), outside)
    canvas.paste(image, (-left, -top))
    return canvas


def _exactly(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(value)
    return value

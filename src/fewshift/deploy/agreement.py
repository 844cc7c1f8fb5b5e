"""Whether an exported network says what the network in PyTorch says: the same images through both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fewshift.core._progress import track
from fewshift.core.labels import Stack
from fewshift.core.network import logits_of
from fewshift.core.support import Unlabelled
from fewshift.deploy.tracing import Exportable
from fewshift.errors import FewshiftError
from fewshift.images.inputs import Steps, as_unlabelled
from fewshift.images.preprocess import Preprocess

Runner = Callable[[NDArray[Any]], NDArray[Any]]
MOST = 16  # images to compare
MOST_SCENES = 4  # of them where every pixel has a label
TOGETHER, SCENES_TOGETHER = 8, 2  # in a batch
MADE = 8  # images, where there are none
SIDE = 224  # of a made image, where nothing says
COARSE = 8  # patches along a side of a made image
STRIDE = 32  # pixels: many networks take only multiples of it
TOLERANCE = 1e-3  # of the largest logit; rounding left up to 0.00002 in twelve networks (benchmarks/exports.py)


class ComparedOn(Enum):
    """Which images went through both networks."""

    SUPPORT = "support images"
    UNLABELLED = "unlabelled images of the adaptation"
    GIVEN = "images that were given"
    MADE = "made images: smooth patches with noise"


@dataclass(frozen=True)
class ImageSample:
    """Images to compare by, as the network takes them; `pixels` are the same as bytes, where that is wanted."""

    images: tuple[Tensor, ...]  # (channels, height, width) each
    source: ComparedOn
    pixels: tuple[Tensor, ...] | None = None

    def in_bytes(self, steps: Preprocess) -> ImageSample:
        """The images rounded to bytes, and what the network takes for those bytes."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (steps.mean, steps.std))
        pixels = tuple(((image * std + mean) * 255).round().clamp(0, 255).byte() for image in self.images)
        return replace(self, images=tuple(map(steps.normalise, pixels)), pixels=pixels)

    def batches(self, together: int) -> list[tuple[int, ...]]:
        """Positions that go through together: each image alone, then as many of one size as `together`."""
        alone = [(position,) for position in range(len(self.images))]
        sizes: dict[torch.Size, list[int]] = {}
        for position, image in enumerate(self.images):
            sizes.setdefault(image.shape, []).append(position)
        several = [tuple((group * together)[:together]) for group in sizes.values()]  # one image is repeated
        return alone + several


@dataclass(frozen=True)
class Agreement:
    """How far two networks agree on the same images."""

    difference: float  # the largest of two logits
    largest: float  # logit, of the network in PyTorch
    equal: float  # the share of answers, of images or of pixels, that are the same
    images: int
    source: ComparedOn
    batch_sizes: tuple[int, ...]

    @property
    def good(self) -> bool:
        """Whether the difference is what rounding leaves."""
        return self.difference <= TOLERANCE * self.largest


def sample_of(
    images: Any, support: Stack | None, unlabelled: Unlabelled | None, steps: Steps, kind: str
) -> ImageSample:
    """Images to compare by: those given, else those of the adaptation, else made ones of the preprocessing's size."""
    if images is not None:
        found, source = as_unlabelled(images, steps, None), ComparedOn.GIVEN
        assert found is not None
        return ImageSample(_some(found), source)
    if support is not None:
        return ImageSample(tuple(image.cpu() for image in spread(support, MOST)), ComparedOn.SUPPORT)
    if unlabelled is not None:
        return ImageSample(_some(unlabelled), ComparedOn.UNLABELLED)
    if not isinstance(steps, Preprocess):
        raise FewshiftError(
            f"how the {kind} wants its images is not known: pass preprocess=fewshift.Preprocess(...), or images="
        )
    return ImageSample(tuple(steps.normalise(_made(steps))), ComparedOn.MADE)


def spread(items: Sequence[Any] | Tensor, most: int) -> list[Any]:
    """At most so many of the items, from the first to the last."""
    count = min(most, len(items))
    return [items[round(at * (len(items) - 1) / max(1, count - 1))] for at in range(count)]


def runnable(module: Exportable, sample: ImageSample) -> tuple[ImageSample, tuple[int, ...]]:
    """The images as the network can see them, and the shape of its output for the first.

    Where it takes only sides of a multiple, the right and lower edges are cut.
    """
    refusal: Exception | None = None
    for images in (sample.images, tuple(map(_cut, sample.images))):
        try:
            with torch.no_grad():
                logits = logits_of(module(images[0][None]))
        except FewshiftError:
            raise
        except Exception as error:  # a user's forward raises whatever it likes
            refusal = refusal or error
            continue
        count = MOST if logits.ndim == 2 else MOST_SCENES
        return replace(sample, images=tuple(spread(images, count))), tuple(logits.shape[1:])
    line = (str(refusal) or type(refusal).__name__).splitlines()[0]
    raise FewshiftError(
        f"the network cannot run on images of shape {tuple(sample.images[0].shape)} ({line}): "
        "check size, channels and preprocessing"
    )


def compare_runs(model: nn.Module, run: Runner, sample: ImageSample) -> Agreement:
    """The same images through `model` and through `run`, alone and in a batch."""
    scenes = len(_answer(model, sample.images[0][None]).shape) > 2
    together = SCENES_TOGETHER if scenes else max(2, min(TOGETHER, len(sample.images)))
    difference = largest = 0.0
    equal = answers = 0
    batches = sample.batches(together)
    for positions in track(batches, "comparing"):
        images = torch.stack([sample.images[position] for position in positions])
        expected = _answer(model, images)
        entering = images.numpy()
        if sample.pixels is not None:
            entering = torch.stack([sample.pixels[position] for position in positions]).permute(0, 2, 3, 1).numpy()
        got = torch.from_numpy(np.ascontiguousarray(run(np.ascontiguousarray(entering))))
        if got.shape != expected.shape:
            raise FewshiftError(
                f"the exported network answers {tuple(got.shape)} where PyTorch answers {tuple(expected.shape)}: "
                "export another format"
            )
        gap = (got - expected).abs().max()
        difference = max(difference, float("inf") if gap.isnan() else float(gap))
        largest = max(largest, float(expected.abs().max()))
        same = logits_of(got).argmax(1) == logits_of(expected).argmax(1)
        equal, answers = equal + int(same.sum()), answers + same.numel()
    return Agreement(difference, largest, equal / answers, len(sample.images), sample.source, (1, together))


def _answer(model: nn.Module, images: Tensor) -> Tensor:
    from fewshift.core.outputs import main_output

    with torch.no_grad():
        return main_output(model(images))


def _some(images: Unlabelled) -> tuple[Tensor, ...]:
    """A few of the images, each on its own: their sizes may differ."""
    positions = spread(range(len(images)), MOST)
    return tuple(images.batch(torch.tensor([position]))[0].cpu() for position in positions)


def _cut(image: Tensor) -> Tensor:
    height, width = (side // STRIDE * STRIDE or side for side in image.shape[1:])
    return image[:, :height, :width]


def _made(steps: Preprocess) -> Tensor:
    """Smooth patches of colour with noise, as bytes, the same every time."""
    side = steps.crop or steps.resize or SIDE
    generator = torch.Generator().manual_seed(0)
    patches = F.interpolate(
        torch.rand(MADE, steps.channels, COARSE, COARSE, generator=generator), (side, side), mode="bilinear"
    )
    noise = torch.rand(MADE, steps.channels, side, side, generator=generator)
    return ((0.8 * patches + 0.2 * noise) * 255).byte()

"""Is there a shift at all? What a network's BatchNorm layers see, against what they remember; no labels.

`core/distance.py` has the score: how far images are from what the layers remember, in sampling errors.

**The alarm.** Were images independent draws from normal distributions around the source, the square of the score would
follow Dempster's (1958) F distribution for a mean in more dimensions than samples. Its degrees of freedom are r and
r (N - 1), where r is the number of directions in which images differ: many thousand channels make about ten. It is
estimated from the images and shrunk to a guess. The threshold is the distribution's 95th percentile.

**Source images**, where there are some, take the place of what the layers remember: D and L become differences between
two samples, and the variance is that within both. It matters for networks that were trained with strong augmentation:
they remember augmented images, from which plain ones of the source are as far as those of another place can be.

The constants were set on six networks (two on digits, four on PACS) so that random images of the source raise an alarm
in at most 5 % of draws, whatever N is; for a mixture of domains it was up to 7 % with five images, nearly all in draws
of one domain. docs/trust.md has the rates, `benchmarks/shift.py` measures them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.special import fdtri  # type: ignore[import-untyped]
from torch import Tensor, nn

from fewshift.core import _progress as progress_
from fewshift.core._display import Displayed
from fewshift.core.distance import GUESS_COUNTS, TINY, Seen, look, measured, score
from fewshift.errors import FewshiftError
from fewshift.images.inputs import Steps, as_unlabelled
from fewshift.models.cards import known_card

DIRECTIONS = 4  # in which images differ, before any was seen
DIRECTIONS_COUNT = 5  # images that this guess weighs as much as
MOST_DIRECTIONS = 60
SILENT = 0.95  # share of draws from the source without an alarm
SHOWN = 3  # layers
FLAT = 1e-3  # ratio of deviations below which a layer sees nothing at all


@dataclass(frozen=True)
class LayerShift:
    """One BatchNorm layer: how far what it sees is from the source."""

    name: str
    mean_shift: float  # root mean square over channels, in source deviations
    std_ratio: float  # deviation over all images and positions / the source's, geometric mean over channels
    score: float  # in sampling errors: about 1 for images of the source
    rank: int  # 1 is the layer with the highest score

    @property
    def beyond_chance(self) -> float:
        """The squared shift of means and logarithm of deviations, less what images of the source would show."""
        square = self.mean_shift**2 + math.log(max(self.std_ratio, FLAT)) ** 2
        return square * max(0.0, 1 - 1 / max(self.score, TINY) ** 2)


@dataclass(frozen=True, repr=False)
class Shift(Displayed):
    """Whether images differ from those a network was trained on, and where in the network it shows.

    `shifted` says that `score` is above `threshold`, which one draw in twenty of the source's own images would be.
    """

    layers: tuple[LayerShift, ...]  # in the order in which they are executed
    score: float
    threshold: float
    images: int  # looked at
    total: int  # there were
    source_images: int = 0  # compared with; 0: with what the layers remember

    @property
    def title(self) -> str:
        """What it is."""
        return f"Shift of {self.total:,} images: {'alarm' if self.shifted else 'no alarm'}"

    @property
    def facts(self) -> dict[str, str]:
        """The score, the layers with the strongest shift, and what was looked at."""
        strongest = (f"{layer.name} ({layer.score:.1f})" for layer in self.ranked[:SHOWN])
        images = f"{self.images} looked at"
        return {
            "score": f"{self.score:.1f}, alarm above {self.threshold:.1f}",
            "strongest": ", ".join(strongest),
            "images": images + (f", compared with {self.source_images} of the source" if self.source_images else ""),
        }

    @property
    def shifted(self) -> bool:
        """Whether there is an alarm."""
        return self.score > self.threshold

    @property
    def distance(self) -> float:
        """How large the shift is: the root mean square over layers, less what chance explains, in source deviations.

        The score says how sure a shift is, and grows with the number of images; the distance says how far it goes.
        """
        return math.sqrt(sum(layer.beyond_chance for layer in self.layers) / max(1, len(self.layers)))

    @property
    def ranked(self) -> tuple[LayerShift, ...]:
        """The layers, the strongest shift first."""
        return tuple(sorted(self.layers, key=lambda layer: layer.rank))

    def to_json(self) -> dict[str, Any]:
        """The fields and the verdict, ready for JSON."""
        return {"shifted": self.shifted, "distance": self.distance} | asdict(self)


def shift(
    model: nn.Module,
    images: Any,
    *,
    source: Any = None,
    preprocess: Steps = None,
    head: str | None = None,
    progress: progress_.Progress = None,
) -> Shift:
    """Compare images with those `model` was trained on, layer by layer and without labels.

    Give twenty images or more. Five show strong shifts. One shows an inverted or noisy picture on some networks only
    (docs/trust.md has the rates).

    `images` are a folder, a tensor or a dataset. `preprocess` says how a picture becomes a tensor; a network from
    `fewshift.load` or timm knows. Of more than 256 images that many are looked at, evenly spread. `source`, in the same
    forms, are images known to be like those of training, such as validation images. They are optional, but make few
    images say more. They are needed where training augmented strongly: without them, plain source images raise an
    alarm too.

    An alarm says that the images are unlike a random sample of the source. It does not say that the network is wrong
    on them, nor what differs: images of a single class, or frames of a single film, are unlike a sample of all. A
    network trained on several domains remembers their mixture, and images of one domain alone are a shift from it.
    """
    steps = known_card(model).preprocess if preprocess is None else preprocess
    pictures, known = as_unlabelled(images, steps, None), as_unlabelled(source, steps, None)
    if pictures is None:
        raise FewshiftError("there are no images: give a tensor, a dataset or a folder")
    stages = [progress_.Stage("images", len(each)) for each in (pictures, known) if each is not None]
    with progress_.told_to(progress, "measuring the shift"), progress_.plan(stages):
        seen = look(model, pictures, head)
        return judged(seen, None if known is None else look(model, known, head), len(pictures))


def judged(seen: Mapping[str, Seen], source: Mapping[str, Seen] | None = None, total: int | None = None) -> Shift:
    """The verdict on what the layers saw of N images, against what they saw of source images or remember."""
    layers = {name: measured(view, source[name] if source else None) for name, view in seen.items()}
    order = sorted(layers, key=lambda name: -layers[name].square)
    free = next(iter(layers.values())).free
    directions = _directions(torch.stack([layer.products / layer.error for layer in layers.values()]).sum(0), free)
    images = len(next(iter(seen.values())).mean)
    return Shift(
        tuple(
            LayerShift(name, layer.mean_shift, layer.std_ratio, math.sqrt(layer.square), order.index(name) + 1)
            for name, layer in layers.items()
        ),
        score=score(layers.values()),
        threshold=math.sqrt(fdtri(directions, directions * (free + GUESS_COUNTS), SILENT)),
        images=images,
        total=images if total is None else total,
        source_images=len(next(iter(source.values())).mean) if source else 0,
    )


def _directions(products: Tensor, free: int) -> float:
    """r = (tr S)^2 / tr S^2 of the covariance S between images, from their products, shrunk to the guess.

    1 / r is shrunk: Bai and Saranadasa (1996) estimate it without bias, from three images on.
    """
    trace, square = float(products.trace()), float(products.square().sum())
    if free < 2 or trace == 0:  # too few, or the same image over and over
        return DIRECTIONS
    inverse = free**2 / ((free + 2) * (free - 1)) * (square / trace**2 - 1 / free)
    inverse = min(max(inverse, 1 / MOST_DIRECTIONS), 1.0)
    return (DIRECTIONS_COUNT + free - 1) / (DIRECTIONS_COUNT / DIRECTIONS + (free - 1) * inverse)

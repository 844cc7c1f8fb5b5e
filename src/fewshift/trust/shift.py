"""Is there a shift at all? What a network's BatchNorm layers see, against what they remember; no labels.

A BatchNorm layer stores how the source's images entered it: mean mu and deviation sigma of every channel. Image i
enters with the mean m_i and the variance v_i over its positions. If it came from the source, then

    d_i = (m_i - mu) / sigma                        is 0 on average over images, and
    q_i = (v_i + (m_i - mu)^2 + eps) / sigma^2      is 1.

How far N images are from that is measured in every layer by its channels' average of D^2 + L^2, where D is the mean
of d and L half the logarithm of the mean of q: shifts in deviations, and in logarithms of deviations.

**The sampling error.** Positions within an image are alike, so the sampling unit is the image. How much images differ
from each other is not stored in a layer (its variance is that within images plus that between images), but N images
show it: the variance of d_i and q_i over images, in the units of D and L. For few images it is shrunk to a guess;
for one image the guess is all there is. A tolerance is added, because the source's own images are not at 0 either: its
statistics were gathered in training, from other crops, under weights that still moved.

**The score** of a layer is the root of (D^2 + L^2) / (variance / N + tolerance^2): about 1 for images of the source,
whatever N is. The score of all layers is the root mean square of theirs.

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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.special import fdtri  # type: ignore[import-untyped]
from torch import Tensor, nn

from fewshift.core import _progress as progress_
from fewshift.core._display import Displayed
from fewshift.core.adaptable import refuse_without_statistics
from fewshift.core.moments import Moments, SourceLayer, normalising, source_layers
from fewshift.core.network import Network, channels_last, free_memory, like
from fewshift.core.support import Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.inputs import Steps, as_unlabelled
from fewshift.models.cards import known_card

MOST = 256  # images that are looked at: with more, the tolerance decides and not the sampling error
AT_ONCE = 32  # images that pass together, memory allowing

TOLERANCE = 0.05  # source deviations by which images of the source may be off
GUESS = 0.25  # variance between images, in source variances, before any was seen
GUESS_COUNTS = 2  # images that this guess weighs as much as
DIRECTIONS = 4  # in which images differ, before any was seen
DIRECTIONS_COUNT = 5  # images that this guess weighs as much as
MOST_DIRECTIONS = 60
SILENT = 0.95  # share of draws from the source without an alarm
SHOWN = 3  # layers
FLAT = 1e-3  # ratio of deviations below which a layer sees nothing at all
TINY = 1e-12  # a layer without eps may remember a channel that never varied


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


@dataclass(frozen=True)
class Seen:
    """What each image shows one layer, in units of what the layer remembers."""

    mean: Tensor  # (N, C) d: the shift of the image's mean
    var: Tensor  # (N, C) the image's own variance, over the source's

    def part(self, indices: Tensor) -> Seen:
        """Of the images at `indices`."""
        return Seen(self.mean[indices], self.var[indices])


def look(model: nn.Module, pictures: Unlabelled, head: str | None = None, most: int | None = None) -> dict[str, Seen]:
    """What every layer of the source network sees of the images, of at most `most` (256)."""
    count = min(most or MOST, len(pictures))
    chosen = torch.arange(count) * len(pictures) // count
    network = Network.of(model, pictures.batch(chosen[:1]), head)
    refuse_without_statistics(network)
    if not network.layers:
        raise FewshiftError(
            "a shift is seen in BatchNorm layers and this network has none: use a network with BatchNorm (if it was "
            "fused for deployment, the weights before fusing)"
        )
    source, working = source_layers(network), network.copy()
    parts = [_passed(network, working, source, images) for images in _batches(network, pictures, chosen)]
    return {
        layer.name: Seen(*(torch.cat([getattr(part[layer.name], what) for part in parts]) for what in ("mean", "var")))
        for layer in network.layers
    }


def judged(seen: Mapping[str, Seen], source: Mapping[str, Seen] | None = None, total: int | None = None) -> Shift:
    """The verdict on what the layers saw of N images, against what they saw of source images or remember."""
    measured = {name: _measured(view, source[name] if source else None) for name, view in seen.items()}
    squares = {name: layer.effect / layer.error for name, layer in measured.items()}
    order = sorted(squares, key=lambda name: -squares[name])
    free = next(iter(measured.values())).free
    directions = _directions(torch.stack([layer.products / layer.error for layer in measured.values()]).sum(0), free)
    images = len(next(iter(seen.values())).mean)
    return Shift(
        tuple(
            LayerShift(name, layer.mean_shift, layer.std_ratio, math.sqrt(squares[name]), order.index(name) + 1)
            for name, layer in measured.items()
        ),
        score=math.sqrt(sum(squares.values()) / len(squares)),
        threshold=math.sqrt(fdtri(directions, directions * (free + GUESS_COUNTS), SILENT)),
        images=images,
        total=images if total is None else total,
        source_images=len(next(iter(source.values())).mean) if source else 0,
    )


@dataclass(frozen=True)
class _Measured:
    """One layer over all images."""

    mean_shift: float
    std_ratio: float
    effect: float  # average of D^2 + L^2 over channels
    error: float  # the same for images of the source, squared sampling error and tolerance
    products: Tensor  # (N, N) inner products of the images' deviations from their average
    free: int  # degrees of freedom of these


def _measured(seen: Seen, source: Seen | None) -> _Measured:
    samples = [_Sample.of(seen)] if source is None else [_Sample.of(seen), _Sample.of(source)]
    shift, stretch, spread = (
        getattr(samples[0], what) - (getattr(samples[1], what) if source else 0)
        for what in ("shift", "stretch", "spread")
    )
    deviations = torch.cat([sample.deviations for sample in samples])
    products = deviations @ deviations.T / len(shift)
    free = len(deviations) - len(samples)
    variance = (GUESS_COUNTS * GUESS + float(products.trace())) / (GUESS_COUNTS + free)
    return _Measured(
        mean_shift=float(shift.square().mean().sqrt()),
        std_ratio=float(spread.mean().exp()),
        effect=float(shift.square().mean() + stretch.square().mean()),
        error=variance * sum(1 / len(sample.deviations) for sample in samples) + TOLERANCE**2,
        products=products,
        free=free,
    )


@dataclass(frozen=True)
class _Sample:
    """What some images show one layer."""

    shift: Tensor  # (C,) D
    stretch: Tensor  # (C,) L
    spread: Tensor  # (C,) logarithm of the deviation over all images and positions, in source deviations
    deviations: Tensor  # (N, 2C) of each image from D and, in the same units, from L

    @classmethod
    def of(cls, seen: Seen) -> _Sample:
        mean, var = seen.mean.double(), seen.var.double()
        shift = mean.mean(0)
        around = var + mean.square()  # the source's mean, not their own: then one image is enough
        total = around.mean(0).clamp(min=TINY)
        own = (var + (mean - shift).square()).mean(0).clamp(min=TINY)
        return cls(shift, total.log() / 2, own.log() / 2, torch.cat([mean - shift, (around / total - 1) / 2], 1))


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


@torch.no_grad()
def _passed(network: Network, working: nn.Module, source: Mapping[str, SourceLayer], images: Tensor) -> dict[str, Seen]:
    calls: dict[str, list[Moments]] = {layer.name: [] for layer in network.layers}

    def note(name: str, moments: Moments) -> None:
        calls[name].append(moments)

    with normalising(network, working, source, note):
        working(channels_last(images))
    return {
        name: _in_source_units(_of_each_image(name, moments, len(images)), source[name])
        for name, moments in calls.items()
    }


def _batches(network: Network, pictures: Unlabelled, chosen: Tensor) -> Iterator[Tensor]:
    """The chosen images in batches of one size, as large as memory allows."""
    waiting: list[Tensor] = []
    room = AT_ONCE
    for index in progress_.track(chosen.split(1), "images"):
        image = like(network.model, pictures.batch(index))
        if waiting and (len(waiting) >= room or image.shape != waiting[0].shape):
            yield torch.cat(waiting)
            waiting = []
        if not waiting:
            free = free_memory(image.device)
            room = AT_ONCE if free is None else min(AT_ONCE, free // 2 // max(1, network.bytes_to_pass(image)))
        waiting.append(image)
    yield torch.cat(waiting)


def _of_each_image(name: str, calls: list[Moments], images: int) -> Moments:
    """The moments of each image over all that a layer saw of it, in several runs or on parts of the image."""
    if not calls or any(len(moments.mean) % images for moments in calls):
        raise FewshiftError(
            f"layer '{name}' does not see every image in the same way, so images cannot be compared in it: "
            "pass a network that runs alike for all images"
        )
    mean, var, count = (
        torch.cat([getattr(moments, what).unflatten(0, (images, -1)) for moments in calls], 1)
        for what in ("mean", "var", "count")
    )
    weights = (count / count.sum(1, keepdim=True)).unsqueeze(2)
    pooled = (weights * mean).sum(1)
    within = (weights * (var + (mean - pooled.unsqueeze(1)).square())).sum(1)
    return Moments(pooled, within, count.sum(1))


def _in_source_units(moments: Moments, source: SourceLayer) -> Seen:
    mean, std = source.normal.mean.double(), source.normal.std.double().clamp(min=TINY)
    seen = Seen((moments.mean - mean) / std, (moments.var + source.eps) / std.square())
    return Seen(seen.mean.float().cpu(), seen.var.float().cpu())

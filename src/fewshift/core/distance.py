"""How far images are from what BatchNorm layers remember, and how far a few images are by chance alone.

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.adaptable import refuse_without_statistics
from fewshift.core.moments import Moments, normalising, source_layers
from fewshift.core.network import Network, free_memory, like
from fewshift.core.source_layer import SourceLayer
from fewshift.core.support import Unlabelled
from fewshift.errors import FewshiftError

MOST = 256  # images that are looked at: with more, the tolerance decides and not the sampling error
AT_ONCE = 32  # images that pass together, memory allowing

TOLERANCE = 0.05  # source deviations by which images of the source may be off
GUESS = 0.25  # variance between images, in source variances, before any was seen
GUESS_COUNTS = 2  # images that this guess weighs as much as
TINY = 1e-12  # a layer without eps may remember a channel that never varied


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


@dataclass(frozen=True)
class LayerDistance:
    """One layer over all images."""

    mean_shift: float
    std_ratio: float
    effect: float  # average of D^2 + L^2 over channels
    error: float  # the same for images of the source, squared sampling error and tolerance
    products: Tensor  # (N, N) inner products of the images' deviations from their average
    free: int  # degrees of freedom of these

    @property
    def square(self) -> float:
        """The squared score: about 1 for images of the source."""
        return self.effect / self.error


def score(layers: Iterable[LayerDistance]) -> float:
    """The root mean square of the layers' scores."""
    squares = [layer.square for layer in layers]
    return math.sqrt(sum(squares) / len(squares))


def measured(seen: Seen, source: Seen | None = None) -> LayerDistance:
    """What a layer saw of N images, against what it saw of source images or remembers."""
    samples = [_Sample.of(seen)] if source is None else [_Sample.of(seen), _Sample.of(source)]
    shift, stretch, spread = (
        getattr(samples[0], what) - (getattr(samples[1], what) if source else 0)
        for what in ("shift", "stretch", "spread")
    )
    deviations = torch.cat([sample.deviations for sample in samples])
    products = deviations @ deviations.T / len(shift)
    free = len(deviations) - len(samples)
    variance = (GUESS_COUNTS * GUESS + float(products.trace())) / (GUESS_COUNTS + free)
    return LayerDistance(
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


@torch.no_grad()
def _passed(network: Network, working: nn.Module, source: Mapping[str, SourceLayer], images: Tensor) -> dict[str, Seen]:
    calls: dict[str, list[Moments]] = {layer.name: [] for layer in network.layers}

    def note(name: str, moments: Moments) -> None:
        calls[name].append(moments)

    with normalising(network, working, source, note):
        working(network.laid_out(images))
    return {
        name: _in_source_units(_of_each_image(name, moments, len(images)), source[name])
        for name, moments in calls.items()
    }


def _batches(network: Network, pictures: Unlabelled, chosen: Tensor) -> Iterator[Tensor]:
    """The chosen images in batches of one size, as large as memory allows."""
    waiting: list[Tensor] = []
    room = AT_ONCE
    for index in progress.track(chosen.split(1), "images"):
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

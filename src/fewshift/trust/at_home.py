"""Under which preprocessing is a network at home? The first BatchNorm layer remembers it.

A wrong mean or deviation moves what enters the first layer by many deviations, and another one puts it back. So where
the first layer's shift is absurd, the usual preprocessings are tried on the same pixels. A shift of the place hides
related scales; there labels help: one that is somewhat closer, and makes them clearly likelier, is named too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewshift.core.distance import TINY
from fewshift.core.hooks import before
from fewshift.core.losses import log_losses
from fewshift.core.moments import source_layers
from fewshift.core.network import Network, batchnorm, like, logits_of
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.trust.gain import standard_error

LOOKED_AT = 32  # images
# Distances of the first layer, measured on digits and PACS. The right preprocessing: 0.1 to 0.8, sketches 1.2, inverted
# digits 1.9. A wrong one: 0.6 to 2 for a related scale, 2 to 5 and more for another unit.
FAR = 0.6  # at least, to be looked into
AT_HOME = 0.4  # at most
BEYOND = 2.5  # no shift of the place is this large: the best of the usual ones is named, at home or not
CLOSER = 2.5  # times as close, at least
TIED = 1.25  # times the distance of the best: named beside it
NEARER = 1.25  # times as close, where labels are likelier: the right preprocessing was always the closest or nearly so
SURE = 2.6  # standard errors by which labels are likelier: chance does that once in 200 times

Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel

USUAL: Mapping[str, Scale] = {
    "ImageNet's": (IMAGENET.mean, IMAGENET.std),
    "values from -1 to 1": ((0.5,) * 3, (0.5,) * 3),
    "values from 0 to 1": ((0.0,) * 3, (1.0,) * 3),
    "values from 0 to 255": ((0.0,) * 3, (1 / 255,) * 3),
    "values from 0 to 255 less ImageNet's mean": (IMAGENET.mean, (1 / 255,) * 3),
}
USUAL_GREY: Mapping[str, Scale] = {
    "MNIST's": ((0.1307,), (0.3081,)),
    **{name: (mean[:1], std[:1]) for name, (mean, std) in USUAL.items()},
}
OWN = "its card's"


@dataclass(frozen=True)
class Home:
    """A preprocessing under which the first layer sees what it remembers."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    backwards: bool  # channels from blue to red
    distance: float


@dataclass(frozen=True)
class Homes:
    """The preprocessings that suit a network far better than the one its images had, the best first."""

    distance: float  # of the images as they came
    better: tuple[Home, ...]


def find_homes(
    network: Network,
    images: Sequence[Tensor],
    steps: Preprocess | None,
    own: Preprocess | None,
    labels: Tensor | None = None,
) -> Homes | None:
    """The usual preprocessings that suit the network far better than the one these images had; None if none does.

    `steps` made the images; None guesses them from the values. `own` is what the network's card says. `labels` are
    class numbers of the images.
    """
    pixels = _pixels(images, steps)
    if pixels is None or not network.layers or batchnorm(network.model, network.layers[0].name).running_mean is None:
        return None
    distance = _first_layer(network, images)
    if distance < FAR:
        return None
    homes = sorted(_tried(network, pixels, own), key=lambda home: home.distance)
    if not homes or NEARER * homes[0].distance > distance:
        return None
    absurd = CLOSER * homes[0].distance <= distance and (homes[0].distance <= AT_HOME or distance >= BEYOND)
    if not absurd and (labels is None or _likelier(network, images, _in(homes[0], pixels), labels) < SURE):
        return None
    tied = [home for home in homes if home.distance <= TIED * homes[0].distance]
    forwards = {home.name for home in tied if not home.backwards}
    tied = [home for home in tied if not (home.backwards and home.name in forwards)]
    tied.sort(key=lambda home: (home.name != OWN, home.backwards))  # of tied ones, what is more likely first
    return Homes(distance, tuple(tied))


def _in(home: Home, pixels: Sequence[Tensor]) -> list[Tensor]:
    return _scaled(pixels, (home.mean, home.std), home.backwards)


@torch.no_grad()
def _likelier(network: Network, images: Sequence[Tensor], others: Sequence[Tensor], labels: Tensor) -> float:
    """By how many standard errors the labels are likelier with the other images, each under its best temperature."""
    before, after = (
        log_losses(torch.cat([_logits(network, image) for image in some]).double().cpu(), labels.cpu())
        for some in (images, others)
    )
    change = before - after
    if not torch.isfinite(change).all():
        return 0.0
    return float(change.mean()) / max(standard_error(change), TINY)


def _logits(network: Network, image: Tensor) -> Tensor:
    return logits_of(network.model(like(network.model, image[None])))


def _tried(network: Network, pixels: Sequence[Tensor], own: Preprocess | None) -> Iterator[Home]:
    channels = len(pixels[0])
    usual = dict({1: USUAL_GREY, 3: USUAL}.get(channels, {}))
    if own is not None and own.channels == channels:
        same = [name for name, scale in usual.items() if scale == (own.mean, own.std)]
        usual = {OWN: (own.mean, own.std), **{name: usual[name] for name in usual if name not in same}}
    for name, scale in usual.items():
        for backwards in (False, True) if channels == 3 else (False,):
            distance = _first_layer(network, _scaled(pixels, scale, backwards))
            yield Home(name, *scale, backwards, distance)


class _EnoughError(Exception):
    """The first layer has seen an image; the others need not."""


@torch.no_grad()
def _first_layer(network: Network, images: Sequence[Tensor]) -> float:
    """How far the first layer is from what it remembers: shift of the mean and logarithm of the ratio of deviations.

    The mean is in source deviations, root mean square over channels; the logarithm is an average over channels.
    """
    name = network.layers[0].name
    source = source_layers(network)[name]
    inputs: list[Tensor] = []

    def note(_: nn.Module, entering: Tensor) -> None:
        inputs.append(entering.transpose(0, 1).flatten(1))
        raise _EnoughError

    with before(batchnorm(network.model, name), note):
        alike = len({image.shape for image in images}) == 1
        for batch in [torch.stack(list(images))] if alike else [image[None] for image in images]:
            with suppress(_EnoughError):
                network.model(like(network.model, batch))
    seen = torch.cat(inputs, 1).double()
    mean, std = source.normal.mean.double(), source.normal.std.double().clamp(min=TINY)
    shift = (seen.mean(1) - mean) / std
    # with eps: a channel that never varied in training need not vary here
    ratio = ((seen.var(1, correction=0) + source.eps).sqrt() / std).clamp(min=TINY)
    return math.hypot(float(shift.square().mean().sqrt()), float(ratio.log().mean()))


def _pixels(images: Sequence[Tensor], steps: Preprocess | None) -> list[Tensor] | None:
    """The images in [0, 1]; None where nothing says how they were made."""
    if steps is not None:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (steps.mean, steps.std))
        return [image.cpu() * std + mean for image in images]
    low, high = min(float(image.min()) for image in images), max(float(image.max()) for image in images)
    if low < 0 or high > 255:
        return None
    return [image.cpu() / (1 if high <= 1 else 255) for image in images]


def _scaled(pixels: Sequence[Tensor], scale: Scale, backwards: bool) -> list[Tensor]:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in scale)
    return [((picture.flip(0) if backwards else picture) - mean) / std for picture in pixels]

"""The first stage of `blend` and of what is built on it: how much of the target's statistics to take.

The paper chooses v by the loss of the very images whose statistics are blended in, and those flatter themselves. Here
each image is normalised with the statistics of the others. Its label is then as likely as that of a new image, up to
the choice of the one number v.

The statistics of a few images differ from the source's by chance alone. James and Stein (1961) say what they are worth:
of a distance of s sampling errors, the share 1 - 1/s^2 is more than chance. v goes no farther than that, and stays at 0
where images look like the source's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.adaptable import refuse_unmergeable
from fewshift.core.distance import look, measured, score
from fewshift.core.draws import others
from fewshift.core.losses import log_losses
from fewshift.core.moments import merged, source_layers
from fewshift.core.network import Network, like
from fewshift.core.reading import Reading, read_support, tied
from fewshift.core.source_layer import Normal
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.errors import FewshiftError, NotFiniteError

GRID = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
CENTRE = 0.2  # where v lies most often
BESIDE = 256  # unlabelled images that share in the statistics, at most


@dataclass(frozen=True)
class Apart:
    """What the network answers under one v, each image normalised without itself."""

    logits: Sequence[Tensor] | None  # of each image; those of pixels are too many to keep for every v
    losses: Tensor | None  # (N,): of each image, where its logits are not kept

    @classmethod
    def of(cls, support: Support, logits: Sequence[Tensor]) -> Apart:
        """Keep what the choice of v needs."""
        if support.kind.centroids:
            return cls(logits, None)
        pairs = zip(logits, support.labels, strict=True)
        return cls(None, torch.cat([support.kind.losses(answer, label[None]) for answer, label in pairs]))

    def loss(self, support: Support, rows: Tensor) -> float:
        """The mean loss of the images in these rows; image labels under the best temperature for them."""
        if self.losses is not None:
            return float(self.losses[rows.to(self.losses.device)].double().mean())
        assert self.logits is not None
        answers = torch.cat([self.logits[row] for row in rows.tolist()])
        return float(log_losses(answers.cpu(), support.targets[rows].cpu()).mean())


@dataclass(frozen=True)
class Blended:
    """What the search for v found, and with what it worked."""

    network: Network  # to merge into
    working: Network  # to adapt with, in float32 or more, channels last
    scratch: nn.Module  # a copy of it, to read with
    support: Support  # likewise
    beside: Tensor | None  # unlabelled images that share in the statistics
    prior: float  # in nats, with which v was chosen
    reach: float  # the largest v that so few images are worth
    v: float
    curve: Sequence[Mapping[str, float]]
    apart: Mapping[float, Apart]  # by v
    features_apart: Tensor | None  # (N, features) of the support, likewise, under v
    reading: Reading  # of all images together, under v

    @property
    def bounded(self) -> bool:
        """Whether v goes no farther than the statistics are worth; where that is unknown, it may go all the way."""
        return self.reach < 1

    @property
    def normals(self) -> dict[str, Normal]:
        """The statistics of the blend."""
        return normals_of(self.working, self.reading, self.v)

    @property
    def model(self) -> nn.Module:
        """The source network with the blend, in the type to adapt with."""
        return self.working.with_tensors(merged(self.working, self.normals))

    @property
    def features(self) -> Tensor | None:
        """(N, features) of the support under the blend."""
        features = self.reading.features
        return None if features is None else features[: len(self.support)]

    @property
    def features_beside(self) -> Tensor | None:
        """(M, features) of the unlabelled images under the blend."""
        features = self.reading.features
        return None if features is None or self.beside is None else features[len(self.support) :]

    def held_out(self, folds: Sequence[Tensor]) -> list[Tensor]:
        """For each image, its logits apart under the v that the images of other folds choose."""
        answers: list[Tensor] = [torch.empty(0)] * len(self.support)
        logits: dict[float, Sequence[Tensor]] = {}
        for fold in folds:
            rest = others(fold, len(self.support))
            v = _best(_curve(self.apart, self.support, rest), self.prior, self.reach, len(rest))
            if v not in logits:
                logits[v] = self._logits_apart(v)
            for place in fold.tolist():
                answers[place] = logits[v][place]
        return answers

    def _logits_apart(self, v: float) -> Sequence[Tensor]:
        kept = self.apart[v].logits
        if kept is not None:
            return kept
        blend = tied(self.working, v)
        reading = read_support(
            self.working, self.support, blend, beside=self.beside, leave_out=True, working=self.scratch
        )
        return _by_image(reading.logits)[: len(self.support)]

    def without(self, fold: Tensor) -> tuple[Support, nn.Module, Reading]:
        """The other images, the network with their blend, and their reading under it."""
        kept = self.support.part(others(fold, len(self.support)))
        blend = tied(self.working, self.v)
        reading = read_support(self.working, kept, blend, beside=self.beside, working=self.scratch)
        tensors = merged(self.working, normals_of(self.working, reading, self.v))
        return kept, self.working.with_tensors(tensors), reading

    def layer_notes(self) -> dict[str, dict[str, Any]]:
        """Per layer: how far the target's statistics are from the source's."""
        source, notes = source_layers(self.working), {}
        for name, seen in self.reading.moments.items():
            mine, target = source[name].normal, seen.normal(source[name].eps)
            notes[name] = {
                "mean_shift": float(((target.mean - mine.mean) / mine.std).square().mean().sqrt()),
                "std_ratio": float((target.std / mine.std).log().mean().exp()),
            }
        return notes

    def notes(self) -> dict[str, Any]:
        """For the result."""
        grid = [dict(point) for point in self.curve]
        return {"v": self.v, "reach": self.reach, "grid": grid, "statistics": self.reading.route}


def blended(network: nn.Module | Network, target: Target, who: str, prior: float) -> Blended:
    """Choose v by the labels of the support, each image normalised without itself; then read all images under it.

    v is a share of what the statistics are worth, from 0 to all of it. `prior` is what both ends cost, in nats, against
    the share 0.2. It decides where a few images say nothing, and gives way to many. With pixel labels every image is
    evidence enough.
    """
    if torch.is_inference_mode_enabled():
        raise FewshiftError("adaptation needs gradients: call it outside torch.inference_mode()")
    network = Network.of(network, target.some_images(who, "support images"))
    refuse_unmergeable(network)
    support = target.need_support(who).checked(network.output)
    working = replace(network, model=_in_float32(network))
    scratch = working.copy()
    support = support.prepared(working.laid_out)
    beside = None if target.unlabelled is None else _beside(working, support, target.unlabelled)
    prior = prior if support.kind.centroids else 0.0
    alone = len(support) + (0 if beside is None else len(beside)) < 2
    reach = 0.0 if alone else _reach(working, support, beside)
    apart: dict[float, Apart] = {}
    features: dict[float, Tensor | None] = {}
    for v in progress.track(sorted({share * reach for share in GRID}), "statistics"):
        try:
            reading = read_support(
                working, support, tied(working, v), beside=beside, leave_out=not alone, working=scratch
            )
        except NotFiniteError:
            if v == 0:
                raise
            continue  # this blend is none
        apart[v] = Apart.of(support, _by_image(reading.logits)[: len(support)])
        features[v] = None if reading.features is None else reading.features[: len(support)]
        del reading  # its logits may be large
    curve = _curve(apart, support, torch.arange(len(support)))
    if not curve:
        raise FewshiftError("the network's logits are not finite: check the images' preprocessing")
    v = _best(curve, prior, reach, len(support))
    reading = read_support(working, support, tied(working, v), beside=beside, working=scratch)
    return Blended(network, working, scratch, support, beside, prior, reach, v, curve, apart, features[v], reading)


def normals_of(network: Network, reading: Reading, v: float) -> dict[str, Normal]:
    """The statistics that each layer uses in a reading."""
    source = source_layers(network)
    return {name: source[name].blend(seen.normal(source[name].eps), v) for name, seen in reading.moments.items()}


def _curve(apart: Mapping[float, Apart], support: Support, rows: Tensor) -> list[dict[str, float]]:
    """For each v, the mean loss of the images in these rows."""
    points = [{"v": v, "loss": answers.loss(support, rows)} for v, answers in apart.items()]
    return [point for point in points if math.isfinite(point["loss"])]


def _best(curve: Sequence[Mapping[str, float]], prior: float, reach: float, images: int) -> float:
    """The v of the least loss and prior together; of equally good ones the smallest."""

    def cost(point: Mapping[str, float]) -> float:
        share = point["v"] / reach if reach else 0.0
        away = (share - CENTRE) / (1 - CENTRE if share > CENTRE else CENTRE)
        return images * point["loss"] + prior * away**2

    return min(curve, key=cost)["v"]


def _reach(network: Network, support: Support, beside: Tensor | None) -> float:
    """1 - 1/s^2, if the statistics are s sampling errors from the source's; pixel labels can do without.

    1 where layers see images in parts, and so cannot tell.
    """
    if not support.kind.centroids:
        return 1.0
    images = support.images if beside is None else [*support.images, *beside]
    try:
        with progress.silent():
            seen = look(network.model, Unlabelled(images), network.head, len(images))
    except FewshiftError:
        return 1.0
    away = score(map(measured, seen.values()))
    return max(0.0, 1 - 1 / max(away, 1.0) ** 2)


def _beside(network: Network, support: Support, unlabelled: Unlabelled) -> Tensor | None:
    """Unlabelled images, evenly spread, if they can go into one batch with the support."""
    places = torch.linspace(0, len(unlabelled) - 1, min(BESIDE, len(unlabelled))).round().long()
    images = network.laid_out(unlabelled.batch(places))
    alike = isinstance(support.images, Tensor) and images.shape[1:] == support.images.shape[1:]
    return images if alike else None


def _by_image(logits: Sequence[Tensor]) -> list[Tensor]:
    return [row for part in logits for row in part.split(1)]


def _in_float32(network: Network) -> nn.Module:
    model = network.with_tensors({}).requires_grad_(False)
    narrow = like(model, torch.empty(0)).dtype.itemsize < 4
    return network.with_layout(model.float() if narrow else model)

"""What LCCS is made of: the search for its start, what its stages hand to each other, and its two readings.

The start is one number v for all layers, or one for each, between source and support statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fewshift.core import _progress as progress
from fewshift.core.averages import read_by_ema
from fewshift.core.loop import Course
from fewshift.core.losses import Loss
from fewshift.core.moments import Moments, normalised, source_layers
from fewshift.core.network import Network, logits_of
from fewshift.core.reading import Blend, read_support, tied
from fewshift.core.source_layer import Normal
from fewshift.core.spans import Span
from fewshift.core.support import Support
from fewshift.errors import FewshiftError

EMA = "minibatches, exponential average"
Try = Callable[[Blend], "Start"]


@dataclass(frozen=True)
class Start:
    """A blend, its loss on the support, and what the layers saw if the whole support was passed."""

    blend: Blend
    loss: float = float("nan")
    moments: dict[str, Moments] | None = None
    curve: list[dict[str, float]] = field(default_factory=list)
    route: str | None = None  # how the images passed

    @property
    def v(self) -> float | dict[str, float]:
        """The common weight of the support's statistics, or that of each layer."""
        values = set(self.blend.values())
        return values.pop() if len(values) == 1 else dict(self.blend)


def exactly(network: Network, support: Support, loss: Loss) -> Try:
    """Try a blend by one pass over the whole support."""

    def attempt(blend: Blend) -> Start:
        reading = read_support(network, support, blend)
        return Start(blend, support.loss_of(loss, reading.logits), reading.moments, route=reading.route)

    return attempt


def apart(network: Network, support: Support, loss: Loss) -> Try:
    """Try a blend by one pass in which each image is normalised with the statistics of the others."""

    def attempt(blend: Blend) -> Start:
        reading = read_support(network, support, blend, leave_out=True)
        return Start(blend, support.loss_of(loss, reading.logits), route=f"{reading.route}, each image left out")

    return attempt


def by_average(network: Network, support: Support, loss: Loss, size: int, views: Callable[[], Iterable[Tensor]]) -> Try:
    """Try a blend by minibatches of random views, whose statistics are averaged, and a look at the plain support."""

    def attempt(blend: Blend) -> Start:
        estimates = read_by_ema(network, views(), blend)
        source = source_layers(network)
        held = {name: source[name].blend(estimate, blend[name]) for name, estimate in estimates.items()}
        with torch.no_grad():
            model = normalised(network, held)
            answers = [logits_of(model(images)) for images, _ in support.chunks(size)]
        return Start(blend, support.loss_of(loss, answers), route=EMA)

    return attempt


def best_common(network: Network, attempt: Try, grid: int) -> Start:
    """The v with the lowest loss of `grid` values from 0 to 1, the same in all layers."""
    curve = []

    def tried(v: float) -> Start:
        start = attempt(tied(network, v))
        curve.append({"v": v, "loss": start.loss})
        return start

    best = _best(tried(v) for v in progress.track(_values(grid), "initialisation"))
    return replace(best, curve=curve)


def best_by_layer(network: Network, attempt: Try, grid: int) -> Start:
    """The v with the lowest loss, layer by layer; later layers stay at the source until it is their turn."""
    best = Start(tied(network, 0.0))
    for layer in progress.track(network.layers, "initialisation, layer by layer"):
        blends = [{**best.blend, layer.name: v} for v in _values(grid)]
        best = _best(map(attempt, blends))
    return best


def _values(grid: int) -> list[float]:
    return [step / (grid - 1) for step in range(grid)]


def _best(starts: Iterable[Start]) -> Start:
    """The start with the lowest loss; of equally good ones the last, which has the largest v; never a NaN."""
    known = ((start.loss, -place, start) for place, start in enumerate(starts) if start.loss == start.loss)
    best = min(known, key=lambda rated: rated[:2], default=None)
    if best is None:
        raise FewshiftError("the loss is NaN for every blend of statistics: check the images' preprocessing")
    return best[2]


@dataclass(frozen=True)
class Learned:
    """What the gradient stage found."""

    normals: dict[str, Normal]
    coefficients: dict[str, dict[str, list[float]]]
    course: Course
    steps: int
    parameters: int


@dataclass(frozen=True)
class Stages:
    """What the first three stages found, and with what they worked."""

    network: Network  # to merge into
    working: Network  # to adapt with: in the layout and type that adaptation computes in
    support: Support  # likewise
    loss: Loss
    seed: int
    start: Start
    spans: dict[str, Span]
    learned: Learned

    def layer_notes(self) -> dict[str, dict[str, Any]]:
        """Per layer: coefficients, effective n, the smallest sigma, and how far the support is from the source."""
        notes = {}
        for name, span in self.spans.items():
            mean, std = span.mean.T, span.std.T
            notes[name] = {
                **self.learned.coefficients[name],
                "n": [len(mean) - 1, len(std) - 1],
                "min_sigma": float(self.learned.normals[name].std.min()),
                "mean_shift": float(((mean[1] - mean[0]) / std[0]).square().mean().sqrt()),
                "std_ratio": float((std[1] / std[0]).log().mean().exp()),
            }
        return notes


@dataclass(frozen=True)
class Variant:
    """Where the paper, read correctly, and the authors' released code differ."""

    steps: Literal["every minibatch", "last minibatch"]  # of an epoch, on which the optimiser takes a step
    drop_last: bool  # an incomplete minibatch is left out
    stale: bool  # inference uses the statistics from before the last step
    borrow_scale: bool  # the directions of sigma are scaled by the singular values of the means
    guard: bool  # layers that see one position per image, or reach sigma <= 0, are taken care of
    double: bool  # adaptation runs in float64


VARIANTS = {
    "paper": Variant("every minibatch", False, stale=False, borrow_scale=False, guard=True, double=False),
    "released": Variant("last minibatch", True, stale=True, borrow_scale=True, guard=False, double=True),
}

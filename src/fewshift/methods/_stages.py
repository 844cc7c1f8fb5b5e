"""What the stages of LCCS hand to each other, and its two readings: the paper's and the released code's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fewshift.core.loop import Course
from fewshift.core.losses import Loss
from fewshift.core.moments import Normal
from fewshift.core.network import Network
from fewshift.core.spans import Span
from fewshift.core.support import Support
from fewshift.methods._blend import Start


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

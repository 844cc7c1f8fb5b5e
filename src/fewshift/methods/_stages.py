"""What the stages of LCCS hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

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
class Classifier:
    """The head's tensors where they are not the source's, and the losses of its training."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

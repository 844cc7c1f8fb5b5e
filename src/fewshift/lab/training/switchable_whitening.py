"""Switchable Whitening: shallow features whitened by the batch, by the image, or by something in between.

Pan et al., "Switchable Whitening for Deep Representation Learning", ICCV 2019; placed as in the comparison that the
paper quotes (Choi et al., CVPR 2021). Statistics are mixed, not whitening matrices, and how much of each is learned,
for means and for covariances apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewshift.lab.training.algorithm import Algorithm
from fewshift.models.layers.changes import SwitchableWhiteningChange


@dataclass(frozen=True)
class SwitchableWhitening(SwitchableWhiteningChange, Algorithm):
    """Whitens by statistics of batch and image, mixed; short trainings want a decay of less than 0.99."""

    name: ClassVar[str] = "switchable-whitening"
    paper: ClassVar[str] = "Pan et al., ICCV 2019"

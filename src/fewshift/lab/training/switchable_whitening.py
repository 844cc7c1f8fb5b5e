"""Switchable Whitening: shallow features whitened by the batch, by the image, or by something in between.

Pan et al., "Switchable Whitening for Deep Representation Learning", ICCV 2019; placed as in the comparison that the
paper quotes (Choi et al., CVPR 2021). Statistics are mixed, not whitening matrices, and how much of each is learned,
for means and for covariances apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewshift.core import normalisation
from fewshift.lab.training.whitening import WhiteningAlgorithm


@dataclass(frozen=True)
class SwitchableWhitening(WhiteningAlgorithm):
    """Whitens by statistics of batch and image, mixed; short trainings want a decay of less than 0.99.

    - tied: one mixture for means and covariances.
    """

    name: ClassVar[str] = "switchable-whitening"
    paper: ClassVar[str] = "Pan et al., ICCV 2019"

    decay: float = 0.99
    tied: bool = False

    def layer(self, channels: int) -> normalisation.Whitening:
        """A layer of this kind."""
        return normalisation.SwitchableWhitening(channels, self.group, self.iterations, self.decay, self.tied)

"""IterNorm: shallow features whitened by the batch.

Huang et al., "Iterative Normalization: Beyond Standardization towards Efficient Whitening", CVPR 2019. The whitening
matrix is found by a few of Newton's iterations. Where the layers stand in the comparison that the paper quotes was
never published: here they stand where those of the other whitening methods do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewshift.core import normalisation
from fewshift.lab.training.whitening import WhiteningAlgorithm


@dataclass(frozen=True)
class IterNorm(WhiteningAlgorithm):
    """Whitens by the batch, at test by the running matrix."""

    name: ClassVar[str] = "iternorm"
    paper: ClassVar[str] = "Huang et al., CVPR 2019"

    group: int = 64

    def layer(self, channels: int) -> normalisation.Whitening:
        """A layer of this kind."""
        return normalisation.IterNorm(channels, self.group, self.iterations, self.decay)

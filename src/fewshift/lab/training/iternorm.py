"""IterNorm: shallow features whitened by the batch.

Huang et al., "Iterative Normalization: Beyond Standardization towards Efficient Whitening", CVPR 2019. The whitening
matrix is found by a few of Newton's iterations. Where the layers stand in the comparison that the paper quotes was
never published: here they stand where those of the other whitening methods do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewshift.lab.training.algorithm import Algorithm
from fewshift.models.layers.changes import IterNormChange


@dataclass(frozen=True)
class IterNorm(IterNormChange, Algorithm):
    """Whitens by the batch, at test by the running matrix."""

    name: ClassVar[str] = "iternorm"
    paper: ClassVar[str] = "Huang et al., CVPR 2019"

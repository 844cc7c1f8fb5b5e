"""alpha-BN: a fixed blend of the source's statistics and those of each test batch.

You, Li and Zhao, "Test-time Batch Statistics Calibration for Covariate Shift", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewshift.core.moments import Moments
from fewshift.core.source_layer import Normal, SourceLayer
from fewshift.errors import FewshiftError
from fewshift.methods._streaming import BatchStatistics, weighted


@dataclass(frozen=True)
class AlphaBN(BatchStatistics):
    """alpha source + (1 - alpha) batch, on means and on variances, for any batch size."""

    name: ClassVar[str] = "alpha-bn"
    paper: ClassVar[str] = "You et al., 2021"
    verified: ClassVar[str] = (
        "`tests/methods/test_statistics_naive.py`: every answer of a stream, against the formulas, to 1e-9"
    )

    alpha: float = 0.9

    def check(self) -> None:
        """A blend in [0, 1]."""
        if not 0 <= self.alpha <= 1:
            raise FewshiftError(f"alpha={self.alpha} is not a blend: give a number from 0 (batch) to 1 (source)")

    def normal(self, source: SourceLayer, seen: Moments) -> Normal:
        """The blend."""
        return weighted(source, self.alpha, seen.pooled_mean, seen.pooled_var, 1 - self.alpha)

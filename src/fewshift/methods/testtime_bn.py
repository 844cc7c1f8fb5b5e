"""Test-time BN: normalise every test batch with its own statistics.

Nado et al., "Evaluating Prediction-Time Batch Normalization for Robustness under Covariate Shift", 2020.
Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation", NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewshift.core.moments import Moments
from fewshift.core.source_layer import Normal, SourceLayer
from fewshift.methods._streaming import BatchStatistics, weighted


@dataclass(frozen=True)
class TestTimeBN(BatchStatistics):
    """Batch statistics, alone or together with the source's as if those came from `prior` images.

    With prior = 0 (Nado) the biased variance of the batch is used, as in a training step. With prior = N > 0
    (Schneider) mean and *variance* are weighted N : batch size, with the batch's unbiased variance.
    """

    __test__ = False  # pytest would take it for a test

    name: ClassVar[str] = "testtime-bn"
    paper: ClassVar[str] = "Nado et al., 2020; Schneider et al., NeurIPS 2020"
    verified: ClassVar[str] = (
        "`tests/methods/test_statistics_naive.py`: every answer of a stream, against the formulas, to 1e-9"
    )

    prior: float = 0.0

    def normal(self, source: SourceLayer, seen: Moments) -> Normal:
        """The batch's own statistics, or the weighted ones."""
        if self.prior == 0:
            return seen.normal(source.eps)
        count = len(seen.mean)
        old, new = self.prior / (self.prior + count), count / (self.prior + count)
        return weighted(source, old, seen.pooled_mean, seen.unbiased_var, new)

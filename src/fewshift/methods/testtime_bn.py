"""Test-time BN: normalise every test batch with its own statistics.

Nado et al., "Evaluating Prediction-Time Batch Normalization for Robustness under Covariate Shift", 2020.
Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation", NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.moments import Moments, Normal, SourceLayer
from fewshift.core.network import Network, refuse_unadaptable
from fewshift.core.support import Target
from fewshift.methods._streaming import BatchNormalised


@dataclass(frozen=True)
class TestTimeBN(Method):
    """Batch statistics, alone or together with the source's as if those came from `prior` images.

    With prior = 0 (Nado) the biased variance of the batch is used, as in a training step. With prior = N > 0
    (Schneider) mean and *variance* are weighted N : batch size, with the batch's unbiased variance.
    """

    __test__ = False  # pytest would take it for a test

    name: ClassVar[str] = "testtime-bn"
    paper: ClassVar[str] = "Nado et al., 2020; Schneider et al., NeurIPS 2020"
    needs: ClassVar[Needs] = Needs.STREAM
    changes: ClassVar[str] = "nothing that stays: statistics follow each batch"
    returns: ClassVar[str] = "streaming predictor"

    prior: float = 0.0

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """A predictor that estimates statistics anew on every batch."""
        network = Network.of(network, target.some_images(self.name, "a stream of batches"))
        refuse_unadaptable(network)
        return Fitted(BatchNormalised(network, self._normal))

    def _normal(self, source: SourceLayer, seen: Moments) -> Normal:
        if self.prior == 0:
            return seen.normal(source.eps)
        old, new = self.prior / (self.prior + len(seen.mean)), len(seen.mean) / (self.prior + len(seen.mean))
        mean = old * source.normal.mean + new * seen.pooled_mean
        var = old * (source.normal.std.square() - source.eps) + new * seen.unbiased_var
        return Normal(mean, (var + source.eps).sqrt())

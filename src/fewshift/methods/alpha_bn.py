"""alpha-BN: a fixed blend of the source's statistics and those of each test batch.

You, Li and Zhao, "Test-time Batch Statistics Calibration for Covariate Shift", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.moments import Moments, Normal, SourceLayer
from fewshift.core.network import Network, refuse_unadaptable
from fewshift.core.support import Target
from fewshift.errors import FewshiftError
from fewshift.methods._streaming import BatchNormalised


@dataclass(frozen=True)
class AlphaBN(Method):
    """alpha source + (1 - alpha) batch, on means and on variances, for any batch size."""

    name: ClassVar[str] = "alpha-bn"
    paper: ClassVar[str] = "You et al., 2021"
    needs: ClassVar[Needs] = Needs.STREAM
    changes: ClassVar[str] = "nothing that stays: statistics follow each batch"
    returns: ClassVar[str] = "streaming predictor"

    alpha: float = 0.9

    def check(self) -> None:
        """A blend in [0, 1]."""
        if not 0 <= self.alpha <= 1:
            raise FewshiftError(f"alpha={self.alpha} is not a blend: give a number from 0 (batch) to 1 (source)")

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """A predictor that blends in the statistics of every batch."""
        network = Network.of(network, target.some_images(self.name, "a stream of batches"))
        refuse_unadaptable(network)
        return Fitted(BatchNormalised(network, self._normal))

    def _normal(self, source: SourceLayer, seen: Moments) -> Normal:
        mean = self.alpha * source.normal.mean + (1 - self.alpha) * seen.pooled_mean
        var = self.alpha * (source.normal.std.square() - source.eps) + (1 - self.alpha) * seen.pooled_var
        return Normal(mean, (var + source.eps).sqrt())

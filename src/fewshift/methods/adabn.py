"""AdaBN: the target's own BatchNorm statistics in place of the source's.

Li et al., "Revisiting Batch Normalization for Practical Domain Adaptation", 2016.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fewshift.core.adaptable import refuse_unmergeable
from fewshift.core.averages import averaged_over_batches, pooled_exactly
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.moments import merged, source_layers
from fewshift.core.network import Network, like
from fewshift.core.randomness import checked_seed, minibatches
from fewshift.core.reading import read_support, tied
from fewshift.core.source_layer import Normal
from fewshift.core.support import Target, Unlabelled
from fewshift.errors import FewshiftError


@dataclass(frozen=True)
class AdaBN(Method):
    """Statistics of all unlabelled images if there are any, of the support otherwise; labels are ignored.

    - exact: pooled over all images; each layer sees what the new statistics below it produce. Unlabelled images cost
      one partial pass per layer.
    - cumulative: one pass in batches, each normalised with its own statistics; the result is their plain average.
    - ema: the same with an exponential average that starts at the first batch.
    - auto: exact for a support, cumulative for unlabelled images, which pass in a random order drawn from the seed.
    """

    name: ClassVar[str] = "adabn"
    paper: ClassVar[str] = "Li et al., 2016"
    needs: ClassVar[Needs] = Needs.EITHER
    changes: ClassVar[str] = "BatchNorm weight and bias (statistics where a layer has none)"
    verified: ClassVar[str] = (
        "`tests/methods/test_statistics_naive.py`: the answers of the network under each kind of statistics, "
        "against the formulas, to 1e-9"
    )

    statistics: str = "auto"
    batch_size: int = 128
    momentum: float = 0.1

    def check(self) -> None:
        """Known statistics, and a momentum in (0, 1]."""
        self.one_of(statistics=("auto", "exact", "cumulative", "ema"))
        self.at_least(batch_size=1)
        if not 0 < self.momentum <= 1:
            raise FewshiftError(f"momentum={self.momentum} is not a weight of a batch: give more than 0 and at most 1")

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """The network with the target's statistics."""
        network = Network.of(network, target.some_images(self.name, "support or unlabelled images"))
        refuse_unmergeable(network)
        if target.unlabelled is not None:
            normals = self._of_many(network, target.unlabelled, seed)
        else:
            support = target.need_support(self.name).prepared(lambda images: like(network.model, images))
            if self.statistics in ("auto", "exact"):
                source, seen = source_layers(network), read_support(network, support, tied(network, 1.0))
                normals = {name: moments.normal(source[name].eps) for name, moments in seen.moments.items()}
                return Fitted(network.with_tensors(merged(network, normals)), notes={"statistics": seen.route})
            normals = self._of_many(network, Unlabelled(support.pictures), seed)
        return Fitted(network.with_tensors(merged(network, normals)))

    def _of_many(self, network: Network, unlabelled: Unlabelled, seed: int) -> dict[str, Normal]:
        # a single leftover image must not weigh as much as a batch: it joins the batch before
        order = minibatches(
            len(unlabelled), self.batch_size, torch.Generator().manual_seed(checked_seed(seed)), at_least=2
        )

        def batches() -> Iterator[Tensor]:
            return (like(network.model, unlabelled.batch(indices)) for indices in order)

        if self.statistics == "exact":
            return pooled_exactly(network, batches)
        weight = (lambda _: self.momentum) if self.statistics == "ema" else (lambda step: 1 / (step + 1))
        return averaged_over_batches(network, batches(), weight)

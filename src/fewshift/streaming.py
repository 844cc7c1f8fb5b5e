"""Streaming predictors: networks that adapt while they predict, from the batches they are given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fewshift.network import Network, logits_of
from fewshift.statistics import Moments, Normal, SourceLayer, normalising, source_layers

BatchRule = Callable[[SourceLayer, Moments], Normal]


class BatchNormalised(nn.Module):
    """A network whose BatchNorm layers normalise each batch with what `rule` makes of its statistics.

    Nothing is kept from one batch to the next. Predictions depend on batch mates; a batch of one image works, and a
    layer that then sees a single position per channel normalises it to its bias.
    """

    def __init__(self, network: Network, rule: BatchRule) -> None:
        super().__init__()
        self.source = network.with_tensors({})
        self.working = network.copy()
        self._network, self._rule = network, rule

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits of this batch under its own statistics."""
        layers = source_layers(self._network, self.source)
        with normalising(self._network, self.working, layers, lambda name, seen: self._rule(layers[name], seen)):
            return logits_of(self.working(images))

    def train(self, mode: bool = True) -> BatchNormalised:
        """Stays in evaluation mode: the statistics follow the batches by themselves, and dropout must not."""
        del mode
        return super().train(False)

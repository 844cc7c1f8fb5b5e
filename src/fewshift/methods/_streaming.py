"""Streaming predictors: networks that adapt to each batch while they predict it."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core.adaptable import refuse_unadaptable
from fewshift.core.hooks import before
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.moments import Moments, normalising, source_layers
from fewshift.core.network import Network, batchnorm, logits_of
from fewshift.core.source_layer import Normal, SourceLayer
from fewshift.core.support import Target
from fewshift.errors import FewshiftError

BatchRule = Callable[[SourceLayer, Moments], Normal]


@dataclass(frozen=True)
class BatchStatistics(Method):
    """A method whose predictor normalises every batch with statistics made from the source's and the batch's own."""

    needs: ClassVar[Needs] = Needs.STREAM
    changes: ClassVar[str] = "nothing that stays: statistics follow each batch"
    returns: ClassVar[str] = "streaming predictor"

    @abc.abstractmethod
    def normal(self, source: SourceLayer, seen: Moments) -> Normal:
        """What a layer normalises a batch with."""

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """A predictor that follows its batches."""
        network = Network.of(network, target.some_images(self.name, "a stream of batches"))
        refuse_unadaptable(network)
        return Fitted(BatchNormalised(network, self.normal))


def weighted(source: SourceLayer, old: float, mean: Tensor, var: Tensor, new: float) -> Normal:
    """old source + new batch, on means and on variances."""
    mean = old * source.normal.mean + new * mean
    var = old * (source.normal.std.square() - source.eps) + new * var
    return Normal(mean, (var + source.eps).sqrt())


class BatchNormalised(nn.Module):
    """A network whose BatchNorm layers normalise each batch with `rule(source, statistics of the batch)`.

    Nothing is kept from one batch to the next. Predictions depend on batch mates. A batch of one image works; a layer
    that then sees a single position per channel outputs its bias.
    """

    def __init__(self, network: Network, rule: BatchRule) -> None:
        super().__init__()
        self.source = network.with_tensors({})
        self.working = copy.deepcopy(network.copy())  # shares nothing with the source network
        self._network, self._rule = network, rule
        self.eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits of this batch under its own statistics."""
        refuse_empty(images)
        layers = source_layers(self._network, self.source)
        with normalising(self._network, self.working, layers, lambda name, seen: self._rule(layers[name], seen)):
            return logits_of(self.working(images))

    def train(self, mode: bool = True) -> BatchNormalised:
        """Stays in evaluation mode: the rule follows the batches, and dropout must stay off."""
        del mode
        return super().train(False)


def refuse_empty(images: Tensor) -> None:
    """Raise an error for a batch without images."""
    if not len(images):
        raise FewshiftError("the batch is empty and has no statistics: give at least one image")


def use_each_batch(network: Network, model: nn.Module) -> None:
    """Make the BatchNorm layers of a private copy normalise with their batch, with gradients through its statistics.

    Running statistics are not used. A layer that sees one position per channel outputs its bias.
    """
    for layer in network.layers:
        module = batchnorm(model, layer.name)
        if isinstance(module, _BatchNorm):
            module.momentum = 0.0
        before(module, _normalise_with_batch)


def _normalise_with_batch(module: _BatchNorm, inputs: Tensor) -> Tensor | None:
    several = inputs.numel() > inputs.shape[1]
    module.training = several and isinstance(module, _BatchNorm)
    if module.training:
        return None  # the layer's own kernel does the rest
    # a frozen layer always uses its own statistics, so its input is transformed to have them
    shape = (1, -1, *(1,) * (inputs.ndim - 2))
    dims = [0, *range(2, inputs.ndim)]
    var, mean = torch.var_mean(inputs, dims, correction=0, keepdim=True)
    assert module.running_mean is not None  # refuse_unadaptable comes first
    assert module.running_var is not None
    scale = ((module.running_var.view(shape) + module.eps) / (var + module.eps)).sqrt()
    return (inputs - mean) * scale + module.running_mean.view(shape)

"""Statistics of images that pass batch by batch: averages over batches, and exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.hooks import before
from fewshift.core.moments import Moments, concatenated, moments, normalising, source_layers, write_affine
from fewshift.core.network import Layer, Network, batchnorm
from fewshift.core.reading import Blend, PassStopped
from fewshift.core.source_layer import Normal


@torch.no_grad()
def read_by_ema(network: Network, batches: Iterable[Tensor], blend: Blend, old: float = 0.9) -> dict[str, Normal]:
    """The paper's estimate: an exponential moving average over batches, of mean and biased variance.

    For each batch a layer first updates its estimate from its current input, then normalises with the blend.
    """
    source, working = source_layers(network), network.copy()
    mean: dict[str, Tensor] = {}
    var: dict[str, Tensor] = {}

    def rule(name: str, current: Moments) -> Normal:
        first = name not in mean
        mean[name] = current.pooled_mean if first else old * mean[name] + (1 - old) * current.pooled_mean
        var[name] = current.pooled_var if first else old * var[name] + (1 - old) * current.pooled_var
        return source[name].blend(estimate(name), blend[name])

    def estimate(name: str) -> Normal:
        return Normal(mean[name], (var[name] + source[name].eps).sqrt())

    with normalising(network, working, source, rule):
        for images in batches:
            working(images)
    return {name: estimate(name) for name in mean}


@torch.no_grad()
def pooled_exactly(network: Network, batches: Callable[[], Iterable[Tensor]]) -> dict[str, Normal]:
    """The statistics of all images as if they were one batch, at the cost of one partial pass per layer.

    Each layer pools its inputs over all batches while the layers below it already use theirs. So the result depends
    neither on the size of the batches nor on their order.
    """
    source, working = source_layers(network), network.copy()
    normals: dict[str, Normal] = {}
    for layer in progress.track(network.layers, "statistics, layer by layer"):
        parts: list[Moments] = []

        def collect(_: nn.Module, inputs: Tensor, layer: Layer = layer, parts: list[Moments] = parts) -> None:
            parts.append(moments(inputs).as_one())
            if layer.calls == 1:
                raise PassStopped

        with before(working.get_submodule(layer.name), collect):
            for images in batches():
                with suppress(PassStopped):
                    working(images)
        normals[layer.name] = concatenated(parts).normal(source[layer.name].eps)
        write_affine(batchnorm(working, layer.name), source[layer.name], normals[layer.name])
    return normals


@torch.no_grad()
def averaged_over_batches(
    network: Network, batches: Iterable[Tensor], weight: Callable[[int], float]
) -> dict[str, Normal]:
    """Running statistics of a pass in which every batch is normalised with its own, as in training.

    `weight(i)` is the weight of batch i against all batches before it: 1 / (i + 1) averages them evenly. Variances are
    unbiased, as BatchNorm stores them.
    """
    source, working = source_layers(network), network.copy()
    mean: dict[str, Tensor] = {}
    var: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def rule(name: str, current: Moments) -> Normal:
        new = weight(counts.get(name, 0)) if name in counts else 1.0
        counts[name] = counts.get(name, 0) + 1
        mean[name] = (1 - new) * mean.get(name, current.pooled_mean) + new * current.pooled_mean
        var[name] = (1 - new) * var.get(name, current.unbiased_var) + new * current.unbiased_var
        return current.normal(source[name].eps)

    with normalising(network, working, source, rule):
        for images in batches:
            working(images)
    return {name: Normal(mean[name], (var[name] + source[name].eps).sqrt()) for name in mean}

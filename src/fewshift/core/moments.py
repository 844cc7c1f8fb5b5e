"""What BatchNorm layers see: moments of their inputs, read by hooks, blended with the source, merged into the network.

BatchNorm *normalises* with the biased variance (divide by the count) but *stores* the unbiased one (divide by the
count minus one). Everything below is biased unless its name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core.hooks import before
from fewshift.core.network import Network, batchnorm
from fewshift.core.source_layer import Normal, SourceLayer, at_least_float32
from fewshift.errors import FewshiftError, NotFiniteError

ROUNDED = 1e-5  # of eps: so far may the square of sqrt(eps) be from eps
LEAST_STD = 0.5  # of the pooled deviation, for that of the others when an image is left out


@dataclass(frozen=True)
class Moments:
    """The inputs of one layer, image by image: spatial mean and biased spatial variance per channel, in float64."""

    mean: Tensor  # (N, C)
    var: Tensor  # (N, C)
    count: Tensor  # (N,) positions per image

    @property
    def pooled_mean(self) -> Tensor:
        """(C,) over all images and positions."""
        return self._weights @ self.mean

    @property
    def pooled_var(self) -> Tensor:
        """(C,) biased, over all images and positions: within the images plus between them."""
        return self._weights @ (self.var + (self.mean - self.pooled_mean).square())

    @property
    def unbiased_var(self) -> Tensor:
        """(C,) the pooled variance as BatchNorm stores it; biased where there is a single position."""
        total = self.count.sum()
        return self.pooled_var * total / (total - 1).clamp(min=1)

    def normal(self, eps: float) -> Normal:
        """The pooled statistics, as a layer with this eps would use them."""
        return Normal(self.pooled_mean, (self.pooled_var + eps).sqrt())

    def of_others(self, eps: float, images: int) -> Normal:
        """(images, C): for each image, the pooled statistics of all others.

        A layer that is executed several times has the rows of its executions one after another. The deviation of the
        others counts as no less than half of the pooled one: an image that is unlike all others would be blown up by
        theirs, dominate the next layer, and so on through a deep network.
        """
        if images < 2:
            raise FewshiftError("a single image has no others to take statistics from: add an image")
        centred = self.mean - self.pooled_mean  # around the mean: differences of large sums would cancel
        mass = self.count.unsqueeze(1)
        own = torch.stack([mass.expand_as(centred), mass * centred, mass * (self.var + centred.square())])
        own = own.reshape(3, -1, images, own.shape[-1]).sum(1)
        rest = own.sum(1, keepdim=True) - own
        mean = rest[1] / rest[0]
        var = (rest[2] / rest[0] - mean.square()).clamp(min=0)
        least = LEAST_STD * (self.pooled_var + eps).sqrt()
        return Normal(self.pooled_mean + mean, torch.maximum((var + eps).sqrt(), least))

    def image_std(self, eps: float) -> Tensor:
        """(N, C): sqrt(unbiased spatial variance + eps) of each image; NaN where an image has one position."""
        count = self.count.unsqueeze(1)
        return (self.var * count / (count - 1) + eps).sqrt()

    def as_one(self) -> Moments:
        """All images pooled into one row, which can be pooled further."""
        return Moments(self.pooled_mean.unsqueeze(0), self.pooled_var.unsqueeze(0), self.count.sum().unsqueeze(0))

    @property
    def _weights(self) -> Tensor:
        return self.count / self.count.sum()


def moments(inputs: Tensor) -> Moments:
    """Moments of a layer's input of shape (N, C, positions...)."""
    inputs = at_least_float32(inputs)
    interleaved = inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    mean, var = (_by_kernel if interleaved and inputs.device.type == "cpu" else _by_rows)(inputs)
    count = mean.new_full((len(inputs),), inputs[0, 0].numel(), dtype=torch.float64)
    return Moments(mean.double(), var.double(), count)


def _by_rows(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Each image's channel is a row of memory."""
    rows = inputs.flatten(2) if inputs.ndim > 2 else inputs.unsqueeze(2)
    mean = rows.mean(2)
    # mean of squares minus square of mean: one fast pass, but it cancels where the mean is large ...
    var = torch.linalg.vector_norm(rows, dim=2).double().square() / rows.shape[2] - mean.double().square()
    # ... so those rows, usually few, are computed again around their mean
    doubtful = var < mean.double().square() / 30
    if doubtful.any():
        var[doubtful] = rows[doubtful].var(1, correction=0).double()
    return mean, var.clamp(min=0)


def _by_kernel(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The channels of a pixel lie side by side: BatchNorm's own kernel, image by image, is six times faster."""
    parts = [torch.batch_norm_update_stats(image.unsqueeze(0), None, None, 0.0) for image in inputs]
    return torch.stack([mean for mean, _ in parts]), torch.stack([var for _, var in parts])


def concatenated(parts: Sequence[Moments]) -> Moments:
    """The moments of several calls or chunks as if their images had been one batch."""
    return Moments(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.var for part in parts]),
        torch.cat([part.count for part in parts]),
    )


def source_layers(network: Network, model: nn.Module | None = None) -> dict[str, SourceLayer]:
    """The source's statistics and affine parameters, layer by layer; read from `model` if it is given."""
    model = network.model if model is None else model
    return {layer.name: SourceLayer.of(batchnorm(model, layer.name)) for layer in network.layers}


Rule = Callable[[str, Moments], Normal | None]
"""Layer name and moments of its input -> the statistics it shall use, or None to leave it unchanged."""


@contextmanager
def normalising(network: Network, working: nn.Module, source: Mapping[str, SourceLayer], rule: Rule) -> Iterator[None]:
    """Within the block, each layer of the working copy normalises with the statistics that `rule` returns.

    The rule runs before the layer does, so a deep layer sees inputs that the new statistics of the shallow layers have
    already normalised: layers are coupled.
    """

    def hook(name: str, module: _BatchNorm, inputs: Tensor) -> Tensor | None:
        seen = moments(inputs)
        if not (torch.isfinite(seen.mean).all() and torch.isfinite(seen.var).all()):
            raise NotFiniteError(f"the input of layer '{name}' is not finite: check the images' scale, or lower lr")
        normal = rule(name, seen)
        return None if normal is None else normalise_with(module, source[name], normal, inputs)

    with before_layers(network, working, hook):
        yield


@contextmanager
def before_layers(
    network: Network, working: nn.Module, hook: Callable[[str, _BatchNorm, Tensor], Tensor | None]
) -> Iterator[None]:
    """Within the block, call `hook(name, layer, input)` before each BatchNorm layer of the working copy runs.

    If it returns a tensor, the layer runs on that instead.
    """
    with ExitStack() as hooks:
        for layer in network.layers:
            hooks.enter_context(before(batchnorm(working, layer.name), partial(hook, layer.name)))
        yield


def normalise_with(module: _BatchNorm, source: SourceLayer, normal: Normal, inputs: Tensor) -> Tensor | None:
    """Make a layer of a working copy normalise with `normal`; with a row for each image, by way of its inputs."""
    if normal.mean.ndim > 1:
        return source.seen_with(inputs, normal)
    write_affine(module, source, normal)
    return None


def write_affine(module: _BatchNorm, source: SourceLayer, normal: Normal) -> None:
    """Make a layer of a working copy normalise with `normal`, in place."""
    with torch.no_grad():
        for tensor, value in zip((module.weight, module.bias), source.affine(normal), strict=True):
            tensor.copy_(value)


def normalised(network: Network, normals: Mapping[str, Normal]) -> nn.Module:
    """A working copy that normalises with these statistics."""
    working, source = network.copy(), source_layers(network)
    for name, normal in normals.items():
        write_affine(batchnorm(working, name), source[name], normal)
    return working


def merged(network: Network, normals: Mapping[str, Normal]) -> dict[str, Tensor]:
    """The tensors with which the plain network normalises with these statistics, exactly.

    Written into weight and bias this holds for every std != 0. A layer that has none of its own carries the statistics
    themselves, which cannot express a standard deviation below the root of eps.
    """
    source = source_layers(network)
    tensors: dict[str, Tensor] = {}
    for layer in network.layers:
        if layer.name not in normals:
            continue
        normal = normals[layer.name]
        if network.carries_affine(layer):
            tensors[f"{layer.name}.weight"], tensors[f"{layer.name}.bias"] = source[layer.name].affine(normal)
            continue
        eps = source[layer.name].eps
        var = normal.std.double().square() - eps
        if (normal.std <= 0).any() or (var < -ROUNDED * eps).any():
            raise FewshiftError(
                f"layer '{layer.name}' has no weight and bias of its own to carry a standard deviation below "
                f"{math.sqrt(eps):.2g}: lower lr or epochs, or set min_sigma"
            )
        tensors[f"{layer.name}.running_mean"] = normal.mean
        tensors[f"{layer.name}.running_var"] = var.clamp(min=0).to(normal.std.dtype)
    return tensors

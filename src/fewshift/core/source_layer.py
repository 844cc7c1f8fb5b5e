"""What the source network does in one BatchNorm layer: its statistics, and how others are written into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Normal:
    """The mean and the standard deviation, sqrt(var + eps), with which a layer normalises.

    (C,): one value per channel, or (N, C): a row for each image of the batch.
    """

    mean: Tensor
    std: Tensor

    def rows(self, start: int, count: int) -> Normal:
        """Those of `count` images from `start` on; the same for all images if there are no rows."""
        return (
            self if self.mean.ndim == 1 else Normal(self.mean[start : start + count], self.std[start : start + count])
        )


@dataclass(frozen=True)
class SourceLayer:
    """What the source network does in one BatchNorm layer, in the type in which adaptation computes."""

    normal: Normal
    gamma: Tensor
    beta: Tensor
    eps: float

    @classmethod
    def of(cls, module: _BatchNorm) -> SourceLayer:
        """Read a BatchNorm layer; in half precision everything is computed in float32."""
        assert module.running_mean is not None  # refuse_unadaptable comes first
        assert module.running_var is not None
        mean, var = at_least_float32(module.running_mean), at_least_float32(module.running_var)
        eps = float(getattr(module, "eps", 1e-5))
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        return cls(
            Normal(mean, (var + eps).sqrt()),
            torch.ones_like(mean) if weight is None else at_least_float32(weight),
            torch.zeros_like(mean) if bias is None else at_least_float32(bias),
            eps,
        )

    def affine(self, normal: Normal) -> tuple[Tensor, Tensor]:
        """The weight and bias with which the layer, keeping its source statistics, normalises with `normal`.

        gamma (z - mu) / sigma + beta  =  weight (z - mu_s) / sigma_s + bias
        """
        # in this order the source's own statistics give back gamma and beta to the last bit
        weight = self.gamma * (self.normal.std / normal.std)
        return weight, self.beta + self.gamma * ((self.normal.mean - normal.mean) / normal.std)

    def restore(self, module: _BatchNorm) -> None:
        """Write weight and bias back into a layer of a working copy, in place."""
        with torch.no_grad():
            module.weight.copy_(self.gamma)
            module.bias.copy_(self.beta)

    def blend(self, other: Normal, v: float) -> Normal:
        """(1 - v) source + v other, on means and on standard deviations; v = 0 is the source exactly.

        `other` may have a row for each image; then so has the blend.
        """
        mine = self.normal
        if v == 0:
            return mine  # for every image
        mean, std = other.mean.to(mine.mean), other.std.to(mine.std)
        return Normal((1 - v) * mine.mean + v * mean, (1 - v) * mine.std + v * std)

    def seen_with(self, inputs: Tensor, normal: Normal) -> Tensor:
        """Inputs which the layer, as it is, normalises as it would normalise `inputs` with a row for each image.

        (z' - mu_s) / sigma_s  =  (z - mu_i) / sigma_i
        """
        scale = self.normal.std / normal.std.to(self.normal.std)
        shift = self.normal.mean - normal.mean.to(self.normal.mean) * scale
        extent = (len(inputs), -1, *(1 for _ in inputs.shape[2:]))
        return torch.addcmul(shift.view(extent).to(inputs), inputs, scale.view(extent).to(inputs))


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor without gradient; half precision becomes float32."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor

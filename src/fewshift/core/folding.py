"""Whether a layer that looks like BatchNorm computes what BatchNorm computes.

Adaptation writes new statistics into weight and bias. That is right for a layer that does with them what it would do
with the statistics themselves; an activation behind it does not matter. A layer that normalises with its batch, adds 1
to its weight, or weighs its output by it, does not.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core.hooks import before
from fewshift.core.source_layer import Normal, SourceLayer

OTHERWISE = "it does not compute what BatchNorm does with its running statistics, weight and bias"  # a reason to skip
BATCH = "it normalises with its batch, not with its running statistics"  # another
SIDE = 32  # positions along each dimension that are looked at: BatchNorm treats all alike
ROUNDING = 1e-3  # of the largest value; a layer may insist on few bits, then it is
ROUNDING_OF_FEW_BITS = 0.05
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


@contextmanager
def unfoldable(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Within the block, collect which of these layers cannot carry new statistics in weight and bias, and why.

    Each is judged by the first input that reaches it.
    """
    reasons: dict[str, str] = {}
    waiting = {name: _Twins.of(cast(_BatchNorm, model.get_submodule(name))) for name in names}

    def judge(name: str, layer: nn.Module, inputs: Tensor) -> None:
        twins = waiting.pop(name, None)
        if layer.training:  # the network, which is in evaluation mode, has switched it
            reasons[name] = BATCH
        elif twins is not None and (reason := twins.reason(inputs)):
            reasons[name] = reason

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(before(model.get_submodule(name), partial(judge, name)))
        yield reasons


class _Twins:
    """A layer in three forms: as it is, with other statistics, and with those folded into weight and bias."""

    def __init__(self, plain: nn.Module, moved: nn.Module, folded: nn.Module) -> None:
        self.plain, self.moved, self.folded = plain, moved, folded

    @classmethod
    def of(cls, module: _BatchNorm) -> _Twins | None:
        """None for a layer without statistics, which is refused elsewhere."""
        if module.running_mean is None or module.running_var is None:
            return None
        source = SourceLayer.of(module)
        ramp = torch.linspace(-0.4, 0.4, source.normal.mean.numel()).to(source.normal.mean)
        # larger deviations alone: a variance that eps outweighs stays above zero
        normal = Normal(source.normal.mean + ramp.flip(0) * source.normal.std, source.normal.std * (1.5 + ramp))
        weight, bias = source.affine(normal)
        moved = {"running_mean": normal.mean, "running_var": normal.std.square() - source.eps}
        return cls(_replica(module, {}), _replica(module, moved), _replica(module, {"weight": weight, "bias": bias}))

    @torch.no_grad()
    def reason(self, inputs: Tensor) -> str | None:
        """Why new statistics cannot be folded into the layer; None if they can, or if nothing can be said."""
        part = inputs.detach()[(slice(None), slice(None), *(slice(SIDE) for _ in inputs.shape[2:]))]
        try:
            answers = [twin(part.double().clone()) for twin in (self.plain, self.moved, self.folded)]
        except Exception:  # a layer that takes more than its input, or insists on another type
            return None
        if not all(isinstance(answer, Tensor) and answer.is_floating_point() for answer in answers):
            return None
        plain, moved, folded = (answer.double() for answer in answers)
        few = answers[0].dtype.itemsize < 4
        if _equal(moved, folded, ROUNDING_OF_FEW_BITS if few else ROUNDING):
            return None
        return BATCH if _equal(moved, plain, 0.0) else OTHERWISE


def _replica(module: nn.Module, changed: dict[str, Tensor]) -> nn.Module:
    """A copy of a layer in float64 with some tensors changed, and with its author's hooks but none that come later."""
    twin = copy.copy(module)
    for key in HOOKS:
        twin.__dict__[key] = OrderedDict(module.__dict__[key])
    parameters: dict[str, Tensor | None] = dict(module._parameters)
    buffers: dict[str, Tensor | None] = dict(module._buffers)
    for key, value in changed.items():
        if key in buffers:
            buffers[key] = value
        else:
            parameters[key] = nn.Parameter(value, requires_grad=False)
    twin.__dict__["_parameters"] = {key: _in_double(value) for key, value in parameters.items()}
    twin.__dict__["_buffers"] = {key: _in_double(value) for key, value in buffers.items()}
    return twin


def _in_double(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor if tensor is None else tensor.detach().clone()
    double = tensor.detach().to(torch.float64, copy=True)
    return nn.Parameter(double, requires_grad=False) if isinstance(tensor, nn.Parameter) else double


def _equal(one: Tensor, other: Tensor, share: float) -> bool:
    """Whether two answers differ by no more than a share of the largest."""
    if one.shape != other.shape:
        return False
    largest = float(torch.nan_to_num(one).abs().max()) if one.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=0.0, atol=share * largest, equal_nan=True))

"""Weights that no network can compute with, refused before an answer comes of them."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fewshift.errors import FewshiftError

STATISTICS = ("running_mean", "running_var")


def refuse_broken_weights(model: nn.Module) -> None:
    """Raise an error that names the first tensor without values, with NaN or infinity, or with a negative variance.

    Of buffers, only statistics have to be finite: a mask may well hold infinity.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        refuse_without_values(name, tensor)
        refuse_broken_tensor(name, tensor.detach(), isinstance(tensor, nn.Parameter), "load sound weights")


def refuse_broken_tensor(name: str, tensor: Tensor, is_parameter: bool, remedy: str) -> None:
    """Raise an error that names a tensor with NaN or infinity, or with a negative variance."""
    statistics = name.endswith(STATISTICS)
    if statistics and not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise FewshiftError(f"weight '{name}' is {kind}, and statistics are floating point: {remedy}")
    if (statistics or is_parameter) and not _is_finite(tensor):
        raise FewshiftError(f"weight '{name}' contains NaN or infinity: {remedy}")
    if name.endswith("running_var") and (_comparable(tensor) < 0).any():
        raise FewshiftError(f"weight '{name}' contains a negative variance: {remedy}")


def refuse_without_values(name: str, tensor: Tensor) -> None:
    """Raise an error for a tensor that has a name and nothing else."""
    if is_lazy(tensor):
        raise FewshiftError(f"weight '{name}' has no shape yet: run the network once on a batch of images first")
    if tensor.is_meta:
        raise FewshiftError(
            f"weight '{name}' is on the meta device and has no values: "
            "call to_empty(device='cpu') and load_state_dict first"
        )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_quantized or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(_comparable(tensor)).all())


def _comparable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor  # of eight bits, few operations are there

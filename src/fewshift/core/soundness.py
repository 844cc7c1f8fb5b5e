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
        statistics = name.endswith(STATISTICS)
        if statistics and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise FewshiftError(f"weight '{name}' is {kind}, and statistics are floating point: load sound weights")
        if (statistics or isinstance(tensor, nn.Parameter)) and not _is_finite(tensor.detach()):
            raise FewshiftError(f"weight '{name}' contains NaN or infinity: load sound weights")
        if name.endswith("running_var") and (tensor.detach() < 0).any():
            raise FewshiftError(f"weight '{name}' contains a negative variance: load sound weights")


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
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # of eight bits, few operations are there
    return bool(torch.isfinite(values).all())

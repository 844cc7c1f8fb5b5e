"""Weights that no network can compute with."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from fewshift.errors import FewshiftError


def refuse_broken_weights(model: nn.Module) -> None:
    """Raise an error that names the first tensor with NaN, infinity or a negative variance."""
    statistics = ("running_mean", "running_var")
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(statistics))
    for name, tensor in chain(model.named_parameters(), buffers):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise FewshiftError(f"weight '{name}' contains NaN or infinity: load sound weights")
        if name.endswith("running_var") and (tensor < 0).any():
            raise FewshiftError(f"weight '{name}' contains a negative variance: load sound weights")

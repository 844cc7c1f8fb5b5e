"""Tensors that several modules share: what is written into one is written into all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import chain

from torch import Tensor, nn


def same_memory(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter and buffer whose memory other modules use too, its names there."""
    return _other_names(model, lambda tensor: (tensor.device, tensor.data_ptr(), tensor.numel()))


def same_tensor(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter and buffer that other modules have too, its names there: a copy of the network shares it."""
    return _other_names(model, id)


def each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors in their order, those that are shared once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _other_names(model: nn.Module, place: Callable[[Tensor], Hashable]) -> dict[str, tuple[str, ...]]:
    """The other names of every tensor that has some; a module that is registered under two names is one module."""
    groups: dict[Hashable, list[str]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            if tensor.numel() and not tensor.is_meta:
                groups.setdefault(place(tensor), []).append(f"{prefix}.{key}" if prefix else key)
    shared = [names for names in groups.values() if len(names) > 1]
    return {name: tuple(other for other in names if other != name) for names in shared for name in names}

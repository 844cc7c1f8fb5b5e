"""Tensors that share memory: what is written into one is written into all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

Names = Mapping[str, tuple[str, ...]]
"""The name of a parameter or buffer -> its other names, or those of the tensors it shares memory with."""


def same_memory(model: nn.Module) -> Names:
    """For each parameter and buffer that shares memory, the names of those it shares it with.

    A tensor whose own entries lie in one place, as `torch.ones(1).expand(6)` has them, shares memory with itself.
    """
    named = [(name, _Reach.of(tensor)) for name, tensor in _named_tensors(model)]
    shared: dict[str, tuple[str, ...]] = {name: (name,) for name, span in named if span.folded}
    for group in _touching(named):
        shared |= {name: tuple(other for other in group if other != name) for name in group}
    return shared


def same_tensor(model: nn.Module) -> Names:
    """For each parameter and buffer that has other names, those names: a copy of the network shares it."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model):
        groups.setdefault(id(tensor), []).append(name)
    shared = [names for names in groups.values() if len(names) > 1]
    return {name: tuple(other for other in names if other != name) for names in shared for name in names}


def each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors in their order, those that are shared once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


class _Reach(NamedTuple):
    """Where a tensor lies: the first byte and the one after the last."""

    device: str
    first: int
    end: int
    folded: bool  # whether some of its entries lie in one place

    @classmethod
    def of(cls, tensor: Tensor) -> _Reach:
        steps = list(zip(tensor.shape, tensor.stride(), strict=True))
        reach = sum((size - 1) * step for size, step in steps)
        first = tensor.data_ptr()
        folded = any(size > 1 and step == 0 for size, step in steps)
        return cls(str(tensor.device), first, first + (reach + 1) * tensor.element_size(), folded)


def _touching(named: Iterable[tuple[str, _Reach]]) -> Iterator[list[str]]:
    """The names of tensors that overlap, group by group."""
    group: list[str] = []
    device, end = "", 0
    for name, span in sorted(named, key=lambda each: each[1]):
        if group and span.device == device and span.first < end:
            group.append(name)
            end = max(end, span.end)
            continue
        if len(group) > 1:
            yield group
        group, device, end = [name], span.device, span.end
    if len(group) > 1:
        yield group


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and buffer under each of its names; a module that is registered under two names is one module."""
    for prefix, module in model.named_modules():
        for key, tensor in chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            if tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta:
                yield f"{prefix}.{key}" if prefix else key, tensor

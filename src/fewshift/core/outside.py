"""Layers whose weights a network reads by itself, beside the layer: new statistics must not be written into those.

Attention by the weights of a BatchNorm layer (`x * bn.weight.abs() / bn.weight.abs().sum()`) is such a reading. With
statistics folded into that weight, the layer would be right and the attention wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

READ_ELSEWHERE = "the network reads its weights outside of the layer"  # a reason to skip a layer
AFFINE, STATISTICS = ("weight", "bias"), ("running_mean", "running_var")
TYPE_ALONE = {"to", "type_as", "view_as", "expand_as", "reshape_as"}  # of what they are given beside their first tensor
NO_VALUES = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
NUMBERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "equal", "allclose"}


@contextmanager
def outside_reads(model: nn.Module, carries: Mapping[str, bool]) -> Iterator[set[str]]:
    """Within the block, collect which of these layers have tensors whose values are read while they do not run.

    A layer that carries new statistics in weight and bias has them known by their place in memory, whatever else the
    network calls them. One that does not carries them in its running statistics; while it is adapted it gets a weight
    and a bias of its own, and those under other names stay as they are: known are the objects.
    """
    seen: set[str] = set()
    running: list[str] = []
    owners: dict[Hashable, set[str]] = {}
    with ExitStack() as exits:
        for name, affine in carries.items():
            module = model.get_submodule(name)
            watched = [(_place, AFFINE)] if affine else [(_place, STATISTICS), (id, AFFINE)]
            for known, keys in watched:
                for tensor in (getattr(module, key, None) for key in keys):
                    if isinstance(tensor, Tensor) and (place := known(tensor)) is not None:
                        owners.setdefault(place, set()).add(name)
            exits.enter_context(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            exits.enter_context(module.register_forward_hook(lambda *_: _last_ends(running), always_call=True))
        exits.enter_context(_Watch(owners, running, seen))
        yield seen


def _last_ends(running: list[str]) -> None:
    running.pop()


class _Watch(TorchFunctionMode):
    """Sees every function of torch that is called with a tensor."""

    def __init__(self, owners: dict[Hashable, set[str]], running: list[str], seen: set[str]) -> None:
        super().__init__()
        self.owners, self.running, self.seen = owners, running, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in NUMBERS or (_has_tensor(result) and name not in NO_VALUES and not name.startswith("new_")):
            read = args[:1] if name in TYPE_ALONE else (*args, *(kwargs or {}).values())
            for owners in self._owners(read):
                self.seen |= owners if owners.isdisjoint(self.running) else set()
        return result

    def _owners(self, values: Any) -> Iterator[set[str]]:
        for value in values:
            if isinstance(value, (tuple, list)):
                yield from self._owners(value)
            elif isinstance(value, Tensor):
                yield from (self.owners[known] for known in (id(value), _place(value)) if known in self.owners)


def _place(tensor: Tensor) -> Hashable:
    """Where a tensor lies, and its size; None for one that lies nowhere."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return None
    return tensor.data_ptr(), tensor.numel()


def _has_tensor(result: Any) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, (tuple, list)) and any(map(_has_tensor, result)))

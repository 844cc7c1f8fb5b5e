"""Layers whose weights a network reads by itself, beside the layer: new statistics must not be written into those.

Attention by the weights of a BatchNorm layer (`x * bn.weight.abs() / bn.weight.abs().sum()`) is such a reading. With
statistics folded into that weight, the layer would be right and the attention wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

READ_ELSEWHERE = "the network reads its weights outside of the layer"  # a reason to skip a layer
AFFINE, STATISTICS = ("weight", "bias"), ("running_mean", "running_var")
TYPE_ALONE = {"to", "type_as", "view_as", "expand_as", "reshape_as"}  # of what they are given beside their first tensor
NO_VALUES = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
NUMBERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "equal", "allclose"}


@contextmanager
def outside_reads(model: nn.Module, names: Sequence[str]) -> Iterator[set[str]]:
    """Within the block, collect which of these layers have tensors whose values are read while they do not run."""
    seen: set[str] = set()
    running: list[str] = []
    owners: dict[int, set[str]] = {}
    with ExitStack() as exits:
        for name in names:
            module = model.get_submodule(name)
            for key in STATISTICS if getattr(module, "weight", None) is None else AFFINE:  # where new ones are written
                if isinstance(tensor := getattr(module, key, None), Tensor):
                    owners.setdefault(id(tensor), set()).add(name)
            exits.enter_context(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            exits.enter_context(module.register_forward_hook(lambda *_: _last_ends(running), always_call=True))
        exits.enter_context(_Watch(owners, running, seen))
        yield seen


def _last_ends(running: list[str]) -> None:
    running.pop()


class _Watch(TorchFunctionMode):
    """Sees every function of torch that is called with a tensor."""

    def __init__(self, owners: dict[int, set[str]], running: list[str], seen: set[str]) -> None:
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
            elif id(value) in self.owners:
                yield self.owners[id(value)]


def _has_tensor(result: Any) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, (tuple, list)) and any(map(_has_tensor, result)))

"""Run a network again from the middle: modules before a layer return their recorded output, those after it compute.

A module can be skipped if it is called once, returns a tensor of its own and leaves its arguments as they are. All
others, for example modules called twice or in-place activations, are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

Forward = Callable[..., Any]
Change = Callable[[Tensor], Tensor]


@contextmanager
def resumed(model: nn.Module, name: str, images: Tensor) -> Iterator[Callable[[Change], Any]]:
    """A function that gives the network's output on `images` with the output of the layer `name` changed.

    `change(output)` may write into the layer's output or replace it, and returns what the layer shall return. The
    network must be in evaluation mode, without gradient. Within the block its forward methods are replaced.
    """
    layer = model.get_submodule(name)
    kept: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            kept[module] = output.clone()  # the network may write into the output
            return output

        return forward

    with replaced({module: keep(module, module.forward) for module in skippable(model, layer, images[:2])}):
        model(images)
    due: dict[nn.Module, Tensor] = {}  # outputs that this pass has still to return

    def recall(module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return due.pop(module).clone() if module in due else original(*args, **kwargs)

        return forward

    forwards = {module: recall(module, module.forward) for module in kept}
    recalled = forwards.get(layer, layer.forward)
    change: Change

    def run(wanted: Change) -> Any:
        nonlocal change
        change = wanted
        due.update(kept)
        return model(images)

    with replaced({**forwards, layer: lambda *args, **kwargs: change(recalled(*args, **kwargs))}):
        yield run


@dataclass(frozen=True)
class Call:
    """How a forward pass used a module; for several calls, when the first began and the last ended."""

    begin: int
    end: int
    replaceable: bool  # whether returning the same output again would do


def skippable(model: nn.Module, layer: nn.Module, images: Tensor) -> list[nn.Module]:
    """The largest modules before the layer that can be skipped, and the layer itself if it is called once."""
    calls: dict[nn.Module, Call] = {}
    clock = count()

    def observe(module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            begin, inputs = next(clock), tensors((args, kwargs))
            before = [(id(tensor), tensor._version) for tensor in inputs]
            output = original(*args, **kwargs)
            # an in-place operation raises the version; a list or a dict among the arguments may have changed
            untouched = before == [(id(tensor), tensor._version) for tensor in tensors((args, kwargs))]
            own = isinstance(output, Tensor) and memory(output) not in map(memory, inputs)
            once = module not in calls
            calls[module] = Call(begin if once else calls[module].begin, next(clock), once and untouched and own)
            return output

        return forward

    modules = [module for module in model.modules() if not isinstance(module, ScriptModule)]
    with replaced({module: observe(module, module.forward) for module in modules}):
        model(images)
    largest: list[nn.Module] = []
    for module, call in sorted(calls.items(), key=lambda item: item[1].begin):
        possible = call.replaceable and (call.end < calls[layer].begin or module is layer)
        if possible and (not largest or call.begin > calls[largest[-1]].end):
            largest.append(module)
    return largest


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Within the block, these modules have other forward methods; their hooks still run."""
    own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
        for module, forward in own.items():
            vars(module)["forward"] = forward


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors(part)] if isinstance(value, (tuple, list)) else []


def memory(tensor: Tensor) -> int:
    """The address of the tensor's storage: the same for all its views."""
    return tensor.untyped_storage().data_ptr()

"""Run a network again from the middle: modules before a layer return their recorded output, those after it compute.

A module can be skipped if it is called once, returns a tensor and has no visible side effect. All others, for example
modules called twice or an in-place activation whose input is used again, are computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils._python_dispatch import TorchDispatchMode

Forward = Callable[..., Any]
Change = Callable[[Tensor], Tensor]


@dataclass
class Call:
    """How a forward pass used a module; for several calls, when the first began and the last ended."""

    begin: int
    end: int
    times: int
    output: Any
    version: int = 0  # grows with every in-place operation on the output
    entangled: set[int] = field(default_factory=set)  # memory of inputs that it wrote into or returned

    @property
    def altered(self) -> bool:
        """Whether something has written into the output since the module returned it."""
        return bool(self.output._version != self.version)


@contextmanager
def resumed(model: nn.Module, name: str, images: Tensor) -> Iterator[Callable[[Change], Any]]:
    """A function that gives the network's output on `images` with the output of the layer `name` changed.

    `change(output)` may write into the layer's output or replace it, and returns what the layer shall return. The
    network must be in evaluation mode, without gradient. Within the block its forward methods are replaced.
    """
    layer = model.get_submodule(name)
    trace = Trace.of(model, images[:2])
    skipped = trace.skipped(layer)
    used = trace.used(skipped)
    copied = {layer} | {
        module for module in skipped if trace.calls[module].altered and memory(trace.calls[module].output) in used
    }
    kept: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            kept[module] = output.clone() if module in copied else output
            return output

        return forward

    with replaced({module: keep(module, module.forward) for module in skipped}):
        model(images)
    due: dict[nn.Module, Tensor] = {}  # outputs that this pass has still to return

    def recall(module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if module not in due:
                return original(*args, **kwargs)
            output = due.pop(module)
            return output.clone() if module in copied else output

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


class Trace(TorchDispatchMode):
    """One forward pass: when every module began and ended, and when which memory was read or written."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.calls: dict[nn.Module, Call] = {}
        self.touched: dict[int, list[int]] = defaultdict(list)  # memory -> times
        self.alive: list[Tensor] = []  # so that no memory is used twice

    @classmethod
    def of(cls, model: nn.Module, images: Tensor) -> Trace:
        """Trace the model on a few images."""
        trace = cls()
        modules = [module for module in model.modules() if not isinstance(module, ScriptModule)]
        with replaced({module: trace.observe(module, module.forward) for module in modules}), trace:
            model(images)
        return trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.now += 1
        for tensor in tensors((args, kwargs, output)):
            self.alive.append(tensor)
            self.touched[memory(tensor)].append(self.now)
        return output

    def observe(self, module: nn.Module, original: Forward) -> Forward:
        """The same forward method, recorded."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            begin = self.now = self.now + 1
            inputs = tensors((args, kwargs))
            versions = [tensor._version for tensor in inputs]
            output = original(*args, **kwargs)
            self.now += 1
            call = Call(begin, self.now, 1, output)
            if module in self.calls:
                call.begin, call.times = self.calls[module].begin, self.calls[module].times + 1
            if isinstance(output, Tensor):
                call.version = output._version
                pairs = zip(inputs, versions, strict=True)
                written = {memory(tensor) for tensor, version in pairs if tensor._version != version}
                call.entangled = written | ({memory(tensor) for tensor in inputs} & {memory(output)})
            if [id(tensor) for tensor in inputs] != [id(tensor) for tensor in tensors((args, kwargs))]:
                call.output = None  # the module changed a list or a dict among its arguments
            self.calls[module] = call
            return output

        return forward

    def skipped(self, layer: nn.Module) -> list[nn.Module]:
        """The largest modules before the layer that can be skipped, and the layer itself if it is called once."""
        possible = [
            module
            for module, call in sorted(self.calls.items(), key=lambda item: item[1].begin)
            if (call.end < self.calls[layer].begin or module is layer)
            and call.times == 1
            and isinstance(call.output, Tensor)
        ]
        chosen = [module for module in possible if not self.calls[module].entangled]
        for module in possible:
            entangled = self.calls[module].entangled
            if entangled and not entangled & self.used([*chosen, module]):
                chosen.append(module)
        return self._largest(chosen)

    def used(self, skipped: list[nn.Module]) -> set[int]:
        """The memory that is read or written outside these modules."""
        spans = [(self.calls[module].begin, self.calls[module].end) for module in self._largest(skipped)]
        inside = {time for begin, end in spans for time in range(begin, end)}
        return {place for place, times in self.touched.items() if not inside.issuperset(times)}

    def _largest(self, modules: list[nn.Module]) -> list[nn.Module]:
        largest: list[nn.Module] = []
        for module in sorted(modules, key=lambda module: self.calls[module].begin):
            if not largest or self.calls[module].begin > self.calls[largest[-1]].end:
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

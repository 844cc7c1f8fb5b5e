"""Run a network again from the middle: what came before a layer is given back, what comes after it is computed.

A module is passed over when it is called once, gives a tensor and does nothing else that anybody sees. The others, such
as modules called twice or an in-place activation whose input is used again, are simply computed once more.
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
    """What a forward pass showed of a module; of several calls, where the first began and the last ended."""

    begin: int
    end: int
    times: int
    output: Any
    version: int = 0  # grows with every in-place operation on the output
    entangled: set[int] = field(default_factory=set)  # memory of inputs that it wrote into or gave on as its output

    @property
    def altered(self) -> bool:
        """Something has written into the output since the module gave it."""
        return bool(self.output._version != self.version)


@contextmanager
def resumed(model: nn.Module, name: str, images: Tensor) -> Iterator[Callable[[Change], Any]]:
    """A function that gives the network's output on `images` with the output of the layer `name` changed.

    `change` is given the layer's output, to write into or to replace, and returns what the layer shall give. The
    network has to be in evaluation mode, without gradient. Within the block its forward methods are replaced.
    """
    layer = model.get_submodule(name)
    trace = Trace.of(model, images[:2])
    skipped = trace.skipped(layer)
    used = trace.used(skipped)
    copied = {it for it in skipped if trace.calls[it].altered and memory(trace.calls[it].output) in used} | {layer}
    kept: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            kept[module] = output.clone() if module in copied else output
            return output

        return forward

    with replaced({module: keep(module, module.forward) for module in skipped}):
        model(images)
    due: dict[nn.Module, Tensor] = {}  # what is still to be given back in this pass

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
        """Look at what the model does with a few images."""
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
        """The same forward method, noted down."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            begin = self.now = self.now + 1
            given = tensors((args, kwargs))
            versions = [it._version for it in given]
            output = original(*args, **kwargs)
            self.now += 1
            call = Call(begin, self.now, 1, output)
            if module in self.calls:
                call.begin, call.times = self.calls[module].begin, self.calls[module].times + 1
            if isinstance(output, Tensor):
                call.version = output._version
                written = {memory(it) for it, version in zip(given, versions, strict=True) if it._version != version}
                call.entangled = written | ({memory(it) for it in given} & {memory(output)})
            if [id(it) for it in given] != [id(it) for it in tensors((args, kwargs))]:
                call.output = None  # it changed a list or a dict that it was given
            self.calls[module] = call
            return output

        return forward

    def skipped(self, layer: nn.Module) -> list[nn.Module]:
        """The largest modules whose work before the layer can be passed over, and the layer if it is called once."""
        possible = [
            module
            for module, call in sorted(self.calls.items(), key=lambda it: it[1].begin)
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
        found: list[nn.Module] = []
        for module in sorted(modules, key=lambda it: self.calls[it].begin):
            if not found or self.calls[module].begin > self.calls[found[-1]].end:
                found.append(module)
        return found


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Other forward methods for these modules during the block; their hooks run as ever."""
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
    return [it for part in value for it in tensors(part)] if isinstance(value, (tuple, list)) else []


def memory(tensor: Tensor) -> int:
    """Where the tensor's numbers lie: the same for all views of it."""
    return tensor.untyped_storage().data_ptr()

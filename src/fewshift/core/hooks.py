"""What enters a layer, seen and replaced before it runs, whether it is called `layer(x)` or `layer(input=x)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fewshift.errors import FewshiftError

Before = Callable[[Any, Tensor], Tensor | None]
"""A module and its input -> what it runs on instead, or None for the input as it is."""


def before(module: nn.Module, hook: Before, *, first: bool = False) -> RemovableHandle:
    """Call `hook(module, input)` before the module runs; as a context manager, within the block.

    It comes after the hooks that are there already, or with `first` before them.
    """
    return module.register_forward_pre_hook(partial(_called, hook), with_kwargs=True, prepend=first)


def keep_input(model: nn.Module) -> None:
    """Let every pass of a private network, and of its copies, work on a clone: a network may write into its input."""
    before(model, _cloned, first=True)  # hooks of its author may write, too


def keeps_input(model: nn.Module) -> bool:
    """Whether passes work on a clone."""
    return bool(_keys(model))


def without_clone(model: nn.Module) -> None:
    """Let passes work on the input itself again, in place: a network that is handed over is as its author wrote it."""
    for key in _keys(model):
        del model._forward_pre_hooks[key]
        del model._forward_pre_hooks_with_kwargs[key]


def _called(
    hook: Before, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    place, inputs = next(
        ((place, value) for place, value in (*enumerate(args), *kwargs.items()) if isinstance(value, Tensor)),
        (None, None),
    )
    if inputs is None:
        raise FewshiftError(
            f"a layer of type {type(module).__name__} is called without a tensor: pass its input as a tensor"
        )
    instead = hook(module, inputs)
    if instead is None:
        return None
    if isinstance(place, int):
        return (*args[:place], instead, *args[place + 1 :]), kwargs
    return args, {**kwargs, str(place): instead}


def _cloned(_: nn.Module, inputs: Tensor) -> Tensor:
    return inputs.clone()


def _keys(model: nn.Module) -> list[int]:
    hooks = model._forward_pre_hooks.items()
    return [key for key, hook in hooks if isinstance(hook, partial) and hook.args == (_cloned,)]

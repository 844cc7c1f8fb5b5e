"""A private copy of a network: its own modules and buffers, around the same parameters.

A network may be written so that no copy of it is separate: a function that is kept in it refers to the original's
modules. Such a copy would run the original, and is refused.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fewshift.core._arguments import checked_model, uncompiled
from fewshift.errors import FewshiftError

REMEDY = "make it a method of the module, and keep no module in a lambda or a nested function"


def structural_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode with its own modules and buffers, around the same parameters.

    Some networks count in a buffer while they run: the copy counts, the original does not.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise FewshiftError("a scripted network hides its layers: pass the nn.Module it was made from")
    model = checked_model(model)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise FewshiftError(f"a {type(model).__name__} wraps the network: pass its .module")
    for name, module in model.named_modules():
        if uncompiled(module) is not module:
            raise FewshiftError(
                f"layer '{name}' of the network is compiled, which hides what is in it: adapt the network before "
                "torch.compile, or put the layer's _orig_mod in its place"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise FewshiftError(
                f"layer '{name}' of the network is scripted, which hides what is in it: put the nn.Module it was made "
                "from in its place"
            )
    refuse_foreign_state(model)
    try:
        private = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    except Exception as error:
        remedy = "make it support copy.deepcopy"
        if "created explicitly by the user" in str(error):  # a tensor that a hook computes before every pass
            remedy = f"call remove_weight_norm, remove_spectral_norm or prune.remove first, or {remedy}"
        raise FewshiftError(
            f"this {type(model).__name__} cannot be copied ({_first_line(error)}): adaptation works on copies, so "
            f"{remedy}"
        ) from error
    _refuse_entangled(model, private)
    return answering(private)


def answering(model: nn.Module) -> nn.Module:
    """The network itself in evaluation mode; a `train` of its own may give nothing back."""
    model.eval()
    return model


def refuse_foreign_state(model: nn.Module) -> None:
    """Raise an error if the network's state dict does not hold its own tensors: what is written there would be lost."""
    try:
        state = model.state_dict(keep_vars=True)
    except TypeError as error:
        raise FewshiftError(
            f"state_dict() cannot be called as PyTorch's ({_first_line(error)}): leave it as PyTorch has it"
        ) from error
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = module._buffers.items()
        kept = {key: buffer for key, buffer in buffers if key not in module._non_persistent_buffers_set}
        for key, tensor in (module._parameters | kept).items():
            name = f"{prefix}.{key}" if prefix else key
            if tensor is not None and not _same(state.get(name), tensor):
                raise FewshiftError(
                    f"the network's state_dict() does not hold its own '{name}', but a copy, another name or nothing: "
                    "what adaptation changes could not be kept; leave state_dict as PyTorch has it"
                )


def _same(held: Any, tensor: Tensor) -> bool:
    """Whether what a state dict holds is this tensor, or another view of its memory."""
    if held is tensor:
        return True
    return (
        isinstance(held, Tensor)
        and held.layout == tensor.layout == torch.strided
        and held.shape == tensor.shape
        and held.data_ptr() == tensor.data_ptr()
    )


@contextmanager
def unused(model: nn.Module) -> Iterator[None]:
    """Within the block, it is an error if this thread runs a module of `model`: a copy of it is meant to run."""
    own, here = set(map(id, model.modules())), threading.get_ident()

    def refuse(module: nn.Module, _: Any) -> None:
        if id(module) in own and threading.get_ident() == here:
            name = next(name for name, each in model.named_modules() if each is module)
            raise FewshiftError(f"a copy of the network still runs the original's layer '{name}': {REMEDY}")

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _refuse_entangled(model: nn.Module, private: nn.Module) -> None:
    """Raise an error if a copy holds a module of the original, or a function that refers to one."""
    own = set(map(id, model.modules()))
    for name, module in private.named_modules():
        where = f"layer '{name}'" if name else "the network"
        if id(module) in own:
            raise FewshiftError(
                f"copy.deepcopy of the network gives {where} itself and no copy: adaptation works on copies, so let "
                "__deepcopy__ return one"
            )
        for function in _functions(module):
            if any(id(each) in own for each in _modules_of(function, set())):
                raise FewshiftError(
                    f"{where} keeps the function '{function.__qualname__}', which refers to a module of the original "
                    f"in every copy: {REMEDY}"
                )


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    """The functions among a module's attributes, its hooks included."""
    for value in module.__dict__.values():
        kept = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
        yield from (each for each in kept if isinstance(each, FunctionType))


def _modules_of(value: Any, seen: set[int]) -> Iterator[nn.Module]:
    """The modules that a function, a method or a module refers to, by its closure or its defaults."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, MethodType):
        yield from _modules_of(value.__self__, seen)
    elif isinstance(value, FunctionType) and id(value) not in seen:
        seen.add(id(value))
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a name that has no value yet
                continue
        for each in held:
            yield from _modules_of(each, seen)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

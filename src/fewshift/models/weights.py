"""Tables of tensors into networks, under the names that the network has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of torch.compile and FSDP
COUNTER = "num_batches_tracked"  # of BatchNorm; files from before it counted its batches are whole without it


@dataclass(frozen=True)
class Renamed:
    """Weights under the names that a network has."""

    tensors: dict[str, Tensor]
    prefix: str = ""  # what stood before every name
    left_out: tuple[str, ...] = ()  # tensors beside the network's, such as those of a loss


def named_like(state: Mapping[str, Tensor], own: Mapping[str, Tensor], ema: bool = True) -> Renamed:
    """The weights without the words that trainers put before names, where that makes most names fit.

    If it makes all of the network's names fit, what has another prefix is no part of the network and left out. Of two
    whole networks in one file, the one with "ema" in its prefix is taken, or with `ema=False` the other.
    """
    bare = {re.sub("|".join(map(re.escape, WRAPPERS)), "", name): tensor for name, tensor in state.items()}
    tensors = bare if len(bare) == len(state) else dict(state)
    wanted = {name for name in own if not name.endswith(COUNTER)}
    covered = Counter(
        name[:cut]
        for name in tensors
        for cut in (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        if name[cut:] in wanted
    )
    most = max(covered.values(), default=0)
    best = [prefix for prefix, count in covered.items() if count == most]
    if 2 * most <= len(wanted) or "" in best:
        return Renamed(tensors)
    prefix = best[0] if len(best) == 1 else _one_network(best, ema)
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    outside = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    if most < len(wanted):
        return Renamed({**outside, **inside}, prefix)
    return Renamed(inside, prefix, tuple(outside))


def _one_network(prefixes: list[str], ema: bool) -> str:
    """The prefix of the averaged network, or of the other one."""
    chosen = [prefix for prefix in prefixes if ("ema" in re.split(r"[._]", prefix)) is ema]
    if len(chosen) != 1:
        raise FewshiftError(
            f"the weights hold several networks, under {', '.join(map(repr, prefixes))}: save the one you want alone"
        )
    return chosen[0]


def load_all(model: nn.Module, state: Mapping[str, Tensor], misfit: str) -> nn.Module:
    """Load weights into a network, all of them and nothing else; what does not fit is listed after `misfit`."""
    own = model.state_dict()
    state = _under_every_name(own, state)
    facts = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ][:3]
    missing = [name for name in own if name not in state and not name.endswith(COUNTER)]
    unexpected = [name for name in state if name not in own]
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            facts.append(f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    if facts:
        raise FewshiftError(f"{misfit}: {'; '.join(facts)}: name the architecture and classes it was trained with")
    refuse_other_kinds(own, state, misfit)
    model.load_state_dict(dict(state), strict=True)
    return model


def refuse_other_kinds(own: Mapping[str, Tensor], state: Mapping[str, Tensor], misfit: str) -> None:
    """Raise an error where a value would become another one: floating point is loaded from floating point alone."""
    for name, tensor in own.items():
        other = state.get(name)
        if other is None or other.dtype == tensor.dtype:
            continue
        floating = tensor.is_floating_point() and other.is_floating_point()
        if not floating and (tensor.is_floating_point() or not _survives(other, tensor.dtype)):
            ours, theirs = (str(each.dtype).removeprefix("torch.") for each in (tensor, other))
            raise FewshiftError(f"{misfit}: {name} is {theirs}, not {ours}: save the weights as the network has them")


def _survives(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is the same in the other type, such as a counter that was saved as a float."""
    return not values.is_complex() and torch.equal(values.to(dtype).to(values.dtype), values)


def _under_every_name(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, with those that a network shares under each of their names: a file may have only one."""
    names: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in own.items():
        names.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    known = {name: each for group in names.values() for each in group if each in state for name in group}
    return {**{name: state[each] for name, each in known.items()}, **state}


def class_count(state: Mapping[str, Tensor], default: Mapping[str, Tensor]) -> int | None:
    """The number of classes of a file, where it is not the default.

    Then file and default network differ in the head alone, and there in the number of rows alone.
    """
    shapes = [(state[name].shape, default[name].shape) for name in default if name in state]
    differing = [(ours, theirs) for ours, theirs in shapes if ours != theirs]
    rows = {ours[0] if ours and ours[1:] == theirs[1:] else None for ours, theirs in differing}
    return rows.pop() if len(rows) == 1 else None


def begin_from(model: nn.Module, state: Mapping[str, Tensor], classes: int, name: str, arch: str) -> None:
    """Load weights into a network that is about to be trained.

    The head stays as it is where the weights have none, or one for another number of classes. Weights of a classifier
    also fill the encoder of a segmentation network, if they have all of it. Everything else has to fit, and the first
    tensor that does not is named.
    """
    own, head = model.state_dict(), _head(model)
    state = _under_every_name(own, named_like(state, own).tensors)
    encoder = getattr(model, "encoder", None)
    if isinstance(encoder, nn.Module) and not any(key.startswith("encoder.") for key in state):
        own, head = _as_in_library(encoder.state_dict(), state), frozenset()
        parts = {_first(key) for key in own}
        state = {key: tensor for key, tensor in state.items() if _first(key) in parts}  # without the classifier's top
        classes = -1  # an encoder has no head
    kept = {key for key, tensor in own.items() if key in state and _is_other_head(tensor, state[key], classes)}
    kept |= {key for key in own if key not in state and key.endswith(COUNTER)}
    kept |= head if not head & state.keys() else set()
    for key, tensor in own.items():
        if key not in kept and (key not in state or state[key].shape != tensor.shape):
            fact = f"is {tuple(state[key].shape)}" if key in state else "is missing"
            raise _other(name, arch, f"{key} {fact}, {tuple(tensor.shape)} expected")
    if unknown := [key for key in state if key not in own]:
        raise _other(name, arch, f"{unknown[0]} is not known there")
    refuse_other_kinds({key: own[key] for key in own.keys() - kept}, state, f"{name} cannot be used")
    with torch.no_grad():
        for key in own.keys() - kept:
            own[key].copy_(state[key])


def _head(model: nn.Module) -> frozenset[str]:
    """The tensors of the last linear layer."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]
    return frozenset(f"{name}.{key}" for name, layer in layers[-1:] for key in layer.state_dict())


def _as_in_library(encoder: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an encoder under the names that its library has; smp puts "model." before some of them."""
    prefix = "" if any(key in state for key in encoder) else "model."
    return {key.removeprefix(prefix): tensor for key, tensor in encoder.items()}


def _first(key: str) -> str:
    return key.partition(".")[0]


def _is_other_head(own: Tensor, other: Tensor, classes: int) -> bool:
    """Whether two tensors differ in the number of classes alone."""
    return own.shape != other.shape and own.shape[:1] == (classes,) and own.shape[1:] == other.shape[1:]


def _other(name: str, arch: str, fact: str) -> FewshiftError:
    return FewshiftError(f"{name} is a checkpoint of another architecture than {arch}: {fact}: name its own --arch")

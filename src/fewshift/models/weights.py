"""Files to tables of tensors, checked; and tables into networks. Nothing in a file is ever run."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError

NESTS = ("state_dict", "model_state_dict", "model")  # where checkpoints keep the weights among other things
PREFIX = "module."  # what DataParallel puts before every name
COUNTER = "num_batches_tracked"  # of BatchNorm; files from before it counted its batches are whole without it


def read_file(path: str | Path) -> dict[str, Tensor]:
    """The table of tensors in a file."""
    path = Path(path)
    if not path.is_file():
        raise FewshiftError(f"no weights at {path}: check the path")
    return checked(_safetensors(path) if path.suffix == ".safetensors" else _torch(path, path), path)


def read_bytes(content: bytes, path: str | Path) -> dict[str, Tensor]:
    """The table of tensors in the content of a file that torch wrote; errors name `path`."""
    return checked(_torch(io.BytesIO(content), path), path)


def checked(content: Any, path: str | Path) -> dict[str, Tensor]:
    """The table in a file's content, if every value in it is a number."""
    state = _bare(content, path)
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise FewshiftError(f"{name} in {path} is not a number in places: use weights from before training broke")
    return state


def load_all(model: nn.Module, state: Mapping[str, Tensor], misfit: str) -> nn.Module:
    """Load weights into a network, all of them and nothing else; what does not fit is listed after `misfit`."""
    own = model.state_dict()
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
    model.load_state_dict(dict(state), strict=True)
    return model


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
    with torch.no_grad():
        for key in own.keys() - kept:
            own[key].copy_(state[key])


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise FewshiftError(f"{path} is truncated or not a safetensors file ({error}): copy it again") from error


def _torch(file: Path | io.BytesIO, path: str | Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on files we are about to refuse
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FewshiftError(
            f"{path} holds more than tensors and would have to be unpickled, which can run any code and is never "
            "done: where you trust it, save its state_dict as .safetensors"
        ) from error
    except Exception as error:  # readers of old formats raise whatever a broken file leads them to
        raise FewshiftError(
            f"{path} is truncated or not a table of weights ({type(error).__name__}): "
            "copy it again or save the state_dict as .safetensors"
        ) from error


def _bare(content: Any, path: str | Path) -> dict[str, Tensor]:
    """Unwrap a checkpoint: down to the nested table, and without the prefix of DataParallel."""
    while isinstance(content, Mapping) and (inner := [content[key] for key in NESTS if _is_table(content.get(key))]):
        content = inner[0]
    if not _is_table(content):
        raise FewshiftError(f"{path} holds no table of tensors: save the network's state_dict")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise FewshiftError(
                f"{path} holds {type(value).__name__} {name!r} among its weights: save the network's state_dict alone"
            )
    cut = len(PREFIX) if all(name.startswith(PREFIX) for name in content) else 0
    return {name[cut:]: tensor for name, tensor in content.items()}


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(key, str) for key in value)


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

"""What a user passes, looked at before it is used: a wrong type is one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError

LARGEST = 8  # bytes of the widest number that a tensor holds
COMPILED = "_orig_mod"  # what torch.compile calls the network that it wraps


def checked_model(model: Any) -> nn.Module:
    """The network itself, not its name, and not what torch.compile wraps around it: a copy can be compiled again."""
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise FewshiftError(f"expected an nn.Module, got {kind}: pass a PyTorch network, such as fewshift.load gives")
    return model


def uncompiled(model: Any) -> Any:
    """The network that torch.compile wraps, whose layers have their own names; anything else as it is."""
    while isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        inner = model.__dict__.get("_modules", {}).get(COMPILED)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def checked_images(images: Tensor, what: str = "images") -> Tensor:
    """The images themselves, or labels, if every value is stored as a plain number."""
    if images.is_nested or images.layout != torch.strided:
        raise FewshiftError(f"{what} are a sparse or nested tensor: call .to_dense() or stack them first")
    if images.is_meta:
        raise FewshiftError(f"{what} are on the meta device and have no values: give a tensor that has")
    if images.is_quantized or (images.is_floating_point() and images.dtype.itemsize == 1):
        kind = str(images.dtype).removeprefix("torch.")
        raise FewshiftError(f"{what} are {kind}: preprocess them to floating point first")
    if not images.ndim:
        raise FewshiftError(f"{what} are a single number: give a tensor with an entry for each image")
    return images


def as_tensor(values: Any, what: str = "images") -> Tensor:
    """A tensor of numbers from whatever holds some; an array may be reversed, read-only, or of the other byte order."""
    if isinstance(values, Tensor):
        return values
    try:
        numbers = np.asarray(values)
        if numbers.dtype.itemsize > LARGEST and numbers.dtype.kind == "f":
            numbers = numbers.astype(np.float64)
        plain = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("=")).reshape(numbers.shape)
        return torch.from_numpy(plain if plain.flags.writeable else plain.copy())
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "give one class index, counted from 0, for each image" if what == "labels" else "give an array of them"
        raise FewshiftError(f"{what} are not numbers: {remedy}") from error


def checked_path(path: Any, what: str) -> Path:
    """A path, from a word or a path; `what` it is a path of."""
    if not isinstance(path, str | os.PathLike):
        raise FewshiftError(f"{what} is of type {type(path).__name__}: give the path of a file")
    if "\0" in os.fspath(path):
        raise FewshiftError(f"{what} {os.fspath(path)!r} has a NUL in its name, which no file can have: leave it out")
    return Path(path)


def checked_names(classes: Any) -> tuple[str, ...] | None:
    """Class names, from any list of words; None where there are none."""
    if classes is None:
        return None
    if isinstance(classes, str):
        raise FewshiftError(f"classes={classes!r} is one word: give a list of names")
    if not isinstance(classes, Iterable) or isinstance(classes, Set):
        order = ", which has no order" if isinstance(classes, Set) else ""
        raise FewshiftError(f"classes={classes!r} is of type {type(classes).__name__}{order}: give a list of names")
    names = _by_number(classes) if isinstance(classes, Mapping) else tuple(classes)
    for name in names:
        if not isinstance(name, str):
            raise FewshiftError(f"class name {name!r} is of type {type(name).__name__}: give words")
    return names


def _by_number(numbers: Mapping[Any, Any]) -> tuple[Any, ...]:
    """The names of a `class_to_idx` in the order of their numbers."""
    if sorted(map(str, numbers.values())) != sorted(map(str, range(len(numbers)))):
        raise FewshiftError(f"classes={dict(numbers)!r} does not number the outputs from 0: give a list of names")
    return tuple(sorted(numbers, key=lambda name: int(numbers[name])))


def check_source(name: Any, weights: Any) -> None:
    """One sentence when the name of a network is no text, or its weights are no path."""
    if name is not None and not isinstance(name, str):
        raise FewshiftError(f"the name of a network is of type {type(name).__name__}: write it like 'timm:resnet18'")
    if weights is not None:
        checked_path(weights, "weights")

"""The content of a state dict, bit for bit: of tensors, and of whatever else a module keeps there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fewshift.core.soundness import refuse_without_values
from fewshift.errors import FewshiftError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per element -> integers of that size
PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory read as integers; a scalar becomes a vector of one, and complex numbers pairs."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if tensor.element_size() not in BITS:
        return torch.view_as_real(flat).view(torch.int64).reshape(*tensor.shape, 2)
    return flat.view(BITS[tensor.element_size()]).reshape(tensor.shape or (1,))


def bytes_of(tensor: Tensor) -> bytes:
    """The content of a tensor."""
    return bits_of(tensor).cpu().numpy().tobytes()


def shape_of(value: Any) -> str:
    """What a value of a state dict is, without its content."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def content_of(value: Any, name: str) -> Iterator[bytes]:
    """The content of a value of a state dict, in parts; equal values have equal parts, in any process."""
    if isinstance(value, Tensor):
        refuse_without_values(name, value)
    if isinstance(value, Tensor) and value.is_quantized:
        yield from _quantised(value)
    elif isinstance(value, Tensor):
        yield bytes_of(value)
    elif isinstance(value, PLAIN):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from content_of(value[key], name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from content_of(part, name)
    else:
        raise FewshiftError(
            f"the network keeps a {type(value).__name__} in its state as '{name}', which cannot be compared bit for "
            "bit: let get_extra_state return tensors, numbers, words, or lists and dicts of them"
        )


def _quantised(tensor: Tensor) -> Iterator[bytes]:
    """The integers of a quantised tensor, and what they stand for."""
    yield bytes_of(tensor.int_repr())
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield repr((tensor.q_scale(), tensor.q_zero_point())).encode()
    else:
        yield bytes_of(tensor.q_per_channel_scales())
        yield bytes_of(tensor.q_per_channel_zero_points())

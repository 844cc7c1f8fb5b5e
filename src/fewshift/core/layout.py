"""How images and weights lie in memory: channels last is faster on a CPU, for networks that can take it."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import Tensor, nn

from fewshift.core.randomness import watched_randomness


def fastest_layout(model: nn.Module, images: Tensor) -> torch.memory_format:
    """Channels last, if a copy of the network runs that way on the first of `images`, on which it runs as they are.

    A network that flattens its maps with `view` insists on the other order. In float64 it is no faster.
    """
    if images.ndim != 4 or images.dtype.itemsize > 4:
        return torch.contiguous_format
    trial = copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in model.parameters()})
    try:
        with torch.no_grad(), watched_randomness():
            with_layout(trial, torch.channels_last)(laid_out(images[:1].clone(), torch.channels_last))
    except RuntimeError:
        return torch.contiguous_format
    return torch.channels_last


def channels_last(images: Tensor) -> Tensor:
    """Images with the channels of a pixel side by side in memory."""
    return laid_out(images, torch.channels_last)


def laid_out(images: Tensor, layout: torch.memory_format) -> Tensor:
    """`images` with a layout, if they are a batch of two-dimensional ones."""
    return images.contiguous(memory_format=layout) if images.ndim == 4 else images


def with_layout(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    """`model`, with the weights of its 2d convolutions laid out like such images; others stay."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.to(memory_format=layout)
    return model

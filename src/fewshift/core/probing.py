"""One forward pass, observed: which layers it executes, and which layer gives the network's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fewshift.core.hooks import before
from fewshift.errors import FewshiftError

LAST = 8  # layers among which the head is looked for: an auxiliary head may run after it


@contextmanager
def executions(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[list[str], list[int]]]:
    """Within the block, collect the name of each layer as it is called, and how many values enter it."""
    order: list[str] = []
    widths: list[int] = []

    def note(name: str, _: nn.Module, inputs: Tensor) -> None:
        order.append(name)
        widths.append(inputs.numel())

    with ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hooks.enter_context(before(layer, partial(note, name)))
        yield order, widths


@contextmanager
def last_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within the block, collect the outputs of the last layers that could be the head.

    The tensors are kept alive, so that no memory is used twice. A layer that runs twice is no head.
    """
    outputs: dict[str, Tensor] = {}
    once: set[str] = set()
    twice: set[str] = set()

    def note(name: str, output: Any) -> None:
        (twice if name in once else once).add(name)
        if isinstance(output, Tensor):
            outputs[name] = output
            if len(outputs) > LAST:
                del outputs[next(iter(outputs))]

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if _can_be_head(module):
                hooks.enter_context(module.register_forward_hook(lambda _, __, output, name=name: note(name, output)))
        yield outputs
    for name in twice & outputs.keys():
        del outputs[name]


def find_head(model: nn.Module, outputs: dict[str, Tensor], logits: Tensor) -> str | None:
    """The layer whose output is the network's output: the same memory, in whatever shape.

    With pixel logits, also the layer whose output was upsampled to them.
    """
    for name, output in reversed(outputs.items()):
        wide = getattr(model.get_submodule(name), "kernel_size", (1, 1)) != (1, 1)
        if output.data_ptr() == logits.data_ptr() and output.numel() == logits.numel():
            return None if wide and logits.ndim == 2 else name
    for name, output in reversed(outputs.items()):
        if logits.ndim == 4 and output.shape[:2] == logits.shape[:2] and _upsampled(output, logits):
            return name
    return None


def named_head(model: nn.Module, name: str) -> str:
    """`name`, or an error if no layer of that name can be a head."""
    modules = dict(model.named_modules())
    if name not in modules or not _can_be_head(modules[name]):
        known = [other for other, module in modules.items() if _can_be_head(module)][-3:]
        raise FewshiftError(f"head '{name}' is not a linear layer of this network: try one of {known}")
    return name


def _can_be_head(module: nn.Module) -> bool:
    """A linear layer or an ordinary convolution."""
    if parametrize.is_parametrized(module):
        return False
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _upsampled(coarse: Tensor, fine: Tensor) -> bool:
    """Whether `fine` is `coarse` upsampled bilinearly, with corners aligned or not."""
    coarse, fine = coarse.float(), fine.float()
    return coarse.ndim == 4 and any(
        torch.allclose(F.interpolate(coarse, fine.shape[2:], mode="bilinear", align_corners=corners), fine, atol=1e-4)
        for corners in (False, True)
    )

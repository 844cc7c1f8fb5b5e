"""One forward pass, observed: which layers it executes, and which layer gives the network's output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fewshift.core.folding import unfoldable
from fewshift.core.hooks import before
from fewshift.core.outputs import main_output
from fewshift.core.outside import READ_ELSEWHERE, outside_reads
from fewshift.core.randomness import draw, watched_randomness
from fewshift.errors import FewshiftError

LAST = 8  # layers among which the head is looked for: an auxiliary head may run after it


@dataclass(frozen=True)
class Probed:
    """What one pass of a private network shows."""

    logits: Tensor
    outputs: dict[str, Tensor]  # of the last layers that could be the head
    calls: list[str]  # the layers that were asked for, as they were called
    widest: int  # values that enter the widest of them
    learns: bool  # whether gradients reach one of them; True if none was asked for
    unfit: dict[str, str]  # layers whose statistics cannot be changed, and why


def probed(model: nn.Module, carries: Mapping[str, bool], images: Tensor) -> Probed:
    """One pass over a clone of `images`, in which the layers are watched that `carries` has: whether their weight and
    bias are where new statistics go.

    Gradients are enabled, so that a network that disables them shows it; but nothing asks for one, and no activation is
    kept.
    """
    names = list(carries)
    with ExitStack() as watches:
        unfit = watches.enter_context(unfoldable(model, names))
        watches.enter_context(detached(model))
        watches.enter_context(torch.enable_grad())
        seen = watches.enter_context(executions(model, names))
        outputs = watches.enter_context(last_outputs(model))
        read = watches.enter_context(outside_reads(model, carries))
        with running(images), watched_randomness() as drawn:
            output = model(images.detach().clone())
            random = drawn()
    logits = main_output(output)
    if logits.ndim < 2 or len(logits) != len(images):
        raise FewshiftError(
            f"the network's output for {len(images)} images has shape {tuple(logits.shape)}: "
            "wrap it in a module that returns one row of logits per image"
        )
    if random and logits.is_floating_point():
        _refuse_chance(model, images, logits)
    return Probed(
        logits,
        outputs,
        [call.name for call in seen],
        max([logits.numel(), *(call.width for call in seen)]),
        learns=not any(map(_is_quantised, model.modules())) and (not seen or any(call.gradients for call in seen)),
        unfit={**unfit, **dict.fromkeys(read, READ_ELSEWHERE)},
    )


@contextmanager
def running(images: Tensor) -> Iterator[None]:
    """Within the block a network runs on these images; whatever it raises is one sentence."""
    try:
        yield
    except FewshiftError:
        raise
    except Exception as error:  # networks refuse in every way
        lines = str(error).strip().splitlines()
        raise FewshiftError(
            f"the network cannot run on images of shape {tuple(images.shape)} "
            f"({lines[0] if lines else type(error).__name__}): check size, channels and preprocessing"
        ) from error


def _refuse_chance(model: nn.Module, images: Tensor, logits: Tensor) -> None:
    """Raise an error if the network answers the same images otherwise on another draw of random numbers.

    That random numbers were drawn does not say by whom: another thread may have.
    """
    with watched_randomness(), torch.no_grad():
        draw()
        again = main_output(model(images.detach().clone()))
    rounding = 1e-3 if logits.dtype.itemsize >= 4 else 0.05
    if not torch.allclose(logits, again, rtol=0.0, atol=rounding * float(logits.abs().max()), equal_nan=True):
        raise FewshiftError(
            "the network draws random numbers in evaluation mode, and answers the same image now so, now otherwise: "
            "let its forward draw none when `self.training` is false (dropout with training=self.training)"
        )


def _is_quantised(module: nn.Module) -> bool:
    """Whether the layer computes with integers, through which gradients do not pass."""
    return "quantized" in type(module).__module__.split(".")


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Within the block, no parameter of a private network asks for a gradient; the parameters themselves stay."""
    own = [
        (module._parameters, dict(module._parameters))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        for slots, parameters in own:
            slots.update({key: each.detach() for key, each in parameters.items() if each is not None})  # type: ignore[misc]
        yield
    finally:
        for slots, parameters in own:
            slots.update(parameters)


class Execution(NamedTuple):
    """A layer was called."""

    name: str
    width: int  # values that entered it
    gradients: bool  # whether they were enabled


@contextmanager
def executions(model: nn.Module, names: Sequence[str]) -> Iterator[list[Execution]]:
    """Within the block, collect the calls of these layers."""
    seen: list[Execution] = []

    def note(name: str, _: nn.Module, inputs: Tensor) -> None:
        seen.append(Execution(name, inputs.numel(), torch.is_grad_enabled()))

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(before(model.get_submodule(name), partial(note, name)))
        yield seen


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


def named_head(
    model: nn.Module, name: str, outputs: Mapping[str, Tensor] | None = None, logits: Tensor | None = None
) -> str:
    """`name`, or an error if no layer of that name can be a head, or if it gave another number of classes."""
    modules = dict(model.named_modules())
    if name not in modules or not _can_be_head(modules[name]):
        known = [other for other, module in modules.items() if _can_be_head(module)][-3:]
        raise FewshiftError(f"head '{name}' is not a linear layer of this network: try one of {known}")
    output = (outputs or {}).get(name)
    if logits is not None and output is not None and output.shape[1:2] != logits.shape[1:2]:
        raise FewshiftError(
            f"head '{name}' gives {output.shape[1]} classes and the network's output has {logits.shape[1]}: name "
            "another head, or wrap the network in a module that returns the logits alone"
        )
    return name


def _can_be_head(module: nn.Module) -> bool:
    """A linear layer or an ordinary convolution."""
    if parametrize.is_parametrized(module):
        return False
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _upsampled(coarse: Tensor, fine: Tensor) -> bool:
    """Whether `fine` is `coarse` upsampled bilinearly, with corners aligned or not."""
    if coarse.ndim != 4:
        return False
    few = min(coarse.dtype.itemsize, fine.dtype.itemsize) < 4
    coarse, fine = coarse.float(), fine.float()
    rounding = 0.02 * float(fine.abs().max()) if few else 1e-4
    sizes = [F.interpolate(coarse, fine.shape[2:], mode="bilinear", align_corners=corners) for corners in (False, True)]
    return any(torch.allclose(size, fine, atol=rounding) for size in sizes)

"""The one gradient loop."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fewshift.core import _progress as progress
from fewshift.errors import DivergedError, FewshiftError


@dataclass(frozen=True)
class Course:
    """The mean loss and the seconds of each epoch."""

    losses: list[float]
    seconds: list[float]

    @property
    def epoch_seconds(self) -> float | None:
        """The median time of an epoch."""
        return statistics.median(self.seconds) if self.seconds else None


NO_GRADIENTS = (
    "the network lets no gradients through (torch.no_grad, inference_mode, detach or quantised layers in its forward), "
    "so nothing can be learnt by them: let them through, or choose a method that needs none, such as adabn or blend"
)


RECOMPUTES = (
    "the network runs layers anew on the way back (gradient checkpointing), which gives wrong gradients here: switch "
    "it off, for example by model.set_grad_checkpointing(False) or memory_efficient=False"
)


def descend(loss: Tensor) -> None:
    """Compute the gradients of a loss, or raise one sentence if nothing that is learnt has any part in it."""
    if not loss.requires_grad:
        raise FewshiftError(NO_GRADIENTS)
    with _without_recomputation():
        loss.backward()


@contextmanager
def _without_recomputation() -> Iterator[None]:
    """Within the block, it is an error if this thread runs a layer.

    Gradient checkpointing runs layers a second time during the way back. By then statistics that are tried may have
    been taken out again, or be counted twice.
    """
    here = threading.get_ident()

    def refuse(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == here:
            raise FewshiftError(RECOMPUTES)

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, or raise one sentence if its rate is beyond the numbers that the weights can hold."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        raise DivergedError(f"a rate of {rate:.3g} is larger than any weight can be: lower lr") from error


Batches = Callable[[], Iterable[Tensor]]  # called once per epoch: the indices of each minibatch


def fit(
    loss: Callable[[Tensor], Tensor],
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *,
    what: str = "gradient steps",
    clip: float | None = None,
    after_step: Callable[[], None] | None = None,
) -> Course:
    """Minimise `loss(indices)` over minibatches of support indices; `clip` bounds the length of a gradient."""
    if torch.is_inference_mode_enabled():
        raise FewshiftError("adaptation needs gradients: call it outside torch.inference_mode()")
    course = Course([], [])
    with torch.enable_grad():
        for epoch in progress.track(range(epochs), what):
            began, values = time.perf_counter(), []
            for indices in batches():
                optimizer.zero_grad(set_to_none=True)
                value = loss(indices)
                descend(value)
                if clip is not None:
                    nn.utils.clip_grad_norm_(
                        [part for group in optimizer.param_groups for part in group["params"]], clip
                    )
                step(optimizer)
                if after_step is not None:
                    after_step()
                values.append(value.detach())
            course.losses.append(torch.stack(values).double().mean().item())
            course.seconds.append(time.perf_counter() - began)
            if course.losses[-1] != course.losses[-1]:
                raise DivergedError(f"the loss became NaN in epoch {epoch + 1}: lower lr")
    return course

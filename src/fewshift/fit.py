"""The one gradient loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fewshift import progress
from fewshift.errors import FewshiftError

Batches = Callable[[], Iterable[Tensor]]  # called once per epoch: the indices of each minibatch


def fit(
    loss: Callable[[Tensor], Tensor],
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *,
    what: str = "gradient steps",
    after_step: Callable[[], None] | None = None,
) -> list[float]:
    """Minimise `loss(indices)` over minibatches of support indices; returns the mean loss of each epoch."""
    if torch.is_inference_mode_enabled():
        raise FewshiftError("adaptation needs gradients: call it outside torch.inference_mode()")
    curve = []
    with torch.enable_grad():
        for epoch in progress.track(range(epochs), what):
            values = []
            for indices in batches():
                optimizer.zero_grad(set_to_none=True)
                value = loss(indices)
                value.backward()
                optimizer.step()
                if after_step is not None:
                    after_step()
                values.append(value.detach())
            curve.append(_mean(values))
            if curve[-1] != curve[-1]:
                raise FewshiftError(f"the loss became NaN in epoch {epoch + 1}: lower lr")
    return curve


def _mean(values: Sequence[Tensor]) -> float:
    return torch.stack(tuple(values)).double().mean().item()

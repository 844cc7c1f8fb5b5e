"""Losses: pure functions of logits and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift.errors import FewshiftError

Loss = Callable[[Tensor, Tensor], Tensor]

IGNORE = 255  # the label of a pixel that is not annotated
TEMPERATURES = torch.logspace(-2, 2, 81, dtype=torch.float64)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(label), over images or over all labelled pixels of (N, classes, H, W) logits."""
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    if labels.ndim == 1:  # image labels may have a class 255
        return F.cross_entropy(logits, labels)
    if (labels == IGNORE).all():  # the mean would be 0 / 0
        return logits.sum() * 0
    return F.cross_entropy(logits, labels, ignore_index=IGNORE)


@dataclass(frozen=True)
class UsersLoss:
    """A loss that a user passes: whatever is wrong with it is one sentence that names it."""

    loss: Any

    def __post_init__(self) -> None:
        if not callable(self.loss) or isinstance(self.loss, type):
            raise FewshiftError(f"loss={self.loss!r} is no loss: give a function such as nn.CrossEntropyLoss()")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, which has to be one number that learns."""
        try:
            value = self.loss(logits, labels)
        except Exception as error:  # it is the user's
            why = str(error).strip() or type(error).__name__
            raise FewshiftError(f"loss= cannot be computed ({why}): let it take logits and labels") from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise FewshiftError(f"loss= gives {shape}: let it give one number, a tensor (reduction='mean')")
        if logits.requires_grad and not value.requires_grad:
            raise FewshiftError("loss= gives a number without gradient: let it call no detach() or item()")
        return value.reshape(())


def users_loss(loss: Any) -> Loss:
    """The loss that a user passes, or cross-entropy."""
    return cross_entropy if loss is None else UsersLoss(loss)


def at_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits at the resolution of pixel labels, upsampled bilinearly if the network's are coarser."""
    if labels.ndim < 3 or logits.shape[2:] == labels.shape[1:]:
        return logits
    return F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)


def entropy(logits: Tensor) -> Tensor:
    """H(p) = -sum_c p_c log p_c of p = softmax(logits), one value per image or pixel."""
    # log_softmax, not log of softmax: finite for confident predictions
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def mean_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean entropy, with the signature of a supervised loss: the labels are ignored."""
    return entropy(logits.float() if logits.dtype.itemsize < 4 else logits).mean()


def temperature(logits: Tensor, labels: Tensor) -> float:
    """The T under which softmax(logits / T) has the least cross-entropy."""
    scaled = logits.double().unsqueeze(0) / TEMPERATURES.view(-1, 1, 1)
    losses = F.cross_entropy(scaled.flatten(0, 1), labels.repeat(len(TEMPERATURES)), reduction="none")
    return float(TEMPERATURES[losses.view(len(TEMPERATURES), -1).mean(1).argmin()])


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) of every row, under the temperature that suits these rows best."""
    return F.cross_entropy(logits.double() / temperature(logits, labels), labels, reduction="none")

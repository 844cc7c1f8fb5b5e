"""What the methods that learn from unlabelled images share."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fewshift.core.adaptable import refuse_without_gradients, refuse_without_statistics
from fewshift.core.network import Network, head_inputs, like, linear, logits_of
from fewshift.core.randomness import minibatches
from fewshift.core.support import Unlabelled
from fewshift.errors import FewshiftError


def prepare_unlabelled(
    network: nn.Module | Network, unlabelled: Unlabelled, who: str, *, pictures: bool = False
) -> tuple[Network, str]:
    """The view and its head, for a network with one row of finite logits per image."""
    if len(unlabelled) < 2:
        raise FewshiftError(f"{who} needs batch statistics, and one unlabelled image has none: add images")
    images = unlabelled.batch(torch.arange(2))
    if pictures and images.ndim != 4:
        raise FewshiftError(
            f"{who} generates images of (channels, height, width), these have shape {tuple(images.shape[1:])}: "
            "choose another method"
        )
    network = Network.of(network, images)
    refuse_without_statistics(network)
    refuse_without_gradients(network)
    head = network.need_head(who)
    with torch.no_grad(), head_inputs(network.model, head) as seen:
        logits = logits_of(network.model(like(network.model, images)))
        direct = linear(network.model, head)(seen[-1]).flatten(1)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise FewshiftError(
            f"{who} needs one row of two or more logits per image, the network's output has shape "
            f"{tuple(logits.shape)}: use a classification network"
        )
    if direct.shape != logits.shape:
        raise FewshiftError(
            f"head '{head}' gives {direct.shape[1]} values per image and the network {logits.shape[1]}: "
            "pass as head the layer that gives the network's output"
        )
    if not torch.isfinite(logits).all():
        raise FewshiftError(
            "the network's logits are NaN or infinite before adaptation: check the images' preprocessing"
        )
    return network, head


@torch.no_grad()
def predictions(
    model: nn.Module, head: str, unlabelled: Unlabelled, batches: Iterable[Tensor], *, augmented: bool = False
) -> tuple[Tensor, Tensor]:
    """(features, logits) of the images at the indices in `batches`, read batch by batch."""
    features, logits = [], []
    for indices in batches:
        with head_inputs(model, head) as seen:
            answers = logits_of(model(like(model, unlabelled.batch(indices, augmented=augmented))))
        logits.append(answers.to(seen[-1].dtype))
        if not torch.isfinite(logits[-1]).all():
            raise FewshiftError("the network's logits became NaN or infinite on the target: lower lr")
        features.append(seen[-1].flatten(1))
    return torch.cat(features), torch.cat(logits)


def in_order(unlabelled: Unlabelled, size: int) -> tuple[Tensor, ...]:
    """The indices of all images from first to last, in batches."""
    return tuple(torch.arange(len(unlabelled)).split(size))


def shuffled(unlabelled: Unlabelled, size: int, generator: torch.Generator) -> list[Tensor]:
    """One epoch in random order, without a last minibatch of one image, which has no batch statistics."""
    return [indices for indices in minibatches(len(unlabelled), size, generator) if len(indices) > 1]


def class_counts(logits: Tensor) -> list[int]:
    """How many rows are predicted to be of each class."""
    return [int(count) for count in logits.argmax(1).bincount(minlength=logits.shape[1])]


def ramp(progress: float) -> float:
    """2 / (1 + exp(-10 p)) - 1: from 0 at p = 0 to almost 1 at p = 1."""
    return 2 / (1 + math.exp(-10 * progress)) - 1


def inverse_decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate times (1 + 10 t / T)^-0.75 in step t of T."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + 10 * t / max(steps, 1)) ** -0.75)

"""What the fine-tuning methods share: which parameters, which BatchNorm policy, one way to train them.

The statistics that BatchNorm uses decide most results, so every method names its policy:

- `source_frozen`: the source's, in training and at test;
- `train_running`: each minibatch's own in training; running statistics follow with momentum 0.1 and serve at test;
- `support`: those of the whole support, held in training and computed again after it for the test;
- `auto`: `train_running`, but `source_frozen` with pixel labels, where a minibatch is one image.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core.adaptable import refuse_shared_statistics, refuse_without_gradients, refuse_without_statistics
from fewshift.core.heads import train_head
from fewshift.core.loop import fit
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, batchnorm, like, linear, logits_of
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.reading import read_support, tied
from fewshift.core.sharing import each_once
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError

POLICIES = ("auto", "source_frozen", "train_running", "support")
MOMENTUM = 0.1

Parts = Callable[[Network, nn.Module], list[Tensor]]
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Penalty = Callable[[Tensor], Tensor]  # the images of a step, after their forward pass -> an addition to the loss


def affine_parameters(network: Network, model: nn.Module) -> list[Tensor]:
    """Weight and bias of every BatchNorm layer that has them."""
    layers = [batchnorm(model, layer.name) for layer in network.layers if layer.affine]
    return each_once(tensor for layer in layers for tensor in (layer.weight, layer.bias))


def head_parameters(network: Network, model: nn.Module) -> list[Tensor]:
    """Weight and bias of the head."""
    return list(linear(model, network.need_head("training the classifier")).parameters())


def body_parameters(network: Network, model: nn.Module) -> list[Tensor]:
    """Every parameter but the head's."""
    head = {id(tensor) for tensor in linear(model, network.need_head("telling features from classifier")).parameters()}
    return [tensor for tensor in model.parameters() if id(tensor) not in head]


PARTS: dict[str, Parts] = {
    "bn": affine_parameters,
    "head": head_parameters,
    "body": body_parameters,
    "all": lambda _, model: list(model.parameters()),
}


def policy(bn: str, support: Support) -> str:
    """The policy, with `auto` resolved for this support."""
    if bn != "auto":
        return bn
    return "train_running" if support.kind.batch_statistics else "source_frozen"


def prepare(network: nn.Module | Network, target: Target, who: str) -> tuple[Network, Support]:
    """The view of the network, and the support in the type of the training, both checked."""
    support = target.need_support(who)
    network = Network.of(network, target.some_images(who, "support images"))
    refuse_without_statistics(network)

    def ready(images: Tensor) -> Tensor:
        images = network.laid_out(images)
        return images.float() if images.dtype.itemsize < 4 else images

    return network, support.checked(network.output).prepared(ready)


def in_float32(model: nn.Module) -> nn.Module:
    """`model` in at least float32: small steps vanish in half precision."""
    return model.float() if like(model, torch.empty(0)).dtype.itemsize < 4 else model


def trainable(network: Network, bn: str, support: Support | None = None) -> nn.Module:
    """A copy in at least float32 whose BatchNorm layers follow the policy. None of its tensors requires a gradient."""
    model = network.with_layout(in_float32(network.with_tensors({}).requires_grad_(False)))
    bn = bn if support is None else policy(bn, support)
    if bn == "train_running":
        use_batches(network, model, MOMENTUM)
    elif bn == "support" and support is not None:
        write_statistics(network, model, support)
    return model


def use_batches(network: Network, model: nn.Module, momentum: float) -> None:
    """Let BatchNorm layers normalise with their batch (frozen ones cannot). Everything else stays in eval mode."""
    for layer in network.layers:
        module = batchnorm(model, layer.name)
        if isinstance(module, _BatchNorm):
            module.train()
            module.momentum = momentum


def write_statistics(network: Network, model: nn.Module, support: Support) -> str:
    """Replace the statistics of `model` by the support's under its present weights; returns the route of the images."""
    refuse_shared_statistics(network)
    here = support.prepared(lambda images: like(model, images))
    seen = read_support(replace(network, model=model), here, tied(network, 1.0))
    with torch.no_grad():
        for name, moments in seen.moments.items():
            layer = batchnorm(model, name)
            assert layer.running_mean is not None  # refuse_without_statistics comes first
            assert layer.running_var is not None
            layer.running_mean.copy_(moments.pooled_mean)
            layer.running_var.copy_(moments.pooled_var)
    return seen.route


def tune(
    network: Network,
    support: Support,
    target: Target,
    part: str,
    method: FineTuning,
    seed: int,
    *,
    penalty: Callable[[nn.Module], Penalty] | None = None,
    model: nn.Module | None = None,
    after_epoch: Callable[[nn.Module], None] | None = None,
) -> Fitted:
    """Train one of the `PARTS` of a network on the support, with the settings of `method`.

    `penalty(model)` gives what is added to the loss of each step. `after_epoch` receives the predictor so far.
    """
    if part != "head" and method.epochs:
        refuse_without_gradients(network)
    bn, size = policy(method.bn, support), support.minibatch(method.batch_size)
    model = trainable(network, bn, support) if model is None else model
    tensors = [tensor.requires_grad_(True) for tensor in PARTS[part](network, model)]
    if not tensors:
        raise FewshiftError("the network has no parameters of the kind to be trained: choose another method")
    extra = None if penalty is None else penalty(model)

    def loss(indices: Tensor) -> Tensor:
        images, labels = support.batch(indices)
        images = like(model, images)
        value = target.cost(_training_logits(model, images), labels)
        return value if extra is None else value + extra(images)

    with private_randomness(seed) as generator:

        def batches() -> Iterable[Tensor]:
            least = 2 if bn == "train_running" and support.kind.batch_statistics else 1
            yield from minibatches(len(support), max(size, least), generator, at_least=least)
            if after_epoch is not None:
                after_epoch(_predictor(network, copy.deepcopy(model), bn, support, size))

        course = fit(loss, batches, method.optimizer(tensors), method.epochs)
    return Fitted(
        _predictor(network, model, bn, support, size),
        notes={
            "support_loss": course.losses,
            "epoch_seconds": course.epoch_seconds,
            "parameters": sum(tensor.numel() for tensor in tensors),
            "bn": bn,
        },
    )


def tune_head(
    network: Network, support: Support, target: Target, method: FineTuning, seed: int, *, fresh: bool = False
) -> tuple[nn.Module, list[float]]:
    """Train the head alone, from the source's weights or from fresh ones; the body runs once if it can."""
    bn = policy(method.bn, support)
    if bn == "train_running":
        fitted = tune(network, support, target, "head", method, seed)
        return fitted.predictor, fitted.notes["support_loss"]
    name = network.need_head("training the classifier")
    model = trainable(network, bn, support)
    layer = linear(model, name).requires_grad_(True)
    size, optimizer = support.minibatch(method.batch_size), method.optimizer(list(layer.parameters()))
    with private_randomness(seed) as generator:
        if fresh:
            layer.reset_parameters()
        batches = partial(minibatches, len(support), size, generator)
        losses = train_head(model, name, support, target.cost, batches, optimizer, method.epochs)
    return network.with_tensors(model.state_dict()), losses


def _training_logits(model: nn.Module, images: Tensor) -> Tensor:
    try:
        return logits_of(model(images))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise FewshiftError(
            "a BatchNorm layer sees one value per channel and cannot be in training mode: use bn='source_frozen'"
        ) from error


def _predictor(network: Network, model: nn.Module, bn: str, support: Support, size: int) -> nn.Module:
    """The trained copy as a plain network, with the support's statistics if the policy says so."""
    if bn == "support":
        write_statistics(network, model, support)
    predictor = network.with_tensors(model.state_dict())
    with torch.no_grad():
        sample = logits_of(predictor(like(predictor, support.chunks(size)[0][0])))
    if not torch.isfinite(sample).all():
        raise FewshiftError("training diverged, the logits are NaN or infinite: lower lr")
    return predictor


@dataclass(frozen=True)
class FineTuning(Method):
    """What the methods that train on the support share: settings of the LCCS paper, Adam without decay."""

    needs: ClassVar[Needs] = Needs.SUPPORT
    paper: ClassVar[str] = "baseline of Zhang et al., IJCAI 2022"

    bn: str = "auto"
    epochs: int = 10
    lr: float = 1e-3
    batch_size: int | None = None

    def check(self) -> None:
        """A known BatchNorm policy, and at least one image per minibatch."""
        self.one_of(bn=POLICIES)
        self.at_least(batch_size=1)

    @property
    def optimizer(self) -> Optimizer:
        """Adam with this method's rate."""
        return partial(torch.optim.Adam, lr=self.lr)


@dataclass(frozen=True)
class SGDFineTuning(FineTuning):
    """The same with SGD, momentum and weight decay."""

    momentum: float = 0.9
    weight_decay: float = 4e-4

    @property
    def optimizer(self) -> Optimizer:
        """SGD with this method's rate, momentum and decay: the gradient of (weight_decay / 2) |w|^2."""
        return partial(torch.optim.SGD, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

"""What the fine-tuning methods share: which parameters, which BatchNorm policy, one way to train them.

Where the statistics come from decides most results, so it is said explicitly, never by accident:

- `source_frozen`: the source's, while training and at test;
- `train_running`: those of each minibatch while training, as in a training step; running statistics follow with
  momentum 0.1 and are used at test;
- `support`: those of the whole support, held while training, computed once more after it for the test;
- `auto`: `train_running`, but `source_frozen` with pixel labels, where a minibatch is one image.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core.heads import train_head
from fewshift.core.loop import fit
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, batchnorm, head_inputs, like, linear, logits_of, refuse_without_statistics
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.reading import read_support, tied
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.errors import FewshiftError

POLICIES = ("auto", "source_frozen", "train_running", "support")
MOMENTUM = 0.1

Parts = Callable[[Network, nn.Module], list[Tensor]]
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Penalty = Callable[[Tensor], Tensor]  # the images of a step, after their forward pass -> what is added to the loss


def affine_parameters(network: Network, model: nn.Module) -> list[Tensor]:
    """Weight and bias of every BatchNorm layer that has them."""
    layers = [batchnorm(model, layer.name) for layer in network.layers if layer.affine]
    return [tensor for layer in layers for tensor in (layer.weight, layer.bias)]


def head_parameters(network: Network, model: nn.Module) -> list[Tensor]:
    """Weight and bias of the head."""
    return list(linear(model, network.need_head("training the classifier")).parameters())


def body_parameters(network: Network, model: nn.Module) -> list[Tensor]:
    """Everything but the head, frozen BatchNorm's affine buffers excepted."""
    head = {id(tensor) for tensor in linear(model, network.need_head("telling features from classifier")).parameters()}
    return [tensor for tensor in model.parameters() if id(tensor) not in head]


def all_parameters(network: Network, model: nn.Module) -> list[Tensor]:
    """Every parameter of the network."""
    del network
    return list(model.parameters())


def sgd(lr: float, weight_decay: float, momentum: float = 0.9) -> Optimizer:
    """SGD with momentum; decay enters the gradient, as the penalty (weight_decay / 2) |w|^2 does."""
    return lambda tensors: torch.optim.SGD(tensors, lr=lr, momentum=momentum, weight_decay=weight_decay)


def adam(lr: float) -> Optimizer:
    """Adam without decay."""
    return lambda tensors: torch.optim.Adam(tensors, lr=lr)


def check_policy(bn: str) -> None:
    """One sentence when a BatchNorm policy is unknown."""
    if bn not in POLICIES:
        raise FewshiftError(f"bn={bn!r} is unknown: choose one of {', '.join(POLICIES)}")


def policy(bn: str, support: Support) -> str:
    """What `auto` means for this support."""
    if bn != "auto":
        return bn
    return "train_running" if support.kind.batch_statistics else "source_frozen"


def prepare(network: nn.Module | Network, target: Target, who: str) -> tuple[Network, Support]:
    """The view, and the support in the type in which it is trained with, both checked."""
    support = target.need_support(who)
    network = Network.of(network, target.some_images(who, "support images"))
    refuse_without_statistics(network)
    return network, support.checked(network.output).prepared(lambda images: _in_float32(like(network.model, images)))


def prepare_unlabelled(
    network: nn.Module | Network, unlabelled: Unlabelled, who: str, *, pictures: bool = False
) -> tuple[Network, str]:
    """The view and its head, for a network that gives one sound prediction per image."""
    if len(unlabelled) < 2:
        raise FewshiftError(
            f"{who} needs more than one unlabelled image, there are no batch statistics of one: add some"
        )
    images = unlabelled.batch(torch.arange(2))
    if pictures and images.ndim != 4:
        raise FewshiftError(
            f"{who} generates images of (channels, height, width), these have shape {tuple(images.shape[1:])}: "
            "choose another method"
        )
    network = Network.of(network, images)
    refuse_without_statistics(network)
    head = network.need_head(who)
    with torch.no_grad(), head_inputs(network.model, head) as seen:
        logits = logits_of(network.model(like(network.model, images)))
        given = linear(network.model, head)(seen[-1]).flatten(1)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise FewshiftError(
            f"{who} needs one row of two or more logits per image, the network's output has shape "
            f"{tuple(logits.shape)}: use a classification network"
        )
    if given.shape != logits.shape:
        raise FewshiftError(
            f"head '{head}' gives {given.shape[1]} values per image and the network {logits.shape[1]}: "
            "pass as head the layer that gives the network's output"
        )
    if not torch.isfinite(logits).all():
        raise FewshiftError(
            "the network's logits are NaN or infinite before adaptation: check the images' preprocessing"
        )
    return network, head


def _in_float32(images: Tensor) -> Tensor:
    return images.float() if images.dtype.itemsize < 4 else images


def in_float32(model: nn.Module) -> nn.Module:
    """Small steps vanish in half precision."""
    return model.float() if like(model, torch.empty(0)).dtype.itemsize < 4 else model


def trainable(network: Network, bn: str, support: Support | None = None) -> nn.Module:
    """A copy whose BatchNorm layers stand under the policy, in at least float32: small steps vanish in half precision.

    Nothing in it asks for gradients yet.
    """
    model = in_float32(network.with_tensors({}).requires_grad_(False))
    bn = bn if support is None else policy(bn, support)
    if bn == "train_running":
        use_batches(network, model, MOMENTUM)
    elif bn == "support" and support is not None:
        write_statistics(network, model, support)
    return model


def finished(network: Network, model: nn.Module) -> nn.Module:
    """The trained copy as a predictor: the plain network, its own type and flags, with these tensors."""
    return network.with_tensors(model.state_dict())


def use_batches(network: Network, model: nn.Module, momentum: float) -> None:
    """Executed BatchNorm layers normalise with their batch; frozen ones cannot. Everything else stays in eval mode."""
    for layer in network.layers:
        module = batchnorm(model, layer.name)
        if isinstance(module, _BatchNorm):
            module.train()
            module.momentum = momentum


def write_statistics(network: Network, model: nn.Module, support: Support) -> str:
    """Replace the statistics of `model` by the support's, layer after layer, under its present weights.

    Tells how the images passed.
    """
    here = support.prepared(lambda images: like(model, images))
    seen = read_support(replace(network, model=model), here, tied(network, 1.0))
    with torch.no_grad():
        for name, it in seen.moments.items():
            layer = batchnorm(model, name)
            assert layer.running_mean is not None  # refuse_without_statistics comes first
            assert layer.running_var is not None
            layer.running_mean.copy_(it.pooled_mean)
            layer.running_var.copy_(it.pooled_var)
    return seen.route


def tune(
    network: Network,
    support: Support,
    target: Target,
    parts: Parts,
    optimizer: Optimizer,
    *,
    bn: str,
    epochs: int,
    batch_size: int | None,
    seed: int,
    penalty: Callable[[nn.Module], Penalty] | None = None,
    model: nn.Module | None = None,
    after_epoch: Callable[[nn.Module], None] | None = None,
) -> Fitted:
    """Train some parts of a network on the support.

    `penalty(model)` gives what is added to the loss of each step; `after_epoch` is shown the predictor so far.
    """
    bn, size = policy(bn, support), support.minibatch(batch_size)
    model = trainable(network, bn, support) if model is None else model
    tensors = [tensor.requires_grad_(True) for tensor in parts(network, model)]
    if not tensors:
        raise FewshiftError("the network has no parameters of the kind to be trained: choose another method")
    extra = None if penalty is None else penalty(model)

    def loss(indices: Tensor) -> Tensor:
        images, labels = support.batch(indices)
        images = like(model, images)
        try:
            value = target.cost(logits_of(model(images)), labels)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise FewshiftError(
                "a BatchNorm layer sees one value per channel and cannot be in training mode: use bn='source_frozen'"
            ) from error
        return value if extra is None else value + extra(images)

    def predictor(trained: nn.Module) -> nn.Module:
        if bn == "support":
            write_statistics(network, trained, support)
        result = finished(network, trained)
        with torch.no_grad():
            sample = logits_of(result(like(result, support.chunks(size)[0][0])))
        if not torch.isfinite(sample).all():
            raise FewshiftError("training diverged, the network answers NaN or infinity: lower lr")
        return result

    with private_randomness(seed) as generator:

        def batches() -> Iterable[Tensor]:
            least = 2 if bn == "train_running" and support.kind.batch_statistics else 1
            yield from minibatches(len(support), max(size, least), generator, at_least=least)
            if after_epoch is not None:
                after_epoch(predictor(copy.deepcopy(model)))

        course = fit(loss, batches, optimizer(tensors), epochs)
    return Fitted(
        predictor(model),
        notes={
            "support_loss": course.losses,
            "epoch_seconds": course.epoch_seconds,
            "parameters": sum(tensor.numel() for tensor in tensors),
            "bn": bn,
        },
    )


@dataclass(frozen=True)
class FineTuning(Method):
    """What the methods that train by SGD on the support have in common, with the settings of the LCCS paper."""

    needs: ClassVar[Needs] = Needs.SUPPORT
    paper: ClassVar[str] = "baseline of Zhang et al., IJCAI 2022"

    bn: str = "auto"
    epochs: int = 10
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 4e-4
    batch_size: int | None = None

    def check(self) -> None:
        """A known BatchNorm policy, and minibatches with something in them."""
        check_policy(self.bn)
        self.at_least(batch_size=1)

    def train(self, network: Network, support: Support, target: Target, seed: int, parts: Parts, **more: Any) -> Fitted:
        """Train some parts of the network with these settings; `more` goes to `tune`."""
        return tune(
            network,
            support,
            target,
            parts,
            sgd(self.lr, self.weight_decay, self.momentum),
            bn=self.bn,
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=seed,
            **more,
        )

    def train_head(
        self, network: Network, support: Support, target: Target, seed: int, *, fresh: bool = False
    ) -> tuple[nn.Module, list[float]]:
        """Train the head alone with these settings."""
        return tune_head(
            network,
            support,
            target,
            sgd(self.lr, self.weight_decay, self.momentum),
            bn=self.bn,
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=seed,
            fresh=fresh,
        )


def tune_head(
    network: Network,
    support: Support,
    target: Target,
    optimizer: Optimizer,
    *,
    bn: str,
    epochs: int,
    batch_size: int | None,
    seed: int,
    fresh: bool = False,
) -> tuple[nn.Module, list[float]]:
    """Train the head alone, from the source's or from a fresh start; the body gives its features once if it can."""
    bn = policy(bn, support)
    if bn == "train_running":
        fitted = tune(
            network, support, target, head_parameters, optimizer, bn=bn, epochs=epochs, batch_size=batch_size, seed=seed
        )
        return fitted.predictor, fitted.notes["support_loss"]
    name = network.need_head("training the classifier")
    model = trainable(network, bn, support)
    layer = linear(model, name).requires_grad_(True)
    with private_randomness(seed) as generator:
        if fresh:
            layer.reset_parameters()
        losses = train_head(
            model,
            name,
            support,
            target.cost,
            lambda: minibatches(len(support), support.minibatch(batch_size), generator),
            optimizer(list(layer.parameters())),
            epochs,
        )
    return finished(network, model), losses

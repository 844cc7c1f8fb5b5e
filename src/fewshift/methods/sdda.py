"""SDDA: generate labelled images under the guidance of the source classifier, then adapt from them to the target.

Kurmi, Subramanian and Namboodiri, "Domain Impression: A Source Data Free Domain Adaptation Method", WACV 2021.

A class-conditional generator learns against a discriminator that knows the target's images, and makes images that the
frozen source classifier recognises. From some epoch on, a new classifier learns from generated images and their labels,
while a domain discriminator behind a gradient reversal makes their features like the target's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.copies import answering
from fewshift.core.loop import descend, step
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, head_inputs, like, linear
from fewshift.core.randomness import private_randomness
from fewshift.core.support import Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.methods._adversarial import (
    SIZES,
    Generator,
    binary_loss,
    domain_discriminator,
    gradient_reversed,
    image_discriminator,
)
from fewshift.methods._finetuning import body_parameters, head_parameters, trainable
from fewshift.methods._unlabelled import class_counts, in_order, predictions, prepare_unlabelled, ramp, shuffled


@dataclass(frozen=True)
class SDDA(Method):
    """Generator and two discriminators exist during adaptation only; the result is the network with a new classifier.

    - epochs, batch_size: passes over the target; generator and image discriminator learn in all of them (Adam with
      generator_lr and beta1), the network from start_epoch on (SGD with lr (1 + 0.001 epoch)^-0.75).
    - noise, size, width: numbers that enter the generator, pixels that leave it, channels before its last layer. Its
      images are enlarged to the target's size and stretched, per channel, to the range of the target's values.
    - guide_ramp: b = 2 / (1 + exp(-10 epoch / guide_ramp)) - 1 is the weight of the source classifier's losses.
    - domain_weight, reversal: weights of the domain loss, and of its reversed gradient in the network; the domain
      discriminator learns ten times as fast (its biases twenty times).
    - head: the new classifier starts "fresh" (Xavier) or from the "source".

    Generated and target images share their BatchNorm statistics, in training mode. 0 epochs give the source network.
    The original standardises each batch; here the network gets images in the range it was trained for. Momentum is
    our choice: the original names none.
    """

    name: ClassVar[str] = "sdda"
    paper: ClassVar[str] = "Kurmi et al., WACV 2021"
    needs: ClassVar[Needs] = Needs.UNLABELLED
    changes: ClassVar[str] = "everything"
    verified: ClassVar[str] = (
        "`tests/methods/test_sdda_naive.py`: generator, both discriminators and network after every step, from the "
        "same random start, against the formulas, to 1e-9"
    )

    epochs: int = 100
    start_epoch: int = 25
    batch_size: int = 64
    generator_lr: float = 2e-4
    beta1: float = 0.5
    noise: int = 100
    size: int = 32
    width: int = 64
    guide_ramp: float = 100.0
    lr: float = 2e-4
    momentum: float = 0.9
    weight_decay: float = 0.0
    domain_weight: float = 0.1
    reversal: float = 1.0
    head: str = "fresh"

    def check(self) -> None:
        """Positive numbers, adaptation before the last epoch, known words."""
        self.at_least(batch_size=2, noise=1, width=1)
        if self.beta1 >= 1:
            raise FewshiftError(f"beta1={self.beta1} is too large: give less than 1")
        if self.guide_ramp <= 0:
            raise FewshiftError(f"guide_ramp={self.guide_ramp} is not a number of epochs: give more than 0")
        if 0 < self.epochs <= self.start_epoch:
            raise FewshiftError(
                f"epochs={self.epochs} end before adaptation begins at start_epoch={self.start_epoch}: "
                f"give at least {self.start_epoch + 1}"
            )
        self.one_of(size=SIZES, head=("fresh", "source"))

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train generator and discriminator alone, then the network with them."""
        unlabelled = target.need_unlabelled(self.name)
        network, head = prepare_unlabelled(network, unlabelled, self.name, pictures=True)
        if self.epochs == 0:
            return Fitted(network.with_tensors({}), notes={"epochs": 0})
        with private_randomness(seed) as generator, torch.enable_grad():
            making = GeneratorTraining(self, network, head, unlabelled)
            learner = NetworkTraining(self, network, head)
            curves = []
            for epoch in progress.track(range(self.epochs), "sdda"):
                losses: list[dict[str, Tensor]] = []
                for indices in shuffled(unlabelled, self.batch_size, generator):
                    real = like(learner.model, unlabelled.batch(indices, augmented=True))
                    made = making.step(real, guidance(epoch, self.guide_ramp), generator)
                    adapts = epoch >= self.start_epoch
                    losses.append(made.losses | (learner.step(made.images, made.labels, real) if adapts else {}))
                if epoch >= self.start_epoch:
                    learner.schedule.step()
                curves.append({name: torch.stack([step[name] for step in losses]).mean().item() for name in losses[0]})
                if any(math.isnan(value) for value in curves[-1].values()):
                    raise FewshiftError(f"a loss became NaN in epoch {epoch + 1}: lower generator_lr or lr")
            _, logits = predictions(answering(learner.model), head, unlabelled, in_order(unlabelled, self.batch_size))
        names = {name: None for curve in curves for name in curve}
        return Fitted(
            network.with_tensors(learner.model.state_dict()),
            notes={
                "epochs": self.epochs,
                "start_epoch": self.start_epoch,
                "predicted": class_counts(logits),
                "curves": {name: [curve[name] for curve in curves if name in curve] for name in names},
                "parameters": learner.parameters,
            },
        )


# the generator, its discriminator and the classifier that guides it


@dataclass(frozen=True)
class GeneratedBatch:
    """Generated images in the range of the target, their labels, and the losses of the step that made them."""

    images: Tensor
    labels: Tensor
    losses: dict[str, Tensor]


class GeneratorTraining:
    """Generator, image discriminator and frozen source classifier."""

    def __init__(self, settings: SDDA, network: Network, head: str, unlabelled: Unlabelled) -> None:
        self._source, self._head = trainable(network, "source_frozen"), head
        self._range = ValueRange.of(self._source, unlabelled, settings.batch_size)
        self._size, self._noise = settings.size, settings.noise
        self._classes = linear(self._source, head).weight.shape[0]
        like_images = self._range.middle
        channels = len(like_images)
        self.generator = Generator(self._noise, self._classes, channels, self._size, settings.width).to(like_images)
        self.discriminator = image_discriminator(channels, self._size, settings.width).to(like_images)
        betas = (settings.beta1, 0.999)
        self._generator_optimizer = torch.optim.Adam(self.generator.parameters(), settings.generator_lr, betas)
        self._discriminator_optimizer = torch.optim.Adam(self.discriminator.parameters(), settings.generator_lr, betas)

    def make(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(images in [-1, 1], labels) for classes drawn evenly."""
        labels = torch.randint(self._classes, (count,), generator=generator).to(self._range.middle.device)
        noise = torch.randn(count, self._noise, generator=generator).to(self._range.middle)
        made: Tensor = self.generator(noise, labels)
        return made, labels

    def step(self, real: Tensor, b: float, generator: torch.Generator) -> GeneratedBatch:
        """Train the discriminator to tell real from made, then the generator to fool it and be recognised."""
        made, labels = self.make(len(real), generator)
        verdicts = self.discriminator(resized(self._range.shrunk(real), (self._size, self._size)))
        discriminator_loss = binary_loss(verdicts, self.discriminator(made.detach()))
        _descend(discriminator_loss, self._discriminator_optimizer)

        images = self._range.stretched(resized(made, real.shape[2:]))
        _, logits = features_and_logits(self._source, self._head, images)
        cost = generator_loss(self.discriminator(made).flatten(), logits, labels, b)
        _descend(cost, self._generator_optimizer)
        recognised = (logits.argmax(1) == labels).to(cost).mean()
        losses = {"discriminator_loss": discriminator_loss, "generator_loss": cost, "recognised": recognised}
        return GeneratedBatch(images.detach(), labels, {name: value.detach() for name, value in losses.items()})


@dataclass(frozen=True)
class ValueRange:
    """The range of the target's values per channel, to map images to [-1, 1] and back."""

    middle: Tensor  # (channels, 1, 1)
    half: Tensor

    @classmethod
    def of(cls, model: nn.Module, unlabelled: Unlabelled, size: int) -> ValueRange:
        """From one pass over the target."""
        ends = []
        for indices in in_order(unlabelled, size):
            channels = like(model, unlabelled.batch(indices)).transpose(0, 1).flatten(1)
            ends.append((channels.amin(1), channels.amax(1)))
        low = torch.stack([least for least, _ in ends]).amin(0)[:, None, None]
        high = torch.stack([most for _, most in ends]).amax(0)[:, None, None]
        return cls((low + high) / 2, ((high - low) / 2).clamp(min=1e-6))

    def shrunk(self, images: Tensor) -> Tensor:
        """Images of the target -> [-1, 1]."""
        return (images - self.middle) / self.half

    def stretched(self, images: Tensor) -> Tensor:
        """[-1, 1] -> the range of the target."""
        return self.middle + self.half * images


def guidance(epoch: int, epochs: float) -> float:
    """b = 2 / (1 + exp(-10 p)) - 1 with p = epoch / epochs, at most 2: from 0 to almost 1."""
    return ramp(min(epoch / epochs, 2))


def generator_loss(verdicts: Tensor, logits: Tensor, labels: Tensor, b: float) -> Tensor:
    """-log D(made) + b [CE(source logits, labels) - log p(made)]; with b = 0 the labels are ignored."""
    value = F.binary_cross_entropy_with_logits(verdicts, torch.ones_like(verdicts))
    if b == 0:
        return value
    return value + b * (F.cross_entropy(logits, labels) + unlikelihood(logits))


def unlikelihood(logits: Tensor) -> Tensor:
    """-log p(x) = log Z - LSE(logits(x)), averaged: the classifier taken as an energy model, on raw logits.

    log Z is estimated from the minibatch and held constant: with its gradient everything would cancel.
    """
    evidence = logits.logsumexp(1)
    return (evidence.detach().mean() - evidence).mean()


# the network that is adapted


class NetworkTraining:
    """The target's network, which starts as the source's, and its domain discriminator."""

    def __init__(self, settings: SDDA, network: Network, head: str) -> None:
        self.model, self._head = trainable(network, "train_running"), head
        layer = linear(self.model, head)
        if settings.head == "fresh":
            xavier(layer)
        self._weight, self._reversal = settings.domain_weight, settings.reversal
        self.domain = domain_discriminator(layer.weight[0].numel()).to(layer.weight)
        own = [*body_parameters(network, self.model), *head_parameters(network, self.model)]
        self.parameters = sum(tensor.numel() for tensor in own)
        weights = [tensor for tensor in self.domain.parameters() if tensor.ndim > 1]
        biases = [tensor for tensor in self.domain.parameters() if tensor.ndim == 1]
        self._optimizer = torch.optim.SGD(
            [
                {"params": [tensor.requires_grad_(True) for tensor in own], "lr": settings.lr},
                {"params": weights, "lr": 10 * settings.lr},
                {"params": biases, "lr": 20 * settings.lr},
            ],
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda done: (1 + 0.001 * (settings.start_epoch + done)) ** -0.75
        )

    def step(self, made: Tensor, labels: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Learn the labels of generated images, with features that look like the target's."""
        features, logits = features_and_logits(self.model, self._head, torch.cat([made, real]))
        classified = F.cross_entropy(logits[: len(made)], labels)
        domains = self.domain(gradient_reversed(features, self._reversal))
        domain = binary_loss(domains[: len(made)], domains[len(made) :])
        _descend(classified + self._weight * domain, self._optimizer)
        return {"classifier_loss": classified.detach(), "domain_loss": domain.detach()}


def xavier(layer: nn.Linear) -> None:
    """A fresh start for a linear layer or a 1x1 convolution."""
    with torch.no_grad():
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            layer.bias.zero_()


def features_and_logits(model: nn.Module, head: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """(features, raw logits): what enters the head and what leaves it, before any later layer."""
    with head_inputs(model, head) as seen:
        model(images)
    return seen[-1].flatten(1), linear(model, head)(seen[-1]).flatten(1)


def resized(images: Tensor, size: tuple[int, ...] | torch.Size) -> Tensor:
    """Images resized to this height and width."""
    if images.shape[2:] == tuple(size):
        return images
    images = images.float() if images.dtype.itemsize < 4 else images  # where antialiasing is not made for few bits
    return F.interpolate(images, tuple(size), mode="bilinear", antialias=True)


def _descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    descend(loss)
    step(optimizer)

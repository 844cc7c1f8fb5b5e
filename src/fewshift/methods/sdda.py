"""SDDA: labelled images are generated under the guidance of the source classifier, then adapted from to the target.

Kurmi, Subramanian and Namboodiri, "Domain Impression: A Source Data Free Domain Adaptation Method", WACV 2021.

A class-conditional generator is trained against a discriminator that knows the target's images, and is asked for
images that the frozen source classifier recognises. From some epoch on, a new classifier learns from generated images
and their labels, while a domain discriminator behind a gradient reversal makes their features like the target's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, head_inputs, like, linear, logits_of
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.support import Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.methods._finetuning import body_parameters, head_parameters, prepare_unlabelled, trainable

HEADS = ("fresh", "source")
SIZES = (8, 16, 32, 64, 128, 256)  # of generated images: 4x4, doubled
DOMAIN_WIDTH = 256  # hidden units of the domain discriminator


@dataclass(frozen=True)
class SDDA(Method):
    """Generator and two discriminators live during adaptation only; the result is the network, with a new classifier.

    - epochs, batch_size: passes over the target; generator and image discriminator learn in all of them (Adam with
      generator_lr and beta1), the network from start_epoch on (SGD with lr (1 + 0.001 epoch)^-0.75).
    - noise, size, width: numbers that enter the generator, pixels that leave it, channels before its last layer. Its
      images are enlarged to the target's size and stretched, per channel, to the range of the target's values.
    - guide_ramp: b = 2 / (1 + exp(-10 epoch / guide_ramp)) - 1 weighs the source classifier's say on generated images.
    - domain_weight, reversal: of the domain loss, and of its reversed gradient in the network; the domain
      discriminator learns ten times as fast (its biases twenty times).
    - head: the new classifier starts "fresh" (Xavier) or from the "source".

    Generated and target images share their BatchNorm statistics, in training mode. 0 epochs are the source network.
    The original standardises each batch; here the network gets images in the range it was trained for. Momentum is
    our choice: the original's settings do not name one.
    """

    name: ClassVar[str] = "sdda"
    paper: ClassVar[str] = "Kurmi et al., WACV 2021"
    needs: ClassVar[Needs] = Needs.UNLABELLED
    changes: ClassVar[str] = "everything"

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
        """Only settings that make sense."""
        self.at_least(batch_size=2, noise=1, width=1)
        if self.beta1 >= 1:
            raise FewshiftError(f"beta1={self.beta1} is too large: give less than 1")
        if self.guide_ramp <= 0:
            raise FewshiftError(f"guide_ramp={self.guide_ramp} is no number of epochs: give more than 0")
        if 0 < self.epochs <= self.start_epoch:
            raise FewshiftError(
                f"epochs={self.epochs} end before adaptation begins at start_epoch={self.start_epoch}: "
                f"give at least {self.start_epoch + 1}"
            )
        if self.size not in SIZES:
            raise FewshiftError(f"size={self.size} is no size the generator has: choose one of {SIZES}")
        if self.head not in HEADS:
            raise FewshiftError(f"head={self.head!r} is unknown: choose 'fresh' or 'source'")

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Generator and discriminator first, then the network with them."""
        unlabelled = target.need_unlabelled(self.name)
        network, head = prepare_unlabelled(network, unlabelled, self.name, pictures=True)
        if self.epochs == 0:
            return Fitted(network.with_tensors({}), notes={"epochs": 0})
        with private_randomness(seed) as generator, torch.enable_grad():
            workshop = Workshop(self, network, head, unlabelled)
            learner = Learner(self, network, head)
            curves = []
            for epoch in progress.track(range(self.epochs), "sdda"):
                losses: list[dict[str, Tensor]] = []
                for indices in minibatches(len(unlabelled), self.batch_size, generator):
                    if len(indices) < 2:
                        continue
                    real = like(learner.model, unlabelled.batch(indices, augmented=True))
                    made = workshop.step(real, guidance(epoch, self.guide_ramp), generator)
                    adapts = epoch >= self.start_epoch
                    losses.append(made.losses | (learner.step(made.images, made.labels, real) if adapts else {}))
                if epoch >= self.start_epoch:
                    learner.schedule.step()
                curves.append(_means(losses))
                if any(math.isnan(value) for value in curves[-1].values()):
                    raise FewshiftError(f"a loss became NaN in epoch {epoch + 1}: lower generator_lr or lr")
            predicted = learner.predicted(unlabelled, self.batch_size)
        names = {name: None for curve in curves for name in curve}
        return Fitted(
            network.with_tensors(learner.model.state_dict()),
            notes={
                "epochs": self.epochs,
                "start_epoch": self.start_epoch,
                "predicted": predicted,
                "curves": {name: [curve[name] for curve in curves if name in curve] for name in names},
                "parameters": learner.parameters,
            },
        )


# the generator, its discriminator and the classifier that guides it


@dataclass(frozen=True)
class Made:
    """A minibatch of generated images as the network takes them, the classes they were asked for, what it cost."""

    images: Tensor
    labels: Tensor
    losses: dict[str, Tensor]


class Workshop:
    """Generator, image discriminator and frozen source classifier."""

    def __init__(self, settings: SDDA, network: Network, head: str, unlabelled: Unlabelled) -> None:
        self._source, self._head = trainable(network, "source_frozen"), head
        self._range = Range.of(self._source, unlabelled, settings.batch_size)
        self._size, self._noise = settings.size, settings.noise
        self._classes = linear(self._source, head).weight.shape[0]
        like_images = self._range.middle
        channels = len(like_images)
        self.generator = Generator(self._noise, self._classes, channels, self._size, settings.width).to(like_images)
        self.discriminator = image_discriminator(channels, self._size, settings.width).to(like_images)
        betas = (settings.beta1, 0.999)
        self._makes = torch.optim.Adam(self.generator.parameters(), settings.generator_lr, betas)
        self._judges = torch.optim.Adam(self.discriminator.parameters(), settings.generator_lr, betas)

    def make(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(images in [-1, 1], labels) for classes drawn evenly."""
        labels = torch.randint(self._classes, (count,), generator=generator).to(self._range.middle.device)
        noise = torch.randn(count, self._noise, generator=generator).to(self._range.middle)
        made: Tensor = self.generator(noise, labels)
        return made, labels

    def step(self, real: Tensor, b: float, generator: torch.Generator) -> Made:
        """The discriminator learns to tell real from made, then the generator to fool it and to please the source."""
        made, labels = self.make(len(real), generator)
        verdicts = self.discriminator(resized(self._range.shrunk(real), (self._size, self._size)))
        judged = told_apart(verdicts, self.discriminator(made.detach()))
        _descend(judged, self._judges)

        images = self._range.stretched(resized(made, real.shape[2:]))
        _, logits = answers(self._source, self._head, images)
        cost = generator_loss(self.discriminator(made).flatten(), logits, labels, b)
        _descend(cost, self._makes)
        recognised = (logits.argmax(1) == labels).to(cost).mean()
        losses = {"discriminator_loss": judged, "generator_loss": cost, "recognised": recognised}
        return Made(images.detach(), labels, {name: value.detach() for name, value in losses.items()})


@dataclass(frozen=True)
class Range:
    """The values that the target's images take, per channel, and the way from there to [-1, 1] and back."""

    middle: Tensor  # (channels, 1, 1)
    half: Tensor

    @classmethod
    def of(cls, model: nn.Module, unlabelled: Unlabelled, size: int) -> Range:
        """From one pass over the target."""
        ends = []
        for _, images in unlabelled.batches(size):
            channels = like(model, images).transpose(0, 1).flatten(1)
            ends.append((channels.amin(1), channels.amax(1)))
        low = torch.stack([it for it, _ in ends]).amin(0)[:, None, None]
        high = torch.stack([it for _, it in ends]).amax(0)[:, None, None]
        return cls((low + high) / 2, ((high - low) / 2).clamp(min=1e-6))

    def shrunk(self, images: Tensor) -> Tensor:
        """Images of the target -> [-1, 1]."""
        return (images - self.middle) / self.half

    def stretched(self, images: Tensor) -> Tensor:
        """[-1, 1] -> the range of the target."""
        return self.middle + self.half * images


class Generator(nn.Module):
    """Noise and a class -> an image in [-1, 1], by transposed convolutions from 4x4 pixels on, as in DCGAN."""

    def __init__(self, noise: int, classes: int, channels: int, size: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        widths = [width * 2**i for i in reversed(range(_doublings(size)))]
        layers: list[nn.Module] = [nn.ConvTranspose2d(noise + classes, widths[0], 4, bias=False)]
        for before, after in pairwise(widths):
            layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, channels, 4, 2, 1), nn.Tanh()]
        self.layers = nn.Sequential(*layers).apply(_dcgan_weights)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """One image per row of noise, of the class asked for."""
        asked = F.one_hot(labels, self.classes).to(noise)
        made: Tensor = self.layers(torch.cat([noise, asked], 1)[:, :, None, None])
        return made


def image_discriminator(channels: int, size: int, width: int) -> nn.Sequential:
    """An image in [-1, 1] -> one logit, positive for real: the generator's mirror image."""
    widths = [width * 2**i for i in range(_doublings(size))]
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4), nn.Flatten(0)).apply(_dcgan_weights)


def guidance(epoch: int, ramp: float) -> float:
    """b = 2 / (1 + exp(-10 p)) - 1 with p = epoch / ramp, at most 2: from 0 to almost 1."""
    return 2 / (1 + math.exp(-10 * min(epoch / ramp, 2))) - 1


def generator_loss(verdicts: Tensor, logits: Tensor, labels: Tensor, b: float) -> Tensor:
    """-log D(made) + b [CE(source logits, labels) - log p(made)]; with b = 0 the labels are not looked at."""
    value = F.binary_cross_entropy_with_logits(verdicts, torch.ones_like(verdicts))
    if b == 0:
        return value
    return value + b * (F.cross_entropy(logits, labels) + unlikelihood(logits))


def unlikelihood(logits: Tensor) -> Tensor:
    """-log p(x) = log Z - LSE(logits(x)), averaged: the classifier taken as an energy model, on raw logits.

    log Z is estimated by the minibatch and held constant: with its gradient everything would cancel.
    """
    evidence = logits.logsumexp(1)
    return (evidence.detach().mean() - evidence).mean()


def told_apart(first: Tensor, second: Tensor) -> Tensor:
    """Binary cross-entropy of logits that should be positive for the first and negative for the second."""
    return F.binary_cross_entropy_with_logits(first, torch.ones_like(first)) + F.binary_cross_entropy_with_logits(
        second, torch.zeros_like(second)
    )


# the network that is adapted


class Learner:
    """The target's network, started from the source's, and its domain discriminator."""

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
        """Learn the labels of generated images, with features that do not tell them from the target's."""
        features, logits = answers(self.model, self._head, torch.cat([made, real]))
        classified = F.cross_entropy(logits[: len(made)], labels)
        domains = self.domain(gradient_reversed(features, self._reversal))
        domain = told_apart(domains[: len(made)], domains[len(made) :])
        _descend(classified + self._weight * domain, self._optimizer)
        return {"classifier_loss": classified.detach(), "domain_loss": domain.detach()}

    @torch.no_grad()
    def predicted(self, unlabelled: Unlabelled, size: int) -> list[int]:
        """How many images of the target are now predicted to be of each class."""
        self.model.eval()
        parts = [logits_of(self.model(like(self.model, images))) for _, images in unlabelled.batches(size)]
        logits = torch.cat(parts)
        if not torch.isfinite(logits).all():
            raise FewshiftError("the network's logits became NaN or infinite on the target: lower lr")
        return [int(count) for count in logits.argmax(1).bincount(minlength=logits.shape[1])]


def domain_discriminator(features: int) -> nn.Sequential:
    """Features -> one logit, positive for generated."""
    return nn.Sequential(nn.Linear(features, DOMAIN_WIDTH), nn.ReLU(), nn.Linear(DOMAIN_WIDTH, 1), nn.Flatten(0))


def gradient_reversed(features: Tensor, weight: float) -> Tensor:
    """The same values; on the way back the gradient is multiplied by -weight."""
    same = features.view_as(features)
    if same.requires_grad:
        same.register_hook(lambda gradient: -weight * gradient)
    return same


def xavier(layer: nn.Linear) -> None:
    """A fresh start for a linear layer or a 1x1 convolution."""
    with torch.no_grad():
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            layer.bias.zero_()


def answers(model: nn.Module, head: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """(features, raw logits): what enters the head and what leaves it, before anything the network adds to it."""
    with head_inputs(model, head) as seen:
        model(images)
    return seen[-1].flatten(1), linear(model, head)(seen[-1]).flatten(1)


def resized(images: Tensor, size: tuple[int, ...] | torch.Size) -> Tensor:
    """Images of another height and width; the same ones if they have it."""
    if images.shape[2:] == tuple(size):
        return images
    return F.interpolate(images, tuple(size), mode="bilinear", antialias=True)


def _descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def _doublings(size: int) -> int:
    return SIZES.index(size) + 1


def _dcgan_weights(layer: nn.Module) -> None:
    if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(layer.weight, 0, 0.02)
    elif isinstance(layer, nn.BatchNorm2d):
        nn.init.normal_(layer.weight, 1, 0.02)


def _means(losses: list[dict[str, Tensor]]) -> Mapping[str, float]:
    return {name: torch.stack([it[name] for it in losses]).mean().item() for name in losses[0]}

"""SDDA against its formulas written out: generator, discriminators and network after every step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fewshift import Target
from fewshift.core.support import Unlabelled
from fewshift.methods.sdda import SDDA
from tests.helpers.naive import (
    Formulas,
    HandAdam,
    HandSGD,
    Snapshot,
    assert_same_course,
    assert_same_network,
    every_step,
    gradients,
    negative_log_likelihood,
    track,
)
from tests.helpers.networks import make_support, make_tiny

IMAGES = make_support(shots=4).images.double()  # 12 images of 8x8 pixels: minibatches of 8 and 4
SIZE, NOISE, CLASSES = 8, 5, 3
MAKER = ["first", "gamma", "beta", "last", "shift"]
CRITIC = ["first", "shift", "last", "end"]
SIDES = ["first", "last", "shift", "end"]  # weights before biases: each have a rate of their own


@contextmanager
def beginnings() -> Iterator[list[Snapshot]]:
    """After the block: what each optimiser trained, as it was before its first step, which is random."""
    starts: dict[int, Snapshot] = {}

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        starts.setdefault(id(optimizer), [tensor.detach().clone() for tensor in tensors])

    handle = register_optimizer_step_pre_hook(note)
    collected: list[Snapshot] = []
    try:
        yield collected
    finally:
        handle.remove()
        collected.extend(starts.values())


def standardised(z: Tensor) -> Tensor:
    mean = z.mean((0, 2, 3), keepdim=True)
    return (z - mean) / ((z - mean).square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()


def made_images(maker: dict[str, Tensor], noise: Tensor, labels: Tensor) -> Tensor:
    """DCGAN from 4x4 to 8x8 pixels; the class enters beside the noise, tanh ends it."""
    wanted = torch.tensor([[float(label == c) for c in range(CLASSES)] for label in labels.tolist()]).double()
    hidden = F.conv_transpose2d(torch.cat([noise, wanted], 1)[:, :, None, None], maker["first"])
    hidden = standardised(hidden) * maker["gamma"].view(1, -1, 1, 1) + maker["beta"].view(1, -1, 1, 1)
    return F.conv_transpose2d(hidden.clamp(min=0), maker["last"], maker["shift"], stride=2, padding=1).tanh()


def realness(critic: dict[str, Tensor], images: Tensor) -> Tensor:
    hidden = F.conv2d(images, critic["first"], critic["shift"], stride=2, padding=1)
    hidden = torch.where(hidden > 0, hidden, 0.2 * hidden)
    return F.conv2d(hidden, critic["last"], critic["end"]).flatten()


def told_apart(first: Tensor, second: Tensor) -> Tensor:
    """-log sigmoid for the first and -log (1 - sigmoid) for the second."""
    return torch.log(1 + torch.exp(-first)).mean() + torch.log(1 + torch.exp(second)).mean()


class NaiveSDDA:
    """Generator and critic in every epoch, the network from `start` on; each begins with the tensors it is given."""

    def __init__(self, method: SDDA, starts: list[Snapshot]) -> None:
        self.method, self.steps = method, list[Snapshot]()
        critic, maker, network = starts
        self.source, self.net = Formulas(make_tiny()), Formulas(make_tiny())
        self.maker, self.critic = dict(zip(MAKER, maker, strict=True)), dict(zip(CRITIC, critic, strict=True))
        self.names = self.net.names("conv", "bn", "fc")
        self.net.tensors |= dict(zip(self.names, network[:8], strict=True))
        self.sides = dict(zip(SIDES, network[8:], strict=True))
        for tensors, names in ((self.maker, MAKER), (self.critic, CRITIC), (self.sides, SIDES)):
            track(tensors, names)
        track(self.net.tensors, self.names)
        low, high = IMAGES.amin((0, 2, 3), keepdim=True), IMAGES.amax((0, 2, 3), keepdim=True)
        self.middle, self.half = (low + high) / 2, (high - low) / 2
        self.critic_optimizer, self.maker_optimizer = HandAdam(0.5), HandAdam(0.5)
        self.body, self.weights, self.biases = (HandSGD(method.momentum) for _ in range(3))

    def generate(self, real: Tensor, b: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One step of the critic, one of the generator; the images from before the generator's step."""
        labels = torch.randint(CLASSES, (len(real),), generator=generator)
        noise = torch.randn(len(real), NOISE, generator=generator).double()
        made, rate = made_images(self.maker, noise, labels), self.method.generator_lr
        scaled = (real - self.middle) / self.half
        loss = told_apart(realness(self.critic, scaled), realness(self.critic, made.detach()))
        self.critic_optimizer.step(self.critic, gradients(loss, self.critic, CRITIC), rate)
        self.steps.append([self.critic[name].detach().clone() for name in CRITIC])

        images = self.middle + self.half * made
        logits = self.source(images)  # the source's own statistics: it never changes
        loss = torch.log(1 + torch.exp(-realness(self.critic, made))).mean()
        likelihood = torch.log(torch.exp(logits).sum(1)).mean()  # the normaliser has no gradient of its own
        loss = loss + b * (negative_log_likelihood(logits, labels) - likelihood)
        self.maker_optimizer.step(self.maker, gradients(loss, self.maker, MAKER), rate)
        self.steps.append([self.maker[name].detach().clone() for name in MAKER])
        return images.detach(), labels

    def adapt(self, made: Tensor, labels: Tensor, real: Tensor, epoch: int) -> None:
        """Learn the labels of generated images, and climb the loss of whoever tells their features from real ones."""
        self.net.training = True
        features = self.net.features(torch.cat([made, real]))
        count, weight = len(made), self.method.domain_weight
        hidden = (features @ self.sides["first"].T + self.sides["shift"]).clamp(min=0)
        sides = (hidden @ self.sides["last"].T + self.sides["end"]).flatten()
        apart = told_apart(sides[:count], sides[count:])
        labelled = negative_log_likelihood(self.net.head(features)[:count], labels)
        down = gradients(labelled, self.net.tensors, self.names)
        kept = self.net.names("conv", "bn")
        up = gradients(apart, self.net.tensors, kept)
        other = gradients(weight * apart, self.sides, SIDES)
        for name in kept:
            down[name] = down[name] - self.method.reversal * weight * up[name]
        rate = self.method.lr * (1 + 0.001 * epoch) ** -0.75
        self.body.step(self.net.tensors, down, rate)
        self.weights.step(self.sides, {name: other[name] for name in ("first", "last")}, 10 * rate)
        self.biases.step(self.sides, {name: other[name] for name in ("shift", "end")}, 20 * rate)
        self.steps.append([*self.net.snapshot(self.names), *(self.sides[name].detach().clone() for name in SIDES)])

    def fit(self) -> Formulas:
        generator = torch.Generator().manual_seed(0)
        for epoch in range(self.method.epochs):
            b = 2 / (1 + math.exp(-10 * min(epoch / self.method.guide_ramp, 2))) - 1
            for indices in torch.randperm(len(IMAGES), generator=generator).split(SIZE):
                made, labels = self.generate(IMAGES[indices], b, generator)
                if epoch >= self.method.start_epoch:
                    self.adapt(made, labels, IMAGES[indices], epoch)
        return self.net


@pytest.mark.parametrize("settings", [{}, {"reversal": 0.4, "domain_weight": 0.7, "head": "source"}])
def test_every_step_is_that_of_the_formulas(settings):
    method = SDDA(
        epochs=4, start_epoch=2, batch_size=SIZE, size=8, width=4, noise=NOISE, guide_ramp=4, lr=0.02, **settings
    )
    with beginnings() as starts, every_step() as steps:
        predictor = method.adapt(make_tiny().double(), Target(unlabelled=Unlabelled(IMAGES)))
    naive = NaiveSDDA(method, starts)
    expected = naive.fit()
    assert_same_course(steps, naive.steps)
    assert_same_network(predictor, expected)

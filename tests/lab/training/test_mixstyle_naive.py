"""MixStyle and plain training against their formulas written out: every weight after every step of the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift import Preprocess
from fewshift.lab.training import ERM, MixStyle
from fewshift.lab.training.batches import order, stage
from fewshift.lab.training.recipes import Recipe
from fewshift.lab.training.trainer import train
from tests.helpers.naive import (
    TOLERANCE,
    HandSGD,
    Snapshot,
    assert_same_course,
    every_step,
    gradients,
    negative_log_likelihood,
    track,
)
from tests.helpers.training import STEPS, make_sources, make_staged

RECIPE = Recipe(
    epochs=3, lr=0.05, batch_size=8, schedule="cosine", weight_decay=1e-3, augment="none", domains_per_batch=2
)
LAYERS = [f"layer{number}" for number in range(1, 5)]


class InDouble(Preprocess):
    """The same steps in float64."""

    def normalise(self, pixels: Tensor) -> Tensor:
        return (pixels.double() / 255 - 0.5) / 0.25


SOURCES = replace(make_sources(), preprocess=InDouble(**STEPS.to_json()))


@dataclass
class Styles:
    """mu and sigma of each image and channel, through which no gradient flows."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Styles:
        mean, deviation = torch.empty_like(features[:, :, 0, 0]), torch.empty_like(features[:, :, 0, 0])
        for image in range(len(features)):
            for channel in range(features.shape[1]):
                pixels = features[image, channel].detach().flatten()
                middle = pixels.sum() / len(pixels)
                mean[image, channel] = middle
                unbiased = (pixels - middle).square().sum() / (len(pixels) - 1)
                deviation[image, channel] = (unbiased + 1e-6).sqrt()
        return cls(mean, deviation)


def partners_of_the_other_half(domains: Tensor) -> list[int]:
    """Each half of the batch is of one domain, and mixed with the other half, shuffled."""
    halves = [[i for i, own in enumerate(domains.tolist()) if own == domain] for domain in (0, 1)]
    partners = [0] * len(domains)
    for mine, others in (halves, halves[::-1]):
        for position, draw in zip(mine, torch.randperm(len(others)).tolist(), strict=True):
            partners[position] = others[draw]
    return partners


def partners_at_random(domains: Tensor) -> list[int]:
    return torch.randperm(len(domains)).tolist()


def mixed(features: Tensor, partners: list[int], shares: Tensor) -> Tensor:
    """x' = sigma_mix (x - mu_i) / sigma_i + mu_mix with one lambda for each image."""
    styles, rows = Styles.of(features), []
    for i, (j, share) in enumerate(zip(partners, shares.tolist(), strict=True)):
        mean = share * styles.mean[i] + (1 - share) * styles.mean[j]
        deviation = share * styles.deviation[i] + (1 - share) * styles.deviation[j]
        content = (features[i] - styles.mean[i, :, None, None]) / styles.deviation[i, :, None, None]
        rows.append(deviation[:, None, None] * content + mean[:, None, None])
    return torch.stack(rows)


class NaiveTraining:
    """The staged network in training mode, SGD with momentum and decay, a cosine rate by the epoch."""

    def __init__(self, probability: float, after: list[str], partners=partners_of_the_other_half) -> None:
        self.probability, self.after, self.partners = probability, after, partners
        self.tensors = {name: tensor.clone().double() for name, tensor in make_staged().state_dict().items()}
        self.names = [name for name, _ in make_staged().named_parameters()]
        self.steps, self.mixes = list[Snapshot](), 0

    def forward(self, images: Tensor, domains: Tensor) -> Tensor:
        for name in LAYERS:
            stride = 2 if name == "layer3" else 1
            weight, bias = self.tensors[f"{name}.0.weight"], self.tensors[f"{name}.0.bias"]
            z = F.conv2d(images, weight, bias, stride, padding=1)
            count = z.numel() // z.shape[1]
            mean = z.mean((0, 2, 3), keepdim=True)
            var = (z - mean).square().mean((0, 2, 3), keepdim=True)
            gamma, beta = (self.tensors[f"{name}.1.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
            images = (gamma * (z - mean) / (var + 1e-5).sqrt() + beta).clamp(min=0)
            for part, batch in (("mean", mean), ("var", var * count / (count - 1))):
                key = f"{name}.1.running_{part}"
                self.tensors[key] = 0.9 * self.tensors[key] + 0.1 * batch.detach().flatten()
            if name in self.after and float(torch.rand(())) < self.probability:
                partners = self.partners(domains)
                images = mixed(images, partners, torch.distributions.Beta(0.1, 0.1).sample((len(domains),)))
                self.mixes += 1
        return images.mean((2, 3)) @ self.tensors["fc.weight"].T + self.tensors["fc.bias"]

    def fit(self) -> NaiveTraining:
        optimizer = HandSGD(0.9, 1e-3)
        track(self.tensors, self.names)
        for epoch in range(3):
            rate = 0.05 / 2 * (1 + math.cos(math.pi * epoch / 3))
            with torch.random.fork_rng():
                torch.manual_seed(stage(0, epoch + 1))  # the trainer's random numbers, in the order of their use
                for indices in order(SOURCES, RECIPE, 0, epoch):
                    pixels, labels = SOURCES.train.batch(indices)
                    images = (pixels[:, :, 1:9, 1:9].double() / 255 - 0.5) / 0.25
                    logits = self.forward(images, SOURCES.domains[indices])
                    slopes = gradients(negative_log_likelihood(logits, labels), self.tensors, self.names)
                    optimizer.step(self.tensors, slopes, rate)
                    self.steps.append([self.tensors[name].detach().clone() for name in self.names])
        return self


CASES = {
    "erm": (ERM(), (0.0, [])),
    "mixstyle": (MixStyle(), (0.5, LAYERS[:3])),
    "mixstyle after two stages, always": (MixStyle(layers="layer1,layer2", probability=1.0), (1.0, LAYERS[:2])),
    "mixstyle at random": (MixStyle(mix="random"), (0.5, LAYERS[:3], partners_at_random)),
}


@pytest.mark.parametrize(("algorithm", "settings"), CASES.values(), ids=CASES)
def test_every_step_is_that_of_the_formulas(algorithm, settings):
    naive = NaiveTraining(*settings).fit()
    with every_step() as steps:
        trained = train(make_staged().double(), SOURCES, RECIPE, algorithm).model.state_dict()
    assert_same_course(steps, naive.steps)
    assert bool(naive.mixes) == isinstance(algorithm, MixStyle)
    for name, tensor in naive.tensors.items():
        if "num_batches" not in name:
            assert float((trained[name] - tensor.detach()).abs().max()) < TOLERANCE, name

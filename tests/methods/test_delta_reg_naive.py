"""DELTA against its formulas written out: the attention and the head it needs, and every step with the penalty."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fewshift import Target
from fewshift.methods.delta_reg import DeltaReg
from tests.helpers.naive import (
    Formulas,
    HandSGD,
    Snapshot,
    assert_same_course,
    assert_same_network,
    every_step,
    gradients,
    negative_log_likelihood,
    orders,
    track,
)
from tests.helpers.networks import make_support, make_tiny

SUPPORT = make_support(shots=12)  # 36 images: the attention looks at 32 and 4
EPOCHS, SIZE, RATE = 2, 16, 0.02


class NaiveDelta:
    """The three stages; `steps` are those of both trainings."""

    def __init__(self, watched: list[str], alpha: float, beta: float) -> None:
        self.watched, self.alpha, self.beta = watched, alpha, beta
        self.source, self.steps = Formulas(make_tiny()), list[Snapshot]()

    def probed(self) -> Formulas:
        """The head alone for ten epochs by SGD; the rate falls from 0.01 by a factor of ten every six epochs."""
        net, optimizer = self.source.copy(), HandSGD(0.9, 1e-4)
        names = net.names("fc")
        track(net.tensors, names)
        for number, epoch in enumerate(orders(len(SUPPORT), 32, 10)):
            for indices in epoch:
                loss = negative_log_likelihood(net(SUPPORT.images[indices]), SUPPORT.labels[indices])
                optimizer.step(net.tensors, gradients(loss, net.tensors, names), 0.01 * 0.1 ** (number / 6))
                self.steps.append(net.snapshot(names))
        return net

    @torch.no_grad()
    def attention(self, net: Formulas) -> dict[str, list[float]]:
        """For each filter how much the loss rises when its weights are zero: z-scores, divided by five, softmax."""
        batches = torch.randperm(len(SUPPORT), generator=torch.Generator().manual_seed(0))[: 4 * 32].split(32)
        weights = {}
        for layer in self.watched:
            filters = len(net.tensors[f"{layer}.weight"])
            rises = [0.0] * filters
            for indices in batches:
                images, labels = SUPPORT.images[indices], SUPPORT.labels[indices]
                base = negative_log_likelihood(net(images), labels).item()
                for channel in range(filters):
                    broken = net.copy()
                    broken.tensors[f"{layer}.weight"][channel] = 0
                    rise = negative_log_likelihood(broken(images), labels).item() - base
                    rises[channel] += rise / len(batches)
            mean = sum(rises) / filters
            spread = math.sqrt(sum((rise - mean) ** 2 for rise in rises) / filters)
            powers = [math.exp((rise - mean) / spread / 5) for rise in rises]
            weights[layer] = [power / sum(powers) for power in powers]
        return weights

    def omega(self, net: Formulas, images: Tensor, attention: dict[str, list[float]]) -> Tensor:
        """1/2 sum of C a_c |map - source's map|^2 / (H W) over layers, images and channels; after `net(images)`."""
        with torch.no_grad():
            self.source(images)
        total = torch.zeros((), dtype=torch.float64)
        for layer, weights in attention.items():
            own, theirs = net.maps[layer], self.source.maps[layer]
            for channel, weight in enumerate(weights):  # summed over the images, not averaged
                gap = (own[:, channel] - theirs[:, channel]).square().sum() / own[0, 0].numel()
                total = total + len(weights) * weight * gap / 2
        return total

    def fit(self) -> Formulas:
        attention = self.attention(self.probed())
        net, optimizer = self.source.copy(), HandSGD(0.9)
        names = net.names("conv", "bn", "fc")
        track(net.tensors, names)
        net.training = True
        for epoch in orders(len(SUPPORT), SIZE, EPOCHS):
            for indices in epoch:
                images = SUPPORT.images[indices]
                loss = negative_log_likelihood(net(images), SUPPORT.labels[indices])
                loss = loss + self.alpha * self.omega(net, images, attention)
                loss = loss + self.beta / 2 * sum(net.tensors[name].square().sum() for name in net.names("fc"))
                optimizer.step(net.tensors, gradients(loss, net.tensors, names), RATE)
                self.steps.append(net.snapshot(names))
        return net


CASES = {
    "as it comes": ({}, ["conv2"], 0.01, 0.01),
    "two layers, strongly held": ({"layers": "conv1,conv2", "alpha": 0.1, "beta": 0.3}, ["conv1", "conv2"], 0.1, 0.3),
}


@pytest.mark.parametrize(("settings", "watched", "alpha", "beta"), CASES.values(), ids=CASES)
def test_every_step_is_that_of_the_formulas(settings, watched, alpha, beta):
    naive = NaiveDelta(watched, alpha, beta)
    expected = naive.fit()
    method = DeltaReg(epochs=EPOCHS, lr=RATE, batch_size=SIZE, **settings)
    with every_step() as steps:
        predictor = method.adapt(make_tiny().double(), Target(SUPPORT))
    assert_same_course(steps, naive.steps)
    assert_same_network(predictor, expected)

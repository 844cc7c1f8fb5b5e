"""SFDA against its formulas written out: the prototypes of every memory, and every weight after every step."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from torch import Tensor

from fewshift import Target
from fewshift.core.support import Unlabelled
from fewshift.methods.sfda import SFDA
from tests.helpers.naive import (
    Formulas,
    HandSGD,
    Snapshot,
    assert_same_course,
    assert_same_network,
    every_step,
    negative_log_likelihood,
    orders,
    track,
)
from tests.helpers.networks import make_support, make_tiny
from tests.methods.test_sfda import naive_nearest, naive_prototypes, naive_threshold

IMAGES = make_support(shots=7).images  # 21 images
STEPS, EVERY, RATE, HEAD_RATE = 9, 4, 0.01, 0.05
HELPER = ["helper.weight", "helper.bias"]  # the head that learns from the source's labels


class NaiveSFDA:
    """A body and two heads; the share of the prototypes' loss grows with the steps."""

    def __init__(self, size: int, most: int) -> None:
        self.size, self.most = size, most
        self.net, self.steps = Formulas(make_tiny()), list[Snapshot]()
        with torch.no_grad():
            self.source_labels = self.net(IMAGES).argmax(1)
        for name in ("weight", "bias"):
            self.net.tensors[f"helper.{name}"] = self.net.tensors[f"fc.{name}"].clone()
        self.names = [*self.net.names("conv", "bn", "fc"), *HELPER]
        track(self.net.tensors, self.names)

    @torch.no_grad()
    def prototypes(self) -> list[list[list[float]]]:
        """For each class the features of its confident images, repeated until all classes have equally many."""
        self.net.training = False
        features = self.net.features(IMAGES)
        powers = torch.exp(self.net.head(features))
        p = powers / powers.sum(1, keepdim=True)
        h = -(p * torch.log(p)).sum(1) / math.log(3)
        chosen = naive_prototypes(p, h, naive_threshold(p.argmax(1), h, 3), self.most)
        return [[features[image].tolist() for image in row] for row in chosen]

    def loss(self, indices: Tensor, memory: list[list[list[float]]], share: float) -> Tensor:
        self.net.training = True
        features = self.net.features(IMAGES[indices])
        helper = features @ self.net.tensors["helper.weight"].T + self.net.tensors["helper.bias"]
        value = (1 - share) * negative_log_likelihood(helper, self.source_labels[indices])
        logits = self.net.head(features)
        for number, feature in enumerate(features.tolist()):
            label, confident = naive_nearest(feature, memory)
            if confident and share:
                one = negative_log_likelihood(logits[number : number + 1], torch.tensor([label]))
                value = value + share * one / len(indices)  # of all images, not of the confident ones
        return value

    def fit(self) -> Formulas:
        body, heads = HandSGD(0.9, 5e-4, nesterov=True), HandSGD(0.9, 5e-4, nesterov=True)
        stream = (batch for epoch in orders(len(IMAGES), self.size, STEPS) for batch in epoch if len(batch) > 1)
        for t, indices in enumerate(islice(stream, STEPS)):
            if t % EVERY == 0:
                memory = self.prototypes()
            share = 2 / (1 + math.exp(-10 * t / (STEPS / 2))) - 1
            tensors, names = self.net.tensors, self.names
            loss = self.loss(indices, memory, share)
            slopes = torch.autograd.grad(loss, [tensors[name] for name in names], allow_unused=True)
            decay = (1 + 10 * t / STEPS) ** -0.75
            known = {name: slope for name, slope in zip(names, slopes, strict=True) if slope is not None}
            if share:  # a minibatch without a confident image has a gradient of zeros there
                known |= {n: torch.zeros_like(tensors[n]) for n in ("fc.weight", "fc.bias") if n not in known}
            body.step(tensors, {n: g for n, g in known.items() if n.startswith(("conv", "bn"))}, RATE * decay)
            heads.step(tensors, {n: g for n, g in known.items() if n.startswith(("fc", "helper"))}, HEAD_RATE * decay)
            self.steps.append(self.net.snapshot(names))
        for name in HELPER:
            del self.net.tensors[name]
        return self.net


@pytest.mark.parametrize(("size", "most"), [(32, 100), (8, 100), (10, 2)])
def test_every_step_is_that_of_the_formulas(size, most):
    naive = NaiveSFDA(size, most)
    expected = naive.fit()
    method = SFDA(steps=STEPS, memory_every=EVERY, max_prototypes=most, lr=RATE, head_lr=HEAD_RATE, batch_size=size)
    with every_step() as steps:
        fitted = method.fit(make_tiny().double(), Target(unlabelled=Unlabelled(IMAGES)))
    assert_same_course(steps, naive.steps)
    assert_same_network(fitted.predictor, expected)
    assert 0 < min(fitted.notes["confident"]) < 1  # the filter lets some images pass

"""SHOT against its formulas written out: labels of every epoch, and every weight after every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewshift import Target
from fewshift.core.support import Unlabelled
from fewshift.methods.shot import SHOT
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
from tests.methods.test_shot import naive_labels

IMAGES = make_support(shots=7).images  # 21 images: minibatches of 8, 8 and 5; of 10, 10 and a single one
EPOCHS = 3


def softmax(logits: Tensor) -> Tensor:
    return torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)


def uncertainty(p: Tensor) -> Tensor:
    """-sum_c p_c log(p_c + 1e-5)."""
    return -(p * torch.log(p + 1e-5)).sum()


class NaiveSHOT:
    """Label all images in evaluation mode, train all but the head for an epoch in training mode, label again."""

    def __init__(self, rate: float, size: int, *, weight: float = 0.3, warmup: int = 0, information: bool = True):
        self.rate, self.size, self.weight, self.warmup, self.information = rate, size, weight, warmup, information
        self.net, self.steps = Formulas(make_tiny()), list[Snapshot]()

    def labels(self) -> Tensor:
        self.net.training = False
        with torch.no_grad():
            features = self.net.features(IMAGES)
            return torch.tensor(naive_labels(features, softmax(self.net.head(features)), 0, rounds=2))

    def loss(self, indices: Tensor, labels: Tensor | None) -> Tensor:
        logits = self.net(IMAGES[indices])
        p = softmax(logits)
        value = torch.zeros((), dtype=torch.float64)
        if self.information:
            value = value + torch.stack([uncertainty(row) for row in p]).mean() - uncertainty(p.mean(0))
        return value if labels is None else value + self.weight * negative_log_likelihood(logits, labels[indices])

    def fit(self) -> Formulas:
        names, optimizer = self.net.names("conv", "bn"), HandSGD(0.9, 1e-3, nesterov=True)
        track(self.net.tensors, names)
        epochs = [
            [indices for indices in epoch if len(indices) > 1] for epoch in orders(len(IMAGES), self.size, EPOCHS)
        ]
        total = sum(len(epoch) for epoch in epochs)
        for number, epoch in enumerate(epochs):
            labels = self.labels() if number >= self.warmup else None
            self.net.training = True
            for indices in epoch:
                slopes = gradients(self.loss(indices, labels), self.net.tensors, names)
                rate = self.rate * (1 + 10 * len(self.steps) / total) ** -0.75
                optimizer.step(self.net.tensors, slopes, rate)
                self.steps.append(self.net.snapshot(names))
        return self.net


CASES = {
    "as it comes": ({}, {}, 8),
    "a last minibatch of one image": ({}, {}, 10),
    "one epoch without labels": ({"warmup_epochs": 1}, {"warmup": 1}, 8),
    "labels alone": ({"information": False, "pseudo_weight": 0.8}, {"information": False, "weight": 0.8}, 8),
}


@pytest.mark.parametrize(("settings", "options", "size"), CASES.values(), ids=CASES)
def test_every_step_is_that_of_the_formulas(settings, options, size):
    naive = NaiveSHOT(0.05, size, **options)
    expected = naive.fit()
    method = SHOT(epochs=EPOCHS, lr=0.05, batch_size=size, **settings)
    with every_step() as steps:
        predictor = method.adapt(make_tiny().double(), Target(unlabelled=Unlabelled(IMAGES)))
    assert_same_course(steps, naive.steps)
    assert_same_network(predictor, expected)

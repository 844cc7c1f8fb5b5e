"""Tent against its formulas written out: every answer, and weight and bias after every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewshift import Target, Tent
from tests.helpers.naive import TOLERANCE, Formulas, HandAdam, HandSGD, gradients, track
from tests.helpers.networks import make_support, make_tiny

STREAM = [make_support(shots, seed=seed).images for seed, shots in ((10, 5), (11, 3), (12, 5), (13, 1))]
OPTIMIZERS = {"adam": HandAdam, "sgd": lambda: HandSGD(0.9, nesterov=True)}


def mean_entropy(logits: Tensor) -> Tensor:
    """The mean over images of -sum_c p_c log p_c."""
    values = []
    for row in logits:
        p = torch.exp(row) / torch.exp(row).sum()
        values.append(-(p * torch.log(p)).sum())
    return torch.stack(values).mean()


class NaiveTent:
    """Batch statistics in every pass, one step on gamma and beta after it; running statistics play no part."""

    def __init__(self, optimizer: str, rate: float, steps: int, *, episodic: bool) -> None:
        self.make, self.rate, self.steps, self.episodic = OPTIMIZERS[optimizer], rate, steps, episodic
        self.begin()

    def begin(self) -> None:
        self.net, self.optimizer = Formulas(make_tiny(), momentum=0.0), self.make()
        self.net.training = True
        track(self.net.tensors, self.net.names("bn"))

    def answer(self, images: Tensor) -> Tensor:
        if self.episodic:
            self.begin()
        for _ in range(self.steps):
            logits = self.net(images)
            slopes = gradients(mean_entropy(logits), self.net.tensors, self.net.names("bn"))
            self.optimizer.step(self.net.tensors, slopes, self.rate)
        return logits.detach()  # from before the last step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("rate", "steps", "episodic"), [(1e-3, 1, False), (0.05, 1, False), (0.05, 3, False), (0.05, 2, True)]
)
def test_every_batch_is_that_of_the_formulas(optimizer, rate, steps, episodic):
    naive = NaiveTent(optimizer, rate, steps, episodic=episodic)
    ours = Tent(optimizer=optimizer, lr=rate, steps=steps, episodic=episodic).adapt(
        make_tiny().double(), Target(make_support())
    )
    for images in STREAM:
        answer = naive.answer(images)
        assert float((ours(images.double()) - answer).abs().max()) < TOLERANCE
        for name, tensor in naive.net.tensors.items():
            mine = ours.model.state_dict()[name]
            assert float((mine - tensor.detach()).abs().max()) < TOLERANCE, name  # all others are the source's
    assert naive.net.snapshot(["bn2.bias"])[0].sub(make_tiny().bn2.bias.detach()).abs().max() > 1e-4

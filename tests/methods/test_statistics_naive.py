"""Test-time BN, alpha-BN and AdaBN against their formulas written out, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewshift import AdaBN, Target, TestTimeBN
from fewshift.core.support import Unlabelled
from fewshift.methods.alpha_bn import AlphaBN
from tests.helpers.naive import EPS, TOLERANCE, Formulas, orders
from tests.helpers.networks import make_support, make_tiny

STREAM = [make_support(shots, seed=seed).images for seed, shots in ((4, 5), (5, 2), (6, 1))]
MANY = torch.cat(STREAM)  # 24 images


class Blended(Formulas):
    """Every batch is normalised with a share of the source's mean and variance; the rest is the batch's own."""

    def __init__(self, share, *, unbiased: bool) -> None:
        super().__init__(make_tiny())
        self.share, self.unbiased = share, unbiased

    def normalised(self, layer: str, z: Tensor) -> Tensor:
        old = self.share(len(z))
        count = z.numel() // z.shape[1]
        mean = z.sum((0, 2, 3)) / count
        var = (z - mean.view(1, -1, 1, 1)).square().sum((0, 2, 3)) / (count - self.unbiased)
        kept = {name: self.tensors[f"{layer}.running_{name}"] for name in ("mean", "var")}
        mean, var = old * kept["mean"] + (1 - old) * mean, old * kept["var"] + (1 - old) * var
        scale = self.tensors[f"{layer}.weight"] / (var + EPS[layer]).sqrt()
        shift = self.tensors[f"{layer}.bias"] - scale * mean
        return scale.view(1, -1, 1, 1) * z + shift.view(1, -1, 1, 1)


STREAMING = {
    "testtime-bn": (TestTimeBN(), Blended(lambda count: 0.0, unbiased=False)),
    "testtime-bn with a prior": (TestTimeBN(prior=16), Blended(lambda count: 16 / (16 + count), unbiased=True)),
    "alpha-bn": (AlphaBN(), Blended(lambda count: 0.9, unbiased=False)),
}


@pytest.mark.parametrize(("method", "naive"), STREAMING.values(), ids=STREAMING)
@torch.no_grad()
def test_every_answer_is_that_of_the_formulas(method, naive):
    ours = method.adapt(make_tiny().double(), Target(make_support()))
    for images in STREAM:
        assert float((ours(images.double()) - naive(images)).abs().max()) < TOLERANCE


def pooled(images: Tensor) -> Formulas:
    net = Formulas(make_tiny())
    net.use_statistics_of(images)
    return net


def averaged(weight) -> Formulas:
    """Batches of ten, each normalised with its own statistics; the n-th counts by weight(n) against those before."""
    net = Formulas(make_tiny())
    net.training = True
    (batches,) = orders(len(MANY), 10, 1)
    for number, indices in enumerate(batches):
        net.momentum = weight(number)
        net.features(MANY[indices])
    net.training = False
    return net


SUPPORT, ALL = Target(make_support()), Target(unlabelled=Unlabelled(MANY))
ADABN = {
    "the support": (AdaBN(), SUPPORT, lambda: pooled(make_support().images)),
    "all images": (AdaBN(statistics="exact", batch_size=10), ALL, lambda: pooled(MANY)),
    "averages of batches": (AdaBN(batch_size=10), ALL, lambda: averaged(lambda number: 1 / (number + 1))),
    "moving averages": (
        AdaBN(statistics="ema", momentum=0.3, batch_size=10),
        ALL,
        lambda: averaged(lambda number: 0.3 if number else 1.0),
    ),
}


@pytest.mark.parametrize(("method", "target", "naive"), ADABN.values(), ids=ADABN)
@torch.no_grad()
def test_adabn_has_the_statistics_of_the_formulas(method, target, naive):
    queries = make_support(seed=3).images
    answers = method.adapt(make_tiny().double(), target)(queries.double())
    assert float((answers - naive()(queries)).abs().max()) < TOLERANCE
    assert float((answers - Formulas(make_tiny())(queries)).abs().max()) > 0.01

"""The fine-tuning family, Late Fusion and LP-FT against their formulas written out: every weight after every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fewshift import Target
from fewshift.methods.finetune import L2, FinetuneBN, FinetuneFeatures, FinetuneHead
from fewshift.methods.l2sp import L2SP
from fewshift.methods.late_fusion import LateFusion
from fewshift.methods.lp_ft import LPFT
from tests.helpers.naive import (
    TOLERANCE,
    Formulas,
    HandAdam,
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

SUPPORT = make_support(shots=4)  # 12 images: minibatches of 5, 5 and 2
EPOCHS, SIZE, RATE = 3, 5, 0.02


def penalty(net: Formulas, start: Formulas, alpha: float, beta: float, scope: str, head: str) -> Tensor:
    """(alpha / 2) sum over the body of (w - w0)^2 + (beta / 2) sum over the head of w^2."""
    total = torch.zeros((), dtype=torch.float64)
    for name in net.names("conv", "bn", "fc"):
        if scope == "weights" and name not in ("conv1.weight", "conv2.weight", "fc.weight"):
            continue  # the original leaves out biases and BatchNorm
        anchored = head == "sp" or not name.startswith("fc")
        away = net.tensors[name] - start.tensors[name] if anchored else net.tensors[name]
        total = total + (alpha if anchored else beta) / 2 * (away * away).sum()
    return total


@dataclass(frozen=True)
class Case:
    """What the formulas say: which tensors, which statistics, which optimiser, which addition to the loss."""

    method: object
    parts: tuple[str, ...]
    statistics: str = "batch"
    decay: float = 4e-4
    adam: bool = False
    sp: dict | None = None


SETTINGS = {"epochs": EPOCHS, "lr": RATE, "batch_size": SIZE}
ALL = ("conv", "bn", "fc")
CASES = {
    "finetune-bn": Case(FinetuneBN(**SETTINGS), ("bn",), "support", adam=True),
    "finetune-bn in training mode": Case(FinetuneBN(bn="train_running", **SETTINGS), ("bn",), adam=True),
    "finetune-head": Case(FinetuneHead(**SETTINGS), ("fc",), "source"),
    "finetune-features": Case(FinetuneFeatures(**SETTINGS), ("conv", "bn")),
    "l2": Case(L2(**SETTINGS), ALL),
    "l2 with a strong decay": Case(L2(weight_decay=0.3, **SETTINGS), ALL, decay=0.3),
    "l2 on the source's statistics": Case(L2(bn="source_frozen", **SETTINGS), ALL, "source"),
    "l2-sp": Case(L2SP(**SETTINGS), ALL, decay=0, sp={"alpha": 4e-4, "beta": 4e-4, "scope": "all", "head": "l2"}),
    "l2-sp as released with DELTA": Case(
        L2SP(**L2SP.PRESETS["delta_code"], **SETTINGS),
        ALL,
        decay=0,
        sp={"alpha": 0.01, "beta": 0.01, "scope": "all", "head": "l2"},
    ),
    "l2-sp as released": Case(
        L2SP(**L2SP.PRESETS["original"], **SETTINGS),
        ALL,
        decay=0,
        sp={"alpha": 0.1, "beta": 0.01, "scope": "weights", "head": "l2"},
    ),
    "l2-sp with a head that stays near": Case(
        L2SP(alpha=0.7, beta=0.2, head="sp", **SETTINGS),
        ALL,
        decay=0,
        sp={"alpha": 0.7, "beta": 0.2, "scope": "all", "head": "sp"},
    ),
}


def naive(case: Case) -> tuple[Formulas, list[Snapshot]]:
    net = Formulas(make_tiny())
    start, names = net.copy(), net.names(*case.parts)
    if case.statistics == "support":
        net.use_statistics_of(SUPPORT.images)
    track(net.tensors, names)
    optimizer = HandAdam() if case.adam else HandSGD(0.9, case.decay)
    steps = []
    for epoch in orders(len(SUPPORT), SIZE, EPOCHS):
        for indices in epoch:
            net.training = case.statistics == "batch"
            loss = negative_log_likelihood(net(SUPPORT.images[indices]), SUPPORT.labels[indices])
            if case.sp is not None:
                loss = loss + penalty(net, start, **case.sp)
            optimizer.step(net.tensors, gradients(loss, net.tensors, names), RATE)
            steps.append(net.snapshot(names))
    net.training = False
    if case.statistics == "support":
        net.use_statistics_of(SUPPORT.images)
    return net, steps


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_step_is_that_of_the_formulas(case):
    expected, course = naive(case)
    with every_step() as steps:
        predictor = case.method.adapt(make_tiny().double(), Target(SUPPORT))
    assert_same_course(steps, course)
    assert_same_network(predictor, expected)


@pytest.mark.parametrize("weight", [0.5, 0.2])
def test_late_fusion_averages_the_probabilities_of_the_source_and_of_the_tuned_head(weight):
    tuned, course = naive(CASES["finetune-head"])
    with every_step() as steps:
        fused = LateFusion(weight=weight, **SETTINGS).adapt(make_tiny().double(), Target(SUPPORT))
    assert_same_course(steps, course)
    source, queries = Formulas(make_tiny()), make_support(seed=3).images
    with torch.no_grad():
        answers = fused(queries.double()).exp().tolist()
    for row, *pair in zip(answers, source(queries).tolist(), tuned(queries).tolist(), strict=True):
        first, second = ([math.exp(v) / sum(math.exp(w) for w in logits) for v in logits] for logits in pair)
        blend = [weight * a + (1 - weight) * b for a, b in zip(first, second, strict=True)]
        assert row == pytest.approx(blend, abs=TOLERANCE)


# LP-FT: the head by Adam on fixed features, then everything at a tenth of the rate; held-out images stop both


class NaiveLPFT:
    """Kumar et al. on the source's statistics, on any part of the support."""

    def __init__(self) -> None:
        self.steps: list[Snapshot] = []

    def trained(self, net: Formulas, rows: Tensor, parts: tuple[str, ...], rate: float, epochs: int, heard=None):
        net = net.copy()
        names = net.names(*parts)
        track(net.tensors, names)
        optimizer = HandAdam()
        for epoch in orders(len(rows), SIZE, epochs):
            for indices in epoch:
                images, labels = SUPPORT.images[rows[indices]], SUPPORT.labels[rows[indices]]
                slopes = gradients(negative_log_likelihood(net(images), labels), net.tensors, names)
                optimizer.step(net.tensors, slopes, rate)
                self.steps.append(net.snapshot(names))
            if heard is not None:
                heard(net)
        return net


@torch.no_grad()
def held_out(net: Formulas, rows: Tensor) -> float:
    return float(negative_log_likelihood(net(SUPPORT.images[rows]), SUPPORT.labels[rows]))


def test_lp_ft_probes_then_tunes_for_as_long_as_held_out_images_gain():
    method = LPFT(epochs=3, probe_epochs=5, folds=2, lr=0.05, batch_size=SIZE)
    with every_step() as steps:
        fitted = method.fit(make_tiny().double(), Target(SUPPORT))
    folds = SUPPORT.kind.folds(SUPPORT.labels, 2, torch.Generator().manual_seed(0))  # indices, as minibatches are
    everyone, source, run = torch.arange(len(SUPPORT)), Formulas(make_tiny()), NaiveLPFT()
    rests = [torch.tensor([row for row in everyone.tolist() if row not in fold.tolist()]) for fold in folds]

    lengths = [0, 1, 2, 5]
    probing = [
        sum(
            held_out(run.trained(source, rest, ("fc",), 0.05, epochs), fold)
            for rest, fold in zip(rests, folds, strict=True)
        )
        / 2
        for epochs in lengths
    ]
    probe_epochs = lengths[probing.index(min(probing))]
    curves = []
    for rest, fold in zip(rests, folds, strict=True):
        probed = run.trained(source, rest, ("fc",), 0.05, probe_epochs)
        curve = [held_out(probed, fold)]
        run.trained(probed, rest, ALL, 0.005, 3, lambda net, fold=fold, curve=curve: curve.append(held_out(net, fold)))
        curves.append(curve)
    tuning = [sum(values) / 2 for values in zip(*curves, strict=True)]
    epochs = tuning.index(min(tuning))
    result = run.trained(run.trained(source, everyone, ("fc",), 0.05, probe_epochs), everyone, ALL, 0.005, epochs)

    assert fitted.notes["probe_held_out_loss"] == pytest.approx(probing, abs=TOLERANCE)
    assert fitted.notes["held_out_loss"] == pytest.approx(tuning, abs=TOLERANCE)
    assert (fitted.notes["probe_epochs"], fitted.notes["epochs"]) == (probe_epochs, epochs)
    assert epochs > 0
    assert_same_course(steps, run.steps)
    assert_same_network(fitted.predictor, result)

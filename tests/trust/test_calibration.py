"""One temperature from held-out answers: fitted, reported honestly, and written into the head where that is sound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fewshift
from fewshift import METHODS, Support
from fewshift.core.network import Network
from fewshift.trust.calibration import (
    Calibration,
    NotApplied,
    calibrated,
    calibration_of,
    chance_error,
    temperatures_of_others,
)
from fewshift.trust.held_out import ImageAnswers
from tests.helpers.networks import make_support, make_tiny, same_state, scenes, state, street

HEAD = METHODS["finetune-head"](epochs=40, lr=3.0)
DEGREES = [10 ** (step / 20) for step in range(-40, 41)]  # the temperatures that are tried


def answers(images: int = 12, repeats: int = 2, classes: int = 3, seed: int = 0) -> ImageAnswers:
    """Every image is held out `repeats` times, in other folds each time; the adapted network is far too sure."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    source, adapted = (torch.randn(images * repeats, classes, generator=generator).double() for _ in range(2))
    numbers = torch.arange(images).repeat(repeats)
    folds = torch.cat([torch.randperm(images, generator=generator) % 3 + 3 * repeat for repeat in range(repeats)])
    adapted = 8 * (adapted + F.one_hot(labels, classes).repeat(repeats, 1))
    return ImageAnswers(numbers, folds, labels.repeat(repeats), source, adapted)


def naive_loss(logits: torch.Tensor, labels: torch.Tensor, degree: float) -> float:
    """The mean of -log softmax(z / T)_y, one number at a time."""
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        peak = max(row) / degree
        total += math.log(sum(math.exp(value / degree - peak) for value in row)) + peak - row[label] / degree
    return total / len(labels)


def naive_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return min(DEGREES, key=lambda degree: naive_loss(logits, labels, degree))


def naive_error(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """|accuracy - confidence| of each of 15 bins, weighted by how many predictions are in it."""
    bins: list[list[tuple[float, float]]] = [[] for _ in range(15)]
    for row, label in zip(logits.softmax(1).tolist(), labels.tolist(), strict=True):
        sure = max(row)
        bins[min(14, math.ceil(sure * 15) - 1)].append((sure, float(row.index(sure) == label)))
    gaps = (abs(sum(right - sure for sure, right in members)) for members in bins)
    return sum(gaps) / len(labels)


def noisy(shots: int = 40, seed: int = 1) -> Support:
    """Every third label is one too many: whoever is sure of an answer is wrong too often."""
    support = make_support(shots, seed=seed)
    wrong = torch.arange(len(support)) // 3 % 3 == 0
    return replace(support, labels=torch.where(wrong, (support.targets + 1) % 3, support.targets))


@pytest.fixture(scope="module")
def overconfident() -> fewshift.Adaptation:
    return fewshift.adapt(make_tiny(), noisy(), method=HEAD, accept="always")


def test_the_temperature_is_that_of_the_least_cross_entropy():
    held = answers()
    calibration = calibration_of(held)
    assert calibration is not None
    assert calibration.temperature == pytest.approx(naive_temperature(held.adapted, held.labels))


def test_the_errors_are_those_of_a_naive_loop():
    held = answers()
    calibration = calibration_of(held)
    assert calibration is not None
    assert calibration.before == pytest.approx(naive_error(held.source, held.labels))
    assert calibration.uncalibrated == pytest.approx(naive_error(held.adapted, held.labels))
    scaled = held.adapted.clone()
    for row in range(len(held.labels)):
        fold = held.images[held.folds == held.folds[row]].tolist()
        others = torch.tensor([image not in fold for image in held.images.tolist()])
        scaled[row] /= naive_temperature(held.adapted[others], held.labels[others])
    assert calibration.after == pytest.approx(naive_error(scaled, held.labels))
    change = naive_loss(scaled, held.labels, 1) - naive_loss(held.adapted, held.labels, 1)
    assert calibration.loss_change == pytest.approx(change)


def test_no_image_has_a_say_in_its_own_temperature():
    held = answers()
    before = temperatures_of_others(held, held.adapted)
    mine = held.images == 4
    other = torch.where(mine.unsqueeze(1), -30 * held.adapted, held.adapted)
    after = temperatures_of_others(replace(held, adapted=other), other)
    assert torch.equal(before[mine], after[mine])
    assert not torch.equal(before, after)


def test_a_single_fold_is_cut_into_halves_of_the_images():
    held = answers(repeats=1)
    held = replace(held, folds=torch.zeros_like(held.folds))
    degrees = temperatures_of_others(held, held.adapted)
    for half in (0, 1):
        other = held.images % 2 != half
        wanted = naive_temperature(held.adapted[other], held.labels[other])
        assert degrees[held.images % 2 == half].tolist() == pytest.approx([wanted] * 6)


def test_a_single_image_is_nothing_to_fit_to():
    assert calibration_of(answers(images=1, repeats=3)) is None


def test_chance_is_what_a_network_shows_that_is_right_as_often_as_it_is_sure():
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(35, 4, generator=generator).double()
    drawn = [
        naive_error(logits, torch.multinomial(logits.softmax(1), 1, generator=generator).flatten()) for _ in range(300)
    ]
    assert chance_error(logits.softmax(1)) == pytest.approx(sum(drawn) / 300, rel=0.1)
    assert chance_error(torch.eye(4).double()) == 0


def test_what_is_handed_over_is_calibrated_and_says_the_same(overconfident):
    degree = overconfident.calibration.temperature
    assert overconfident.calibration.applied
    assert degree > 1
    assert overconfident.notes["temperature"] == degree
    support = noisy()
    plain = HEAD.adapt(make_tiny(), fewshift.Target(support))
    others = make_support(200, seed=7).images
    with torch.no_grad():
        sharp, soft = plain(others), overconfident.model(others)
    assert torch.equal(sharp.argmax(1), soft.argmax(1))
    assert torch.allclose(soft, sharp / degree, rtol=1e-4, atol=1e-5)


def test_the_temperature_lowers_the_loss_on_new_images(overconfident):
    others = noisy(200, seed=7)
    with torch.no_grad():
        logits = overconfident.model(others.images)
    divided, plain = (
        F.cross_entropy(answer, others.targets) for answer in (logits, logits * overconfident.notes["temperature"])
    )
    assert divided < plain


def test_only_the_head_is_divided_and_the_delta_carries_it(overconfident, tmp_path):
    source = make_tiny()
    original = state(source)
    file = overconfident.delta.save(tmp_path / "d.safetensors")
    assert set(overconfident.delta.bits) == {"fc.weight", "fc.bias"}
    adapted = fewshift.apply(source, file)
    assert same_state(state(adapted), state(overconfident.model))
    assert same_state(state(fewshift.revert(adapted, file)), original)


def test_the_network_that_was_given_stays_as_it_is():
    model = make_tiny()
    before = state(model)
    result = fewshift.adapt(model, noisy(), method=HEAD, accept="always")
    assert result.calibration.applied
    assert same_state(before, state(model))


def test_a_rejected_network_is_calibrated_too(overconfident):
    result = fewshift.adapt(make_tiny(), noisy(), method=HEAD, accept=1000)
    assert same_state(state(result.candidate), state(overconfident.candidate))
    assert same_state(state(result.model), state(make_tiny()))


@pytest.mark.parametrize("name", ["adabn", "source", "finetune-bn"])
def test_a_head_that_is_the_sources_stays_so_bit_for_bit(name):
    model = make_tiny()
    with torch.no_grad():
        model.fc.weight.mul_(50)  # sure of anything
    result = fewshift.adapt(model, noisy(), method=METHODS[name](), accept="always")
    source, adapted = model.state_dict(), result.model.state_dict()
    assert all(torch.equal(source[name], adapted[name]) for name in ("fc.weight", "fc.bias"))
    assert result.calibration.refused is NotApplied.SOURCE_HEAD
    assert result.calibration.temperature > 1
    assert "temperature" not in result.notes


def test_without_held_out_answers_to_whole_images_there_is_no_calibration():
    assert fewshift.adapt(make_tiny(), noisy(), method=HEAD, validate=None).calibration is None
    dense = fewshift.adapt(street(), scenes(4), method=METHODS["finetune-bn"](epochs=1), accept="always")
    assert dense.calibration is None


def test_labelled_images_of_ones_own_calibrate_as_well():
    labelled = make_support(20, seed=9)
    result = fewshift.adapt(make_tiny(), noisy(), method=HEAD, accept="always", validate=labelled)
    plain = HEAD.adapt(make_tiny(), fewshift.Target(noisy()))
    with torch.no_grad():
        wanted = naive_temperature(plain(labelled.images).double(), labelled.targets)
    assert result.calibration.predictions == 60
    assert result.calibration.temperature == pytest.approx(wanted)


# when it is not applied


class After(nn.Module):
    """A network whose logits are something else than its last linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_tiny()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images).tanh()


SURE = Calibration(2.0, 0.1, 0.4, 0.1, 0.1, predictions=30, loss_change=-1.0, loss_error=0.1)
PICTURES = make_support().images


def changed_head(model: nn.Module, head: str) -> tuple[Network, nn.Module]:
    network = Network.of(model, PICTURES, head)
    weight = model.get_submodule(head).weight
    return network, network.with_tensors({f"{head}.weight": 3 * weight + 0.1})


@pytest.mark.parametrize(
    ("calibration", "weak", "refused"),
    [
        (SURE, True, NotApplied.WEAK),
        (replace(SURE, predictions=19), False, NotApplied.TOO_FEW),
        (replace(SURE, temperature=0.5), False, NotApplied.SURE_ENOUGH),
        (replace(SURE, temperature=100.0), False, NotApplied.NO_SIGNAL),
        (replace(SURE, loss_change=0.1), False, NotApplied.NO_FALL),
        (replace(SURE, loss_change=-0.05), False, NotApplied.NO_FALL),
    ],
)
def test_what_is_not_sound_is_not_applied(calibration, weak, refused):
    network, predictor = changed_head(make_tiny(), "fc")
    same, judged = calibrated(network, predictor, calibration, PICTURES, weak=weak)
    assert same is predictor
    assert (judged.applied, judged.refused) == (False, refused)


def test_without_a_known_head_nothing_is_divided():
    network, predictor = changed_head(make_tiny(), "fc")
    _, judged = calibrated(replace(network, head=None), predictor, SURE, PICTURES, weak=False)
    assert judged.refused is NotApplied.NO_HEAD


def test_a_head_with_something_after_it_is_left_alone():
    network, predictor = changed_head(After(), "body.fc")
    same, judged = calibrated(network, predictor, SURE, PICTURES, weak=False)
    assert same is predictor
    assert judged.refused is NotApplied.NOT_LAST


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_type_of_the_weights_stays_and_half_precision_keeps_every_prediction(dtype):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).to(dtype).eval()
    images = torch.randn(400, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    network = Network.of(model, images, "1")
    predictor = network.with_tensors({"1.weight": model[1].weight * 4})
    divided, judged = calibrated(network, predictor, replace(SURE, temperature=2.9), images, weak=False)
    assert judged.applied
    assert divided[1].weight.dtype == dtype
    assert judged.temperature == (2.9 if dtype == torch.float64 else 4.0)  # a power of two divides without rounding
    with torch.no_grad():
        assert torch.equal(predictor(images).argmax(1), divided(images).argmax(1))
        if dtype == torch.bfloat16:
            assert torch.equal(predictor(images), divided(images) * 4)

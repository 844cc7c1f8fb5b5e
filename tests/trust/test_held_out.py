"""Held-out answers: what both networks say about an image, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

from fewshift.core.losses import log_losses, temperature
from fewshift.trust.held_out import ImageAnswers, PixelAnswers, asked, predictions, shares_right
from tests.helpers.networks import make_support, make_tiny, mixed_sizes, scenes, street

STEP = 10**0.05  # between neighbouring temperatures that are tried


def loss_at(log_degree: float, logits: Tensor, labels: Tensor) -> float:
    return float(F.cross_entropy(logits / math.exp(log_degree), labels))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answered(labels: list[int], source: list[int], adapted: list[int]) -> ImageAnswers:
    """Sure answers to three classes, each image once."""
    before, after = (5.0 * F.one_hot(torch.tensor(answer), 3).double() for answer in (source, adapted))
    images = torch.arange(len(labels))
    return ImageAnswers(images, images % 2, torch.tensor(labels), before, after)


@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
def test_the_temperature_has_the_least_cross_entropy(scale):
    labels = torch.arange(60) % 4
    logits = scale * (noise(60, 4) + F.one_hot(labels, 4))
    best = minimize_scalar(loss_at, bounds=(-4.6, 4.6), args=(logits, labels), method="bounded")
    assert math.exp(best.x) / STEP < temperature(logits, labels) < math.exp(best.x) * STEP
    assert float(log_losses(logits, labels).mean()) == pytest.approx(best.fun, abs=1e-3)


def test_answers_to_images_are_the_logits_of_both_networks():
    source, adapted, held = make_tiny(), make_tiny(seed=1), make_support(2)
    answers = asked(source, adapted, held, torch.tensor([7, 3, 9, 1, 0, 4]), 2)
    assert isinstance(answers, ImageAnswers)
    assert (answers.images.tolist(), answers.folds.tolist()) == ([7, 3, 9, 1, 0, 4], [2] * 6)
    assert torch.equal(answers.labels, held.labels)
    with torch.no_grad():
        assert torch.allclose(answers.source, source(held.images).double(), atol=1e-6)
        assert torch.allclose(answers.adapted, adapted(held.images).double(), atol=1e-6)


def test_answers_to_pixels_are_shares_and_losses_of_the_labelled_ones():
    source, adapted, held = street(), street(), scenes(3)
    with torch.no_grad():
        adapted.head.weight.mul_(-1)
        logits = [model(held.images)["out"].double() for model in (source, adapted)]
    answers = asked(source, adapted, held, torch.arange(3), 0)
    assert isinstance(answers, PixelAnswers)
    for index, label in enumerate(held.labels):
        known = label != 255
        for answer, share, loss in zip(
            logits, (answers.before, answers.after), (answers.loss_before, answers.loss_after), strict=True
        ):
            pixels = answer[index][:, known].T
            assert float(share[index]) == pytest.approx(float((pixels.argmax(1) == label[known]).double().mean()))
            assert float(loss[index]) == pytest.approx(float(F.cross_entropy(pixels, label[known])), rel=1e-5)


@pytest.mark.parametrize("images", [make_support(30), mixed_sizes()])
def test_shares_are_right_whatever_passes_together(images):
    model = make_tiny() if isinstance(images.images, Tensor) else street()
    shares = []
    for image, label in zip(images.images, images.labels, strict=True):
        with torch.no_grad():
            answer = model(image[None])
        answer = answer["out"] if isinstance(answer, dict) else answer
        known = label != 255
        shares.append(float((answer.argmax(1)[0] == label)[known].double().mean()))
    assert shares_right(model, images).tolist() == pytest.approx(shares)


def test_many_images_pass_in_parts_and_come_back_in_order():
    model, images = make_tiny(), make_support(50)
    with torch.no_grad():
        assert torch.allclose(predictions(model, images), model(images.images), atol=1e-6)


def test_the_gain_counts_what_became_right_and_wrong():
    gain = answered([0, 1, 2, 0, 1, 2], source=[0, 1, 1, 1, 0, 0], adapted=[0, 2, 2, 0, 1, 0]).gain()
    assert (gain.wins, gain.losses, gain.predictions, gain.images) == (3, 1, 6, 6)
    assert gain.point == pytest.approx(100 * (3 - 1) / 6)
    assert (gain.before, gain.after) == (pytest.approx(100 * 2 / 6), pytest.approx(100 * 4 / 6))
    assert gain.per_class == {0: (2, 50.0, 100.0), 1: (2, 50.0, 50.0), 2: (2, 0.0, 50.0)}


def test_being_ten_times_as_sure_is_no_change():
    labels = torch.arange(30) % 3
    logits = noise(30, 3) + F.one_hot(labels, 3)
    gain = ImageAnswers(torch.arange(30), torch.zeros(30), labels, logits, 10 * logits).gain()
    assert gain.loss_change == pytest.approx(0, abs=1e-12)


def test_the_change_of_loss_is_that_of_networks_under_their_best_temperatures():
    labels = torch.arange(42) % 3
    source, adapted = noise(42, 3), 4 * (noise(42, 3, seed=1) + F.one_hot(labels, 3))
    before, after = (
        minimize_scalar(loss_at, bounds=(-4.6, 4.6), args=(logits, labels), method="bounded").fun
        for logits in (source, adapted)
    )
    gain = ImageAnswers(torch.arange(42), torch.zeros(42), labels, source, adapted).gain()
    assert gain.loss_change == pytest.approx(after - before, abs=2e-3)


def test_pixels_count_by_their_share_and_their_own_loss():
    before, after = torch.tensor([0.5, 0.8]).double(), torch.tensor([0.7, 0.7]).double()
    answers = PixelAnswers(torch.arange(2), torch.arange(2), before, after, before * 0 + 1.0, before * 0 + 0.4)
    gain = answers.gain(weak=True)
    assert (gain.point, gain.wins, gain.losses) == (pytest.approx(5), 1, 1)
    assert (gain.loss_change, gain.weak) == (pytest.approx(-0.6), True)


KINDS = {
    "images": answered([0, 1, 2, 0], [0, 0, 0, 0], [1, 1, 1, 1]),
    "pixels": PixelAnswers(torch.arange(4), torch.arange(4) % 2, *noise(4, 4).unbind(0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_joined_again_are_the_whole(kind):
    held = KINDS[kind]
    again = held.part(torch.tensor([0, 1])).joined([held.part(torch.tensor([2, 3]))])
    for field in fields(held):
        assert torch.equal(getattr(again, field.name), getattr(held, field.name))


@pytest.mark.parametrize("kind", KINDS)
def test_another_adapted_network_may_answer_some_rows_or_be_compared_with(kind):
    held, other = KINDS[kind], KINDS[kind].part(torch.tensor([3, 2, 1, 0]))
    rows = torch.tensor([True, False, False, True])
    mixed = held.answered_by(other, rows)
    against = held.against(other)
    after = "adapted" if kind == "images" else "after"
    before = "source" if kind == "images" else "before"
    for row in range(4):
        chosen = other if rows[row] else held
        assert torch.equal(getattr(mixed, after)[row], getattr(chosen, after)[row])
    assert torch.equal(getattr(mixed, before), getattr(held, before))
    assert torch.equal(getattr(against, before), getattr(other, after))
    assert torch.equal(getattr(against, after), getattr(held, after))

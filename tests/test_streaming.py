"""Test-time BN: the invariants of its card."""

from __future__ import annotations

import copy

import pytest
import torch

from fewshift import Delta, FewshiftError, Target, TestTimeBN
from tests.conftest import make_support, make_tiny


def predictor(model, **settings):
    return TestTimeBN(**settings).adapt(model, Target(make_support()))


def test_it_is_the_train_mode_forward_of_each_batch():
    model, images = make_tiny(), make_support(seed=4).images
    expected = copy.deepcopy(model).train()
    expected.drop.eval()
    assert torch.allclose(predictor(model)(images), expected(images), atol=1e-6)


def test_nothing_stays_from_one_batch_to_the_next():
    model = make_tiny()
    first, second = make_support(seed=4).images, make_support(seed=5).images
    ours = predictor(model)
    forth = ours(first), ours(second)
    back = ours(second), ours(first)
    assert torch.equal(forth[0], back[1])
    assert torch.equal(forth[1], back[0])


def test_a_prior_weighs_variances_by_images_with_the_unbiased_batch_variance():
    model, images = make_tiny(), make_support(seed=4).images
    ours = predictor(model, prior=16)
    ours(images)
    z = model.conv1(images).transpose(0, 1).flatten(1)
    n = len(images)
    mean = (16 * model.bn1.running_mean + n * z.mean(1)) / (16 + n)
    var = (16 * model.bn1.running_var + n * z.var(1, correction=1)) / (16 + n)
    expected = (model.bn1.running_var + model.bn1.eps).sqrt() / (var + model.bn1.eps).sqrt() * model.bn1.weight
    assert torch.allclose(ours.working.bn1.weight, expected, atol=1e-5)
    bias = model.bn1.bias + model.bn1.weight * (model.bn1.running_mean - mean) / (var + model.bn1.eps).sqrt()
    assert torch.allclose(ours.working.bn1.bias, bias, atol=1e-5)


def test_a_batch_of_one_image_is_answered():
    assert torch.isfinite(predictor(make_tiny())(make_support().images[:1])).all()


def test_training_mode_is_declined():
    assert not predictor(make_tiny()).train().working.drop.training


def test_a_streaming_predictor_has_no_delta():
    model = make_tiny()
    with pytest.raises(FewshiftError, match="has no delta: keep it as it is"):
        Delta.between(model, predictor(model))


def test_a_negative_prior_is_refused():
    with pytest.raises(FewshiftError, match="prior"):
        TestTimeBN(prior=-1)

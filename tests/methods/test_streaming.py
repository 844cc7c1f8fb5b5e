"""Predictors that adapt while they predict: test-time BN, alpha-BN, Tent; and AdaBN on many images."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from fewshift import AdaBN, Delta, FewshiftError, Target, Tent, TestTimeBN
from fewshift.methods.alpha_bn import AlphaBN
from tests.helpers.networks import make_support, make_tiny, same_state, state, unsettle


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


def test_training_mode_is_declined():
    assert not predictor(make_tiny()).train().working.drop.training


def test_a_streaming_predictor_has_no_delta():
    model = make_tiny()
    with pytest.raises(FewshiftError, match="has no delta: keep it as it is"):
        Delta.between(model, predictor(model))


# alpha-BN


def test_alpha_blends_means_and_variances():
    model, images = make_tiny(), make_support(seed=4).images
    ours = AlphaBN(alpha=0.7).adapt(model, Target(make_support()))
    ours(images)
    z = model.conv1(images).transpose(0, 1).flatten(1)
    var = 0.7 * model.bn1.running_var + 0.3 * z.var(1, correction=0)
    expected = model.bn1.weight * ((model.bn1.running_var + 1e-5) / (var + 1e-5)).sqrt()
    assert torch.allclose(ours.working.bn1.weight, expected, atol=1e-5)


def test_alpha_zero_is_test_time_bn():
    model, images = make_tiny(), make_support(seed=4).images
    left, right = (method.adapt(model, Target(make_support())) for method in (AlphaBN(alpha=0.0), TestTimeBN()))
    assert torch.allclose(left(images), right(images), atol=1e-6)


# Tent


def batches(count=3):
    return [make_support(seed=seed).images for seed in range(10, 10 + count)]


def tent(model=None, **settings):
    return Tent(**settings).adapt(model or make_tiny(), Target(make_support()))


def naive_tent(model, stream, make_optimizer):
    """Train-mode BatchNorm, dropout off, one entropy step per batch, predictions from before the step."""
    model = copy.deepcopy(model).requires_grad_(False)
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for layer in layers:
        layer.train().requires_grad_(True)
        layer.running_mean, layer.running_var = None, None
    optimizer = make_optimizer([p for layer in layers for p in layer.parameters()])
    answers = []
    for images in stream:
        logits = model(images)
        p = logits.softmax(1)
        loss = -(p * p.log()).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        answers.append(logits.detach())
    return answers, model


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.999)),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tent_is_the_naive_loop(optimizer):
    model, stream = make_tiny(), batches()
    expected, final = naive_tent(model, stream, OPTIMIZERS[optimizer])
    ours = tent(model, optimizer=optimizer)
    for images, answer in zip(stream, expected, strict=True):
        assert torch.allclose(ours(images), answer, atol=1e-5)
    assert torch.allclose(ours.model.bn1.weight, final.bn1.weight, atol=1e-6)


def test_without_a_rate_it_is_test_time_bn_and_so_is_its_first_answer():
    model, images = make_tiny(), batches()[0]
    expected = TestTimeBN().adapt(model, Target(make_support()))(images)
    still = tent(model, lr=0.0)
    still(batches()[1])
    assert torch.allclose(still(images), expected, atol=1e-5)
    for optimizer in OPTIMIZERS:
        assert torch.allclose(tent(model, lr=0.1, optimizer=optimizer)(images), expected, atol=1e-5)


def test_only_weight_and_bias_of_2d_batchnorm_change():
    model = make_tiny()
    ours = tent(model, lr=0.1)
    for images in batches():
        ours(images)
    before, after = state(model), state(ours.model)
    changed = {name for name in before if "num_batches" not in name and not torch.equal(before[name], after[name])}
    assert changed == {"bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"}


def test_episodes_do_not_remember_and_the_ordinary_stream_does():
    first, second, _ = batches()
    for episodic in (True, False):
        forth, back = (tent(lr=0.1, episodic=episodic) for _ in range(2))
        forth(second)
        assert torch.allclose(forth(first), back(first), atol=1e-6) == episodic


def test_several_steps_answer_with_the_last_forward_pass():
    images = batches()[0]
    assert not torch.allclose(tent(lr=0.1, steps=3)(images), tent(lr=0.1)(images), atol=1e-4)


def test_a_collapse_stands_in_the_record():
    ours = tent(lr=2.0)
    for seed in range(40):
        ours(make_support(seed=seed).images)
    assert ours.record["batches"] == 40
    assert ours.record["collapsed"]
    assert ours.record["top_share"] > 0.95
    assert not tent(lr=0.0).record["collapsed"]


def test_a_divergence_is_mended_and_told():
    ours = tent()
    images = batches()[0]
    sound = ours(images)
    with torch.no_grad():
        ours.model.bn1.weight.fill_(float("nan"))
    answer = ours(images)
    assert torch.isfinite(answer).all()
    assert torch.allclose(answer, sound, atol=0.2)
    assert ours.record["diverged_at"] == [1]


def test_bad_batches_are_one_sentence():
    images = batches()[0]
    images[0, 0, 0, 0] = float("nan")
    with pytest.raises(FewshiftError, match="an image of this batch contains NaN"):
        tent()(images)
    with pytest.raises(FewshiftError, match="tent needs a stream of batches: pass"):
        Tent().adapt(make_tiny(), Target())
    torch.manual_seed(0)
    flat = unsettle(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    with pytest.raises(FewshiftError, match="tent needs 2d BatchNorm layers"):
        tent(flat)


def test_frozen_batchnorm_and_single_positions_follow_their_batch_too():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 6, 3), FrozenBatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = unsettle(nn.Sequential(*body, nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 3)))
    images = batches()[0]
    expected = model[1].weight.view(1, -1, 1, 1) * F.batch_norm(model[0](images), None, None, training=True) + model[
        1
    ].bias.view(1, -1, 1, 1)
    ours = tent(model, lr=0.0)
    seen = []
    ours.model[1].register_forward_hook(lambda _, __, output: seen.append(output))
    ours(images)
    assert torch.allclose(seen[0], expected, atol=1e-5)
    alone = ours(images[:1])  # the second BatchNorm sees one position: it answers its bias
    assert torch.allclose(alone, model[7](model[5].bias.unsqueeze(0)), atol=1e-5)


# what must not happen


@pytest.mark.parametrize("method", [TestTimeBN(), AlphaBN(), Tent()])
def test_a_predictor_shares_nothing_with_the_given_network(method):
    model = make_tiny().requires_grad_(False)
    before = state(model)
    predictor = method.adapt(model, Target(make_support()))
    assert not predictor.training
    predictor.double()
    assert same_state(before, state(model))
    with pytest.raises(FewshiftError, match="the batch is empty"):
        predictor(torch.zeros(0, 3, 8, 8))


def test_tent_learns_under_inference_mode_and_adaptation_says_that_it_cannot():
    from fewshift import LCCS

    expected, under_inference = tent(lr=0.1), tent(lr=0.1)
    for images in batches():
        answer = expected(images)
        with torch.inference_mode():
            assert torch.equal(under_inference(images), answer)
    with torch.inference_mode(), pytest.raises(FewshiftError, match=r"outside torch\.inference_mode"):
        LCCS().adapt(make_tiny(), Target(make_support()))


def test_tent_in_half_precision_still_moves():
    ours = Tent().adapt(make_tiny().bfloat16(), Target(make_support()))
    for images in batches():
        assert ours(images.bfloat16()).dtype == torch.bfloat16
    assert not torch.equal(ours.model.bn1.weight, make_tiny().bfloat16().float().bn1.weight)


class Counting(nn.Module):
    """A network that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.net = make_tiny()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images):
        self.calls += 1
        return self.net(images)


def test_a_network_that_counts_its_calls_does_not_count_ours():
    model = Counting()
    for method in (Tent(), AdaBN(), TestTimeBN()):
        method.adapt(model, Target(make_support()))(batches()[0])
    assert float(model.calls) == 0


def test_a_picture_with_a_large_sky_is_no_collapse():
    class Rows(nn.Module):
        """Answers each third of the rows with another class."""

        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, images):
            answer = 0 * self.bn(images)
            for label in range(3):
                answer[:, label, 8 * label : 8 * label + 8] += 5.0
            return answer

    ours = tent(Rows())
    for _ in range(4):
        ours(torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0)))
    assert not ours.record["collapsed"]
    assert ours.record["top_share"] < 0.5

"""SDDA: its losses against exact special cases, one step of training against a naive one."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fewshift import FewshiftError, Network, Target
from fewshift.core.support import Unlabelled
from fewshift.methods._adversarial import Generator, binary_loss, gradient_reversed, image_discriminator
from fewshift.methods.sdda import (
    SDDA,
    GeneratorTraining,
    NetworkTraining,
    ValueRange,
    generator_loss,
    guidance,
    unlikelihood,
    xavier,
)
from tests.helpers.networks import make_support, make_tiny, same_state, state

QUICK = SDDA(epochs=2, start_epoch=1, size=8, width=4, noise=6, batch_size=8)
IMAGES = make_support().images  # 15, of 3 channels and 8x8 pixels


def target(images=IMAGES, augment=None):
    return Target(unlabelled=Unlabelled(images, augment))


def changed(method, model=None, seed=0):
    """The names of the tensors that differ afterwards."""
    model = model or make_tiny()
    before, after = state(model), state(method.adapt(model, target(), seed))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def some_logits(seed=0, rows=6, classes=4):
    return 3 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed)).double()


def generator_training(settings=QUICK, model=None):
    torch.manual_seed(0)
    return GeneratorTraining(settings, Network.of(model or make_tiny(), IMAGES), "fc", Unlabelled(IMAGES))


def classified(made):
    """What the source network says of generated images, (images, classes)."""
    return make_tiny().eval()(ValueRange.of(make_tiny(), Unlabelled(IMAGES), 8).stretched(made))


def network_training(settings=QUICK, model=None):
    torch.manual_seed(0)
    return NetworkTraining(settings, Network.of(model or make_tiny(), IMAGES), "fc")


# the generator's loss


def test_the_gradient_of_the_likelihood_is_softmax():
    logits = some_logits().requires_grad_()
    (gradient,) = torch.autograd.grad(-unlikelihood(logits), logits)
    expected = [[math.exp(v) / sum(math.exp(w) for w in row) / 6 for v in row] for row in logits.tolist()]
    assert torch.allclose(gradient, torch.tensor(expected).double(), atol=1e-12)


def test_the_likelihood_gives_the_generator_a_gradient_where_the_undetached_mean_gives_none():
    logits = some_logits().requires_grad_()
    evidence = logits.logsumexp(1)
    (cancelled,) = torch.autograd.grad((evidence.mean() - evidence).mean(), logits)
    assert cancelled.abs().max() < 1e-12

    makers = generator_training()
    made, _ = makers.make(8, torch.Generator().manual_seed(0))
    unlikelihood(classified(made)).backward()
    assert all(weight.grad.abs().max() > 0 for weight in makers.generator.parameters() if weight.ndim > 1)


def test_the_generators_loss_is_adversary_plus_b_times_the_classifiers_say():
    logits, labels, verdicts = some_logits(), torch.tensor([0, 1, 2, 3, 0, 1]), some_logits(1, 6, 1).flatten()
    fooled = sum(math.log(1 + math.exp(-v)) for v in verdicts.tolist()) / 6
    rows = logits.tolist()
    wrong = sum(math.log(sum(map(math.exp, row))) - row[y] for row, y in zip(rows, labels, strict=True)) / 6
    assert float(generator_loss(verdicts, logits, labels, 0.7)) == pytest.approx(float(fooled + 0.7 * wrong))


def test_with_b_zero_it_is_an_ordinary_gan_whose_labels_carry_no_supervision():
    verdicts = some_logits(1, 6, 1).flatten()
    broken = torch.full((6, 4), torch.nan)  # what the classifier would say is not looked at
    first, second = (generator_loss(verdicts, broken, labels, 0.0) for labels in torch.randint(4, (2, 6)))
    assert first == second == F.binary_cross_entropy_with_logits(verdicts, torch.ones(6).double())

    gradients = []
    for asked in (torch.zeros(6, dtype=torch.long), torch.full((6,), 2)):  # same images, other labels asked
        makers = generator_training()
        made, _ = makers.make(6, torch.Generator().manual_seed(0))
        generator_loss(makers.discriminator(made), classified(made), asked, 0.0).backward()
        gradients.append([weight.grad for weight in makers.generator.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_guidance_grows_from_zero_and_is_capped_after_two_ramps():
    assert guidance(0, 100) == 0
    assert guidance(50, 100) == pytest.approx(2 / (1 + math.exp(-5)) - 1)
    assert guidance(200, 100) == guidance(10_000, 100) == pytest.approx(2 / (1 + math.exp(-20)) - 1)


def test_telling_apart_is_cross_entropy_with_one_for_the_first_and_zero_for_the_second():
    first, second = some_logits(0, 5, 1).flatten(), some_logits(1, 5, 1).flatten()
    expected = sum(math.log(1 + math.exp(-v)) for v in first.tolist()) / 5
    expected += sum(math.log(1 + math.exp(v)) for v in second.tolist()) / 5
    assert float(binary_loss(first, second)) == pytest.approx(expected)


# generator and image discriminator


@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_generated_images_have_the_size_asked_for_and_stay_within_one(size, channels):
    torch.manual_seed(0)
    made = Generator(5, 3, channels, size, width=2)(50 * torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
    assert made.shape == (4, channels, size, size)
    assert made.abs().max() <= 1
    assert image_discriminator(channels, size, width=2)(made).shape == (4,)


def test_the_class_asked_for_enters_the_generator():
    makers = generator_training()
    noise = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    first, second = (makers.generator(noise, torch.full((3,), label)) for label in (0, 1))
    assert not torch.allclose(first, second)


def test_the_range_is_that_of_the_target_per_channel():
    images = IMAGES * torch.tensor([1.0, 10.0, 0.0]).view(3, 1, 1) + torch.tensor([0.0, 5.0, 7.0]).view(3, 1, 1)
    values_range = ValueRange.of(make_tiny(), Unlabelled(images), size=4)
    for channel in range(3):
        values = [value for image in images for value in image[channel].flatten().tolist()]
        middle, half = (max(values) + min(values)) / 2, (max(values) - min(values)) / 2
        assert float(values_range.middle[channel]) == pytest.approx(middle, abs=1e-5)
        assert float(values_range.half[channel]) == pytest.approx(half, abs=2e-6)
    shrunk = values_range.shrunk(images)
    assert shrunk.abs().max() == pytest.approx(1)
    assert torch.allclose(values_range.stretched(shrunk), images, atol=1e-5)


def test_the_source_classifier_stays_as_it_is_while_gradients_flow_through_it():
    makers = generator_training()
    generator = torch.Generator().manual_seed(0)
    weights = state(makers.generator), state(makers.discriminator)
    for _ in range(3):
        made = makers.step(IMAGES, 1.0, generator)
    shrunk = ValueRange.of(make_tiny(), Unlabelled(IMAGES), 8).shrunk(made.images)
    expected = generator_loss(makers.discriminator(shrunk), make_tiny().eval()(made.images), made.labels, 1.0)
    torch.testing.assert_close(made.losses["generator_loss"], expected.detach(), rtol=1e-4, atol=1e-5)
    assert not same_state(weights[0], state(makers.generator))
    assert not same_state(weights[1], state(makers.discriminator))
    assert made.images.shape == IMAGES.shape
    assert not made.images.requires_grad


@pytest.fixture(scope="module")
def trained():
    """The tiny network after it has learned the patterns of its three classes."""
    support = make_support(10)
    model = make_tiny().train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(model(support.images), support.labels).backward()
            optimizer.step()
    return model.eval()


def test_after_a_warm_up_the_source_recognises_what_was_asked_for_far_more_often_than_by_chance(trained):
    makers = generator_training(SDDA(size=8, width=16, noise=6, generator_lr=2e-3), trained)
    generator = torch.Generator().manual_seed(0)
    recognised = [float(makers.step(IMAGES, 1.0, generator).losses["recognised"]) for _ in range(60)]
    assert sum(recognised[:5]) / 5 < 0.5
    assert sum(recognised[-10:]) / 10 > 0.8


# the network that is adapted


def test_reversal_changes_the_gradient_and_not_the_values():
    features = some_logits().requires_grad_()
    same = gradient_reversed(features, 0.3)
    assert torch.equal(same, features)
    (gradient,) = torch.autograd.grad((same * torch.arange(4.0)).sum(), features)
    assert torch.allclose(gradient, -0.3 * torch.arange(4.0).double().expand(6, 4))


def step_gradients(reversal, domain_weight=0.1):
    """The gradients that one adaptation step gives to network and domain discriminator."""
    adapted = network_training(SDDA(size=8, domain_weight=domain_weight, reversal=reversal))
    adapted.step(IMAGES.flip(0) + 1, torch.arange(15) % 3, IMAGES)
    return [weight.grad for weight in adapted.model.parameters()], [
        weight.grad for weight in adapted.domain.parameters()
    ]


def test_with_reversal_zero_the_network_gets_no_domain_gradient_while_the_domain_head_learns():
    network, domain = step_gradients(reversal=0.0)
    without, nothing = step_gradients(reversal=1.0, domain_weight=0.0)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(network, without, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in domain)
    assert all(gradient.abs().max() == 0 for gradient in nothing)


def test_with_reversal_the_network_climbs_what_the_domain_head_descends():
    plain, reverse, forward = (step_gradients(reversal)[0] for reversal in (0.0, 1.0, 0.5))
    body = slice(0, 6)
    for none, full, half in zip(plain[body], reverse[body], forward[body], strict=True):
        assert torch.allclose(full - none, 2 * (half - none), atol=1e-5)
        assert (full - none).abs().max() > 0


def test_one_adaptation_step_agrees_with_a_naive_one():
    adapted = network_training(SDDA(size=8, lr=0.1, momentum=0.0, start_epoch=25))
    model, domain = copy.deepcopy(adapted.model), copy.deepcopy(adapted.domain)
    made, labels = IMAGES.flip(0) + 1, torch.arange(15) % 3
    adapted.step(made, labels, IMAGES)

    entered = []
    model.fc.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    logits = model(torch.cat([made, IMAGES]))
    classified = F.cross_entropy(logits[:15], labels)
    sides = domain(entered[0])
    apart = F.softplus(-sides[:15]).mean() + F.softplus(sides[15:]).mean()
    tensors = list(model.parameters())
    climbs = torch.autograd.grad(apart, tensors, allow_unused=True, retain_graph=True)
    rate = 0.1 * (1 + 0.001 * 25) ** -0.75
    for trained, tensor, down, up in zip(
        adapted.model.parameters(),
        tensors,
        torch.autograd.grad(classified, tensors, retain_graph=True),
        climbs,
        strict=True,
    ):
        expected = tensor - rate * (down - 0.1 * (0 if up is None else up))
        assert torch.allclose(trained, expected, atol=1e-6)
    pairs = zip(adapted.domain.parameters(), domain.parameters(), strict=True)
    for (trained, tensor), gradient in zip(pairs, torch.autograd.grad(apart, list(domain.parameters())), strict=True):
        assert torch.allclose(trained, tensor - rate * (10 if tensor.ndim > 1 else 20) * 0.1 * gradient, atol=1e-6)


def test_a_fresh_head_is_xaviers_and_forgets_the_source():
    torch.manual_seed(0)
    layer = nn.Linear(300, 200)
    layer.weight.data.fill_(9)
    xavier(layer)
    bound = math.sqrt(6 / 500)
    assert layer.weight.abs().max() <= bound
    assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert layer.bias.abs().max() == 0


@pytest.mark.parametrize(("head", "same"), [("fresh", False), ("source", True)])
def test_the_new_classifier_starts_fresh_or_from_the_source(head, same):
    model = make_tiny()
    started = network_training(SDDA(head=head)).model
    assert torch.equal(started.fc.weight, model.fc.weight) == same
    assert torch.equal(started.conv1.weight, model.conv1.weight)


# the method


def test_everything_changes_from_the_start_epoch_on_and_nothing_before():
    fitted = SDDA(epochs=3, start_epoch=2, size=8, width=4, batch_size=8).fit(make_tiny(), target())
    assert fitted.predictor.bn1.num_batches_tracked == 2  # one epoch of 8 + 7 images
    assert len(fitted.notes["curves"]["generator_loss"]) == 3
    assert len(fitted.notes["curves"]["classifier_loss"]) == 1
    assert changed(QUICK) == set(make_tiny().state_dict())


def test_a_minibatch_of_one_image_is_left_out():
    fitted = SDDA(epochs=1, start_epoch=0, size=8, width=4, batch_size=7).fit(make_tiny(), target())
    assert fitted.predictor.bn1.num_batches_tracked == 2


def test_images_larger_than_the_generators_and_not_square_work():
    images = torch.randn(6, 3, 20, 12, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(QUICK.adapt(make_tiny(), target(images))(images)).all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reversal": -0.5}, "reversal=-0.5"),
        ({"beta1": 1.0}, "beta1=1.0"),
        ({"guide_ramp": 0}, "guide_ramp=0"),
        ({"epochs": 25}, "start_epoch=25.*at least 26"),
        ({"size": 30}, "size=30"),
        ({"head": "new"}, "head='new'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        SDDA(**settings)


def test_only_pictures_can_be_generated():
    with pytest.raises(FewshiftError, match=r"shape \(192,\)"):
        QUICK.adapt(make_tiny(), target(IMAGES.flatten(1)))

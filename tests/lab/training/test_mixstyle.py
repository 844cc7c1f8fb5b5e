"""MixStyle: the formula, the partners, the places, and that nothing stays in the network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from fewshift import FewshiftError
from fewshift.core.randomness import private_randomness
from fewshift.lab.datasets import digits
from fewshift.lab.training import ERM, MixStyle, mixstyle
from fewshift.lab.training.algorithm import Batch
from fewshift.lab.training.mixstyle import PARTNERS, anyone, mixed, of_another_domain
from fewshift.lab.training.recipes import PAPER
from fewshift.lab.training.trainer import Trained, train
from fewshift.models.layers.stages import find_stages
from tests.helpers.networks import same_state, state
from tests.helpers.training import (
    RECIPE,
    Staged,
    StoppedError,
    adapts,
    digit_sources,
    make_batch,
    make_checkpoint,
    make_sources,
    make_staged,
    make_task,
    stop_in_epoch,
)


def run(algorithm=None, recipe=RECIPE, sources=None, model=None, **options) -> Trained:
    return train(model or make_staged(), sources or make_sources(), recipe, algorithm or MixStyle(), **options)


def some_features(count: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Maps whose channels differ in mean and spread, partners, shares."""
    generator = torch.Generator().manual_seed(0)
    scale, shift = torch.rand(2, count, 4, 1, 1, generator=generator) * 3 + 0.2
    features = torch.randn(count, 4, 6, 5, generator=generator) * scale + shift
    return features, torch.tensor([3, 0, 4, 1, 2]), torch.rand(count, generator=generator)


def styles(features: Tensor) -> tuple[Tensor, Tensor]:
    return features.mean((2, 3), keepdim=True), features.std((2, 3), keepdim=True)


# --- the formula


def test_mixing_is_the_formula_written_out():
    features, partners, share = some_features()
    features[1] *= 1e-3  # where the count that a variance is divided by, and what is added to it, make a difference
    mixture = mixed(features, partners, share)
    maps = features.double().numpy()
    for i, j in enumerate(partners.tolist()):
        for c in range(4):
            deviations = [np.sqrt(maps[image, c].var(ddof=1) + 1e-6) for image in (i, j)]
            means = [maps[image, c].mean() for image in (i, j)]
            part = float(share[i])
            new_deviation = part * deviations[0] + (1 - part) * deviations[1]
            new_mean = part * means[0] + (1 - part) * means[1]
            expected = new_deviation * (maps[i, c] - means[0]) / deviations[0] + new_mean
            np.testing.assert_allclose(mixture[i, c].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_an_image_that_keeps_all_of_its_style_is_itself():
    features, partners, _ = some_features()
    torch.testing.assert_close(mixed(features, partners, torch.ones(5)), features, rtol=0, atol=1e-5)


def test_an_image_that_keeps_nothing_has_the_mean_and_spread_of_its_partner():
    features, partners, _ = some_features()
    mixture, expected = styles(mixed(features, partners, torch.zeros(5))), styles(features[partners])
    torch.testing.assert_close(mixture, expected, rtol=1e-4, atol=1e-5)


def test_what_is_left_without_style_is_the_same_before_and_after():
    features, partners, share = some_features()
    (mean, deviation), (new_mean, new_deviation) = styles(features), styles(mixed(features, partners, share))
    torch.testing.assert_close(
        (mixed(features, partners, share) - new_mean) / new_deviation, (features - mean) / deviation, rtol=0, atol=1e-4
    )


def test_gradients_do_not_flow_through_styles():
    features, partners, share = some_features()
    features.requires_grad_()
    mixed(features, partners, share).sum().backward()
    deviation = styles(features.detach())[1]
    part = share.view(-1, 1, 1, 1)
    expected = (part * deviation + (1 - part) * deviation[partners]) / deviation
    torch.testing.assert_close(features.grad, expected.expand_as(features), rtol=1e-4, atol=1e-5)


# --- the partners


@pytest.mark.parametrize(
    "domains",
    [
        [4] * 6 + [7] * 6,
        [0, 1, 0, 1, 0, 1, 0, 1],  # parts of a batch that is accumulated
        [0] * 5 + [1] * 4,  # an odd batch
        [0] * 9 + [1],
        [0, 1, 2, 2, 1, 0, 0, 0, 1],
    ],
)
def test_across_domains_every_partner_is_of_another(domains):
    domains = torch.tensor(domains)
    seen = set()
    with private_randomness(0):
        for _ in range(30):
            partners = of_another_domain(domains)
            assert (domains[partners] != domains).all()
            seen.add(tuple(partners.tolist()))
            if domains.unique(return_counts=True)[1].eq(len(domains) / 2).all():
                assert torch.equal(partners.sort().values, torch.arange(len(domains)))
    assert len(seen) > 5


def test_images_of_one_domain_alone_keep_their_style():
    partners = of_another_domain(torch.zeros(4, dtype=torch.long))
    features = some_features()[0][:4]
    torch.testing.assert_close(mixed(features, partners, torch.rand(4)), features, rtol=0, atol=1e-5)


def test_random_partners_are_a_permutation_of_all():
    with private_randomness(0):
        drawn = torch.stack([anyone(torch.tensor([0] * 5 + [1] * 5)) for _ in range(300)])
    assert torch.equal(drawn.sort(1).values, torch.arange(10).expand(300, 10))
    assert torch.bincount(drawn[:, 0], minlength=10).min() > 10  # of either domain


def test_in_training_partners_are_looked_for_among_the_images_of_the_step(monkeypatch):
    seen: list[tuple[Tensor, Tensor]] = []
    own = PARTNERS["crossdomain"]

    def spy(domains: Tensor) -> Tensor:
        partners = own(domains)
        seen.append((domains, partners))
        return partners

    monkeypatch.setitem(PARTNERS, "crossdomain", spy)
    for accumulate in (1, 2):
        run(MixStyle(probability=1.0), replace(RECIPE, epochs=1, domains_per_batch=2, accumulate=accumulate))
    assert {len(domains) for domains, _ in seen} == {8, 4}
    for domains, partners in seen:
        assert torch.bincount(domains).tolist() == [len(domains) // 2] * 2
        assert (domains[partners] != domains).all()


# --- how often, how much


def test_each_layer_decides_for_itself_and_each_image_has_a_share_of_its_own(monkeypatch):
    shares: list[Tensor] = []

    def spy(features: Tensor, partners: Tensor, share: Tensor) -> Tensor:
        assert share.shape == (len(features),)
        shares.append(share)
        return mixed(features, partners, share)

    monkeypatch.setattr(mixstyle, "mixed", spy)
    trainee, batch, mixes = MixStyle().trainee(make_staged(), make_task()), make_batch([0] * 4 + [1] * 4), []
    with private_randomness(0), torch.no_grad():
        trainee.before_epoch(0)
        for _ in range(400):
            begun = len(shares)
            trainee.loss(batch)
            mixes.append(len(shares) - begun)
    # Binomial(3, 1/2): layers that decide together would mix 0 or 3 times
    frequencies = torch.bincount(torch.tensor(mixes), minlength=4) / 400
    torch.testing.assert_close(frequencies, torch.tensor([1, 3, 3, 1]) / 8, rtol=0, atol=0.08)
    drawn = torch.stack(shares)
    assert all(len(row.unique()) > 1 for row in drawn)
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(drawn.var()) == pytest.approx(1 / (4 * (2 * 0.1 + 1)), abs=0.01)  # of Beta(0.1, 0.1)


def test_labels_are_not_mixed(monkeypatch):
    monkeypatch.setattr(mixstyle, "mixed", lambda features, partners, share: features)
    trainee, batch = MixStyle(probability=1.0).trainee(make_staged(), make_task()), make_batch([0, 1, 0, 1])
    trainee.before_epoch(0)
    loss, logits = trainee.loss(batch)
    torch.testing.assert_close(loss, F.cross_entropy(make_staged().train()(batch.images), batch.labels))
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.labels))


def test_in_evaluation_mode_nothing_is_mixed():
    model, plain, batch = make_staged(), make_staged(), make_batch([0, 1, 0, 1])
    trainee = MixStyle(probability=1.0).trainee(model, make_task())
    trainee.batch = batch
    with torch.no_grad(), private_randomness(0):
        assert torch.equal(model.eval()(batch.images), plain.eval()(batch.images))
        assert not torch.equal(model.train()(batch.images), plain.train()(batch.images))


# --- in the trainer


def test_nothing_of_it_stays_in_the_network():
    plain, done = make_staged(), run().model
    assert [(name, type(module)) for name, module in done.named_modules()] == [
        (name, type(module)) for name, module in plain.named_modules()
    ]
    assert done.state_dict().keys() == plain.state_dict().keys()
    assert not any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in done.modules()
    )
    assert not done.training


def test_never_mixing_is_plain_training_and_mixing_is_not():
    recipe = replace(RECIPE, augment="none", domains_per_batch=2)
    plain, never, always = (
        state(run(algorithm, recipe).model)
        for algorithm in (ERM(), MixStyle(probability=0.0), MixStyle(probability=1.0))
    )
    assert same_state(plain, never)
    assert not same_state(plain, always)


@pytest.mark.parametrize("mix", PARTNERS)
def test_a_training_that_is_stopped_and_resumed_has_the_bits_of_one_that_was_not(tmp_path, mix):
    whole = run(MixStyle(mix=mix))
    with pytest.raises(StoppedError):
        run(MixStyle(mix=mix), checkpoint=make_checkpoint(tmp_path), hear=stop_in_epoch(1))
    seen: list[int] = []
    resumed = run(
        MixStyle(mix=mix),
        checkpoint=make_checkpoint(tmp_path),
        resume=True,
        hear=lambda standing: seen.append(standing.moment.epoch),
    )
    assert set(seen) == {1, 2}
    assert same_state(state(resumed.model), state(whole.model))
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]


def test_the_papers_recipe_for_pacs_has_two_domains_in_a_batch():
    recipe = PAPER["pacs"]
    assert (recipe.batch_size, recipe.domains_per_batch, recipe.epochs) == (128, 2, 150)
    MixStyle().check_recipe(recipe, make_sources())


# --- the places


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("timm:resnet18", "layer{1}"),
        ("timm:seresnet50", "layer{1}"),
        ("torchvision:resnet50", "layer{1}"),
        ("timm:resnetv2_50", "stages.{0}"),
        ("timm:regnety_002", "s{1}"),
        ("torchvision:regnet_y_400mf", "trunk_output.block{1}"),
        ("torchvision:densenet121", "features.denseblock{1}"),
    ],
)
def test_stages_are_found_in_the_networks_of_libraries(name, stages):
    # without memory, but where the network's own arithmetic has to be done
    with torch.device("cpu" if "regnet_y" in name else "meta"):
        model = timm.create_model(name[5:]) if name[:5] == "timm:" else torchvision.models.get_model(name[12:])
    assert find_stages(model) == tuple(stages.format(number - 1, number) for number in range(1, 5))


def test_stages_are_found_in_the_encoder_of_a_segmentation_network():
    smp = pytest.importorskip("segmentation_models_pytorch")
    with torch.device("meta"):
        model = smp.create_model("unet", "resnet18", encoder_weights=None)
    assert find_stages(model) == tuple(f"encoder.layer{number}" for number in range(1, 5))


@pytest.mark.parametrize(("layers", "expected"), [("auto", [1, 2, 3]), ("layer1, layer2", [1, 2])])
def test_styles_are_mixed_after_the_first_three_stages_or_those_named(layers, expected):
    model = digits.digits_network()
    MixStyle(layers=layers).trainee(model, make_task(shape=(1, 28, 28)))
    assert [name for name, module in model.named_modules() if module._forward_hooks] == [f"layer{n}" for n in expected]


def test_other_networks_are_trained_by_naming_their_layers():
    with private_randomness(0):
        model = timm.create_model("mobilenetv3_small_050", num_classes=3)
    trainee = MixStyle(layers="blocks.0,blocks.1", probability=1.0).trainee(model, make_task(shape=(3, 32, 32)))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    trainee.before_epoch(0)
    loss, _ = trainee.loss(Batch((images,), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 0, 1])))
    loss.backward()
    assert model.conv_stem.weight.grad.abs().sum() > 0
    assert [name for name, module in model.named_modules() if module._forward_hooks] == ["blocks.0", "blocks.1"]


# --- what cannot be


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"mix": "cross"}, "mix='cross'.*random, crossdomain"),
        ({"probability": 1.5}, r"probability=1\.5 .*from 0 to 1"),
        ({"alpha": 0.0}, "alpha=0 .*above 0"),
        ({"alpha": -1.0}, r"alpha=-1\.0 .*from 0"),
        ({"layers": 1}, "layers=1 .*word"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_can(settings, facts):
    with pytest.raises(FewshiftError, match=facts):
        MixStyle(**settings)


def test_across_domains_there_have_to_be_two():
    alone = make_sources((24,))
    with pytest.raises(FewshiftError, match=r"two sources.*'place0'.*mix to random"):
        run(sources=alone)
    run(MixStyle(mix="random"), replace(RECIPE, epochs=1), alone)
    with pytest.raises(FewshiftError, match=r"two sources.*domains_per_batch is 1"):
        run(recipe=replace(RECIPE, domains_per_batch=1))


class Hidden(Staged):
    """A stage that is there and not executed, one that gives a pair, and one map of a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.pool = nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1)
        self.flat = nn.Flatten()

    def forward(self, images: Tensor) -> Tensor:
        for number in range(1, 5):
            images = self.get_submodule(f"layer{number}")(images)
        return self.fc(self.flat(self.pool(images)))


@pytest.mark.parametrize(
    ("layers", "facts"),
    [
        ("layer1,layer9", "Hidden .*'layer9'.*layer1, layer2, layer3, layer4"),
        ("", "Hidden .*layer ''.*layer1, layer2, layer3, layer4"),
        ("layer1,layer1", "'layer1' .*twice"),
        ("unused", "'unused' .*never executed"),
        ("flat", "'flat' .*map for each channel"),
        ("pool", "'pool' .*one pixel.*raise size"),
    ],
)
def test_layers_that_cannot_be_mixed_after_are_named(layers, facts):
    with pytest.raises(FewshiftError, match=facts):
        run(MixStyle(layers=layers), model=Hidden())


def test_a_network_without_stages_is_refused_with_its_layers():
    with pytest.raises(FewshiftError, match=r"MobileNetV3 .*layer1 to layer4.*conv_stem, bn1, blocks\.0"):
        MixStyle().trainee(timm.create_model("mobilenetv3_small_050"), make_task())
    with pytest.raises(FewshiftError, match=r"0\.layer1 and from 1\.layer1"):
        find_stages(nn.Sequential(Staged(), Staged()))


# --- and then LCCS


def test_lccs_adapts_a_network_that_was_trained_so():
    recipe = replace(PAPER["digits"], epochs=2, domains_per_batch=2)
    done = train(digits.digits_network(), digit_sources("mnist", "uci"), recipe, MixStyle())
    assert done.epochs[1].loss < done.epochs[0].loss
    adapts(done.model)

"""DELTA: the distance of feature maps, the attention over filters, the layers it watches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from fewshift import FewshiftError, Target
from fewshift.methods import delta_reg
from fewshift.methods.delta_reg import DeltaReg, attention, filter_importance, maps, omega, stage_ends
from tests.helpers.networks import make_support, make_tiny, same_state, state


def test_identical_networks_have_no_distance():
    model, images = make_tiny(), make_support().images
    with maps(model, ["conv1", "conv2"]) as own:
        model(images)
    weights = {name: torch.full((6,), 1 / 6) for name in own}
    assert omega(own, own, weights).item() == 0


def test_the_distance_is_summed_over_the_minibatch_and_weighted_by_channel():
    generator = torch.Generator().manual_seed(0)
    own, theirs = ({"a": torch.randn(4, 3, 2, 5, generator=generator)} for _ in range(2))
    weight = torch.tensor([0.5, 0.3, 0.2])
    naive = 0.0
    for image in range(4):
        for channel in range(3):
            gap = (own["a"][image, channel] - theirs["a"][image, channel]).norm() ** 2 / 10
            naive += 0.5 * 3 * float(weight[channel]) * float(gap)
    assert float(omega(own, theirs, {"a": weight})) == pytest.approx(naive, rel=1e-5)


def test_attention_is_the_softmax_of_softened_scores_and_filters_come_back_bit_for_bit():
    model, support = make_tiny(), make_support()
    before = state(model)
    rises = filter_importance(model, ["conv2"], [(support.images, support.labels)], F.cross_entropy)["conv2"]
    assert same_state(before, state(model))
    with torch.no_grad():
        broken = copy.deepcopy(model)
        broken.conv2.weight[3] = 0
        expected = F.cross_entropy(broken(support.images), support.labels) - F.cross_entropy(
            model(support.images), support.labels
        )
    assert float(rises[3]) == pytest.approx(float(expected), abs=1e-6)
    weights = attention(rises)
    assert float(weights.sum()) == pytest.approx(1)
    scores = (rises - rises.mean()) / rises.std(correction=0) / 5
    assert torch.allclose(weights, scores.exp() / scores.exp().sum())
    assert torch.allclose(attention(torch.ones(4)), torch.full((4,), 0.25))


WATCHED = {
    "resnet18": [f"layer{stage}.1.conv2" for stage in (1, 2, 3, 4)],
    "resnet50": ["layer1.2.conv3", "layer2.3.conv3", "layer3.5.conv3", "layer4.2.conv3"],
    "mobilenet_v2": [f"features.{block}.conv.2" for block in (3, 6, 13, 17)],  # the projections that end the stages
    "densenet121": [
        *(f"features.transition{number}.conv" for number in (1, 2, 3)),
        "features.denseblock4.denselayer16.conv1",
    ],
}


@pytest.mark.parametrize("name", WATCHED)
def test_the_watched_layers_end_the_stages_of_known_architectures(name):
    with torch.device("meta"):  # shapes alone
        model, images = getattr(torchvision.models, name)(weights=None).eval(), torch.empty(1, 3, 64, 64)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    with maps(model, list(layers)) as seen:
        model(images)
    assert stage_ends(seen, separable=name == "mobilenet_v2")[-4:] == WATCHED[name]


def test_watched_layers_can_be_named_and_must_be_convolutions():
    support = make_support(1)
    named = DeltaReg(layers="conv1, conv2", epochs=1).adapt(make_tiny(), Target(support))
    assert same_state(state(named), state(DeltaReg(layers="conv1,conv2", epochs=1).adapt(make_tiny(), Target(support))))
    with pytest.raises(FewshiftError, match="'bn1' is not a 2d convolution"):
        DeltaReg(layers="bn1").adapt(make_tiny(), Target(support))


def test_attention_looks_at_images_of_every_class(monkeypatch):
    seen = []
    original = delta_reg.filter_importance

    def noting(model, names, pairs, loss):
        seen.extend(torch.cat([labels for _, labels in pairs]).unique().tolist())
        return original(model, names, pairs, loss)

    monkeypatch.setattr(delta_reg, "filter_importance", noting)
    support = make_support(shots=60)
    order = support.labels.argsort()  # sorted by class, as folders are
    sorted_support = type(support)(support.images[order], support.labels[order])
    DeltaReg(epochs=0).adapt(make_tiny(), Target(sorted_support))
    assert seen == [0, 1, 2]

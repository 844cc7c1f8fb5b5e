"""A network may read the weights of a BatchNorm layer by itself: new statistics are not written into those."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fewshift
from fewshift import LCCS, AdaBN, FewshiftError, Network, Sites, Target
from fewshift.core.network import COMPUTED
from fewshift.core.outside import READ_ELSEWHERE
from tests.helpers.hard_networks import Attending, Tied, Untied, made
from tests.helpers.networks import make_support, same_state, state


@pytest.fixture
def network():
    return made(Attending)


def test_the_layer_is_left_alone_and_named(network, support):
    view = Network.of(network, support.images)
    assert [layer.name for layer in view.layers] == ["bn1", "bn3"]
    assert [(layer.name, layer.reason) for layer in view.skipped] == [("bn2", READ_ELSEWHERE)]


def test_the_other_layers_are_normalised_as_by_a_naive_loop(network, support):
    expected = copy.deepcopy(network)
    for name in ("bn1", "bn3"):
        entering = []
        with getattr(expected, name).register_forward_pre_hook(lambda _, args: entering.append(args[0])):  # noqa: B023
            expected(support.images)
        layer = getattr(expected, name)
        layer.running_mean = entering[0].mean((0, 2, 3)).detach()
        layer.running_var = entering[0].var((0, 2, 3), correction=0).detach()
    fresh = make_support(seed=5).images
    assert torch.allclose(AdaBN().adapt(network, Target(support))(fresh), expected(fresh), atol=1e-5)


@pytest.mark.parametrize("method", ["adabn", "lccs", "blend", "blend-head", "finetune-bn"])
def test_its_weights_stay_as_they_are(network, method, support):
    adapted = fewshift.adapt(network, support, method=method, accept="always", validate=None).model
    assert same_state(state(adapted.bn2), state(network.bn2))
    assert not same_state(state(adapted.bn1), state(network.bn1))


def test_what_learns_by_gradients_may_change_them_and_sites_answer_like_their_networks(network, support, tmp_path):
    results = [
        fewshift.adapt(network, (support.images + place, support.labels), method="l2", accept="always")
        for place in (0, 2)
    ]
    for number, result in enumerate(results):
        result.delta.save(tmp_path / f"{number}.safetensors")
    images = support.images[:3]
    models = [results[0].model, results[1].model, network]
    expected = torch.cat([model(image[None]) for model, image in zip(models, images, strict=True)])
    assert torch.allclose(Sites(network, tmp_path)(images, of=["0", "1", None]), expected, atol=1e-5)


class Looking(Untied):
    """Asks a weight for its type, its device and its shape."""

    def forward(self, images):
        images = images.to(self.bn1.weight.dtype).to(self.bn2.weight).type_as(self.bn3.bias)
        return super().forward(images) + self.bn1.weight.new_zeros(1) + torch.zeros_like(self.bn2.bias)[:1]


def test_a_look_at_its_type_reads_nothing(support):
    assert not Network.of(made(Looking), support.images).skipped


class Fused(Untied):
    """Computes a layer of its own with the weights of one that is called too."""

    def forward(self, images):
        entered = self.bn1(self.conv1(images))
        again = nn.functional.batch_norm(
            entered, self.bn1.running_mean, self.bn1.running_var, self.bn1.weight, self.bn1.bias
        )
        return self.fc(self.bn2(self.conv2(again.relu())).mean((2, 3)))


def test_a_layer_that_is_computed_once_more_by_hand_is_left_alone(support):
    view = Network.of(made(Fused), support.images)
    assert {layer.name: layer.reason for layer in view.skipped} == {"bn1": READ_ELSEWHERE, "bn3": "never executed"}


def test_where_all_layers_are_read_the_refusal_says_so(support):
    class OneLayer(Fused):
        def forward(self, images):
            hidden = self.bn1(self.conv1(images)) * self.bn1.weight.sum()
            return self.fc(hidden.mean((2, 3)))

    with pytest.raises(FewshiftError, match="'bn1' is a BatchNorm2d: the network reads its weights"):
        LCCS().adapt(made(OneLayer), Target(support))


@pytest.mark.parametrize("keep", [lambda weight: [weight], lambda weight: {"first": weight}])
def test_a_weight_in_a_list_or_a_dict_is_known_as_the_layers(keep, support):
    class Listing(Untied):
        def __init__(self):
            super().__init__()
            self.kept = keep(self.bn2.weight)

        def forward(self, images):
            [weight] = self.kept.values() if isinstance(self.kept, dict) else self.kept
            return super().forward(images * weight.abs().mean())

    view = Network.of(made(Listing), support.images)
    assert [(layer.name, layer.reason) for layer in view.skipped] == [("bn2", READ_ELSEWHERE)]


def test_statistics_that_carry_new_ones_and_are_read_elsewhere_are_noticed(support):
    def skipped(kind):
        class Gated(kind):
            def forward(self, images):
                return super().forward(images) * self.bn2.running_mean.sigmoid().mean()

        return Network.of(made(Gated), support.images).skipped

    assert [(layer.name, layer.reason) for layer in skipped(Tied)] == [("bn2", READ_ELSEWHERE)]
    assert not skipped(Untied)  # its weights carry them


def test_a_pruned_layer_is_left_alone(support):
    network = made(Untied).requires_grad_(False)
    prune.l1_unstructured(network.bn2, "weight", 0.5)
    adapted = fewshift.adapt(network, support, method="adabn", accept="always")
    view = Network.of(network, support.images)
    assert [(layer.name, layer.reason) for layer in view.skipped] == [("bn2", COMPUTED)]
    assert torch.equal(adapted.model.bn2.weight, network.bn2.weight)

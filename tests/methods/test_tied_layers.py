"""BatchNorm layers that share weight and bias have statistics of their own, and are adapted each by its own."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torchvision.ops import FrozenBatchNorm2d

import fewshift
from fewshift import LCCS, METHODS, AdaBN, FewshiftError, Sites, Target
from fewshift.core.method import Needs
from fewshift.core.support import Unlabelled
from tests.helpers.hard_networks import Inside, SameMemory, SameStatistics, Tied, Untied, WeightOnly, made, twin
from tests.helpers.methods import quick
from tests.helpers.networks import make_support, same_state, state

KINDS = [Tied, SameMemory, WeightOnly, Inside]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def network(request):
    return made(request.param)


def test_adabn_gives_each_layer_the_statistics_of_its_own_input(network):
    support = make_support()
    expected = twin(network, Untied).train()(support.images)  # BatchNorm normalises with its batch there
    assert torch.allclose(AdaBN().adapt(network, Target(support))(support.images), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["adabn", "lccs", "blend", "blend-head", "testtime-bn", "alpha-bn"])
def test_methods_that_change_statistics_do_with_tied_layers_what_they_do_with_their_untied_twin(network, name):
    target = Target(make_support())
    fresh = make_support(seed=5).images
    ours, expected = (quick(name).adapt(model, target)(fresh) for model in (network, twin(network, Untied)))
    assert torch.allclose(ours, expected, atol=1e-5)


def test_greedy_and_averaged_statistics_are_those_of_the_untied_twin(network):
    support = make_support()
    target = Target(support, Unlabelled(support.images))
    methods = [
        LCCS(init="greedy", grid=2, epochs=1),
        LCCS(statistics="ema", grid=2, epochs=1),
        *(AdaBN(statistics=way, batch_size=4) for way in ("exact", "cumulative", "ema")),
    ]
    for method in methods:
        ours, expected = (method.adapt(model, target)(support.images) for model in (network, twin(network, Untied)))
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs is not Needs.STREAM])
def test_every_method_leaves_the_given_network_and_its_ties_as_they_are(name):
    network, support = made(Tied), make_support()
    before = state(network)
    predictor = quick(name).adapt(network, Target(support, Unlabelled(make_support(seed=3).images)))
    assert same_state(state(network), before)
    for one, other in zip(network.bn1.parameters(), network.bn2.parameters(), strict=True):
        assert one is other
    if METHODS[name]().plain:
        assert predictor.bn1.weight is predictor.bn2.weight


@pytest.mark.parametrize("method", ["adabn", "finetune-bn", "auto"])
def test_deltas_of_tied_layers_apply_and_revert_exactly(network, method, tmp_path):
    support = make_support()
    result = fewshift.adapt(network, support, method=method, accept="always", validate=None)
    file = result.delta.save(tmp_path / "delta.safetensors")
    adapted = fewshift.apply(network, file)
    assert torch.equal(adapted(support.images), result.model(support.images))
    assert same_state(state(fewshift.revert(adapted, file)), state(network))
    assert same_state(state(fewshift.revert(result.model, file)), state(network))


@pytest.mark.parametrize("method", ["adabn", "finetune-bn"])
def test_sites_of_tied_layers_are_answered_as_by_their_own_networks(network, method, tmp_path):
    support = make_support(shots=2)
    results = [
        fewshift.adapt(network, (support.images + place, support.labels), method=method, accept="always", validate=None)
        for place in (0, 2)
    ]
    for number, result in enumerate(results):
        result.delta.save(tmp_path / f"{number}.safetensors")
    sites = Sites(network, tmp_path)
    models = [results[0].model, results[1].model, network, results[0].model]
    expected = torch.cat([model(image[None]) for model, image in zip(models, support.images, strict=False)])
    assert torch.allclose(sites(support.images[:4], of=["0", "1", None, "0"]), expected, atol=1e-5)
    assert sites.one_pass


def test_merged_weights_of_tied_layers_load_again(tmp_path, monkeypatch):
    module = type(sys)("tied_networks")
    module.make = lambda: made(Tied)
    monkeypatch.setitem(sys.modules, "tied_networks", module)
    network, support = made(Tied), make_support()
    result = fewshift.adapt(network, support, method="adabn", accept="always", validate=None)
    out = fewshift.merge(network, result.delta, tmp_path / "merged.safetensors")
    loaded = fewshift.load("tied_networks:make", out)
    assert torch.equal(loaded(support.images), result.model(support.images))


def test_a_dead_channel_of_a_tied_layer_has_no_variance_below_zero():
    network, support = made(Tied), make_support()
    with torch.no_grad():
        network.conv2.weight[0] = 0
    adapted = AdaBN().adapt(network, Target(support))
    assert adapted.bn2.running_var[0] == 0
    assert (adapted.bn2.running_var >= 0).all()


@pytest.mark.parametrize("name", ["adabn", "lccs", "blend", "auto"])
def test_layers_that_share_statistics_too_are_refused_by_name(name):
    with pytest.raises(FewshiftError, match="'bn1' and 'bn2' share their running statistics"):
        fewshift.adapt(made(SameStatistics), make_support(), method=name)


def test_layers_that_share_statistics_but_no_weights_are_adapted_through_their_weights():
    class Common(Tied):
        def tie(self):
            self.bn2.running_mean, self.bn2.running_var = self.bn1.running_mean, self.bn1.running_var

    network, support = made(Common), make_support()
    expected = twin(network, Untied).train()(support.images)
    assert torch.allclose(AdaBN().adapt(network, Target(support))(support.images), expected, atol=1e-5)


def test_a_weight_that_the_network_uses_elsewhere_too_stays_there_as_it_is():
    class Elsewhere(Untied):
        def __init__(self):
            super().__init__()
            self.scale = self.bn3.weight

        def forward(self, images):
            return super().forward(images) * self.scale.sum()

    network, support = made(Elsewhere), make_support()
    before = state(network)
    expected = copy.deepcopy(network).train()(support.images)
    assert torch.allclose(AdaBN().adapt(network, Target(support))(support.images), expected, atol=1e-5)
    assert same_state(state(network), before)


def frozen(network, of):
    """The network with frozen layers in the place of its first two, whose tensors `of` makes."""
    for name in ("bn1", "bn2"):
        layer = FrozenBatchNorm2d(6)
        for key, tensor in of(name).items():
            layer.register_buffer(key, tensor)
        setattr(network, name, layer)
    return network.eval()


@pytest.mark.parametrize("way", ["overlapping", "expanded"])
def test_frozen_layers_whose_tensors_overlap_are_adapted_through_their_statistics(way):
    memory = torch.rand(8, generator=torch.Generator().manual_seed(0)) + 0.5

    def overlapping(name):
        return {"weight": memory[:6] if name == "bn1" else memory[2:]}

    def expanded(name):
        return {"weight": memory[:1].expand(6)}

    of = {"overlapping": overlapping, "expanded": expanded}[way]
    network, support = frozen(made(Untied), of), make_support()
    apart = frozen(made(Untied), lambda name: {key: tensor.clone() for key, tensor in of(name).items()})
    ours, expected = (AdaBN().adapt(model, Target(support))(support.images) for model in (network, apart))
    assert torch.allclose(ours, expected, atol=1e-5)


def test_one_tensor_for_both_statistics_is_refused():
    network = made(Untied)
    network.bn1 = torch.nn.BatchNorm2d(6, affine=False).eval()
    network.bn1.running_mean = network.bn1.running_var
    with pytest.raises(FewshiftError, match="running statistics of BatchNorm layer 'bn1' share their memory"):
        fewshift.adapt(network, make_support(), method="adabn")

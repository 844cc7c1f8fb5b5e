"""A layer may be called `layer(x)` or `layer(input=x)`: it is the same network."""

from __future__ import annotations

import pytest
import torch

import fewshift
from fewshift import METHODS, Sites, Target
from fewshift.core.method import Needs
from fewshift.core.support import Unlabelled
from tests.helpers.hard_networks import ByKeyword, made, twin
from tests.helpers.methods import quick
from tests.helpers.networks import Tiny, make_support, same_state


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_takes_layers_called_by_keyword(name):
    support = make_support()
    network = made(ByKeyword)
    target = Target(support, Unlabelled(make_support(seed=3).images))
    ours, expected = (quick(name).adapt(model, target) for model in (network, twin(network, Tiny)))
    if METHODS[name].needs is not Needs.STREAM and METHODS[name]().plain:
        assert same_state(ours.state_dict(), expected.state_dict())
    assert torch.equal(ours(support.images), expected(support.images))


def test_a_shift_is_seen_in_layers_called_by_keyword():
    network, images = made(ByKeyword), make_support().images
    assert fewshift.shift(network, images).score == fewshift.shift(twin(network, Tiny), images).score


def test_sites_of_layers_called_by_keyword_are_answered_in_one_pass(tmp_path):
    network, support = made(ByKeyword), make_support(shots=2)
    results = [
        fewshift.adapt(network, (support.images + place, support.labels), method="blend-head", accept="always")
        for place in (0, 2)
    ]
    for number, result in enumerate(results):
        result.delta.save(tmp_path / f"{number}.safetensors")
    sites = Sites(network, tmp_path)
    mixed = sites(support.images[:4], of=["0", "1", None, "0"])
    models = [results[0].model, results[1].model, network, results[0].model]
    expected = torch.cat([model(image[None]) for model, image in zip(models, support.images, strict=False)])
    assert sites.one_pass
    assert torch.allclose(mixed, expected, atol=1e-5)

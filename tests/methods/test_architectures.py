"""Real architectures: counts of the paper, and merge then strict-load into a freshly built network."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision

import fewshift
from fewshift import LCCS
from tests.helpers.networks import make_support, unsettle

COUNTS = {
    "resnet18": (80, 9_600),
    "resnet50": (212, 53_120),
    "resnet101": (416, 105_344),
    "densenet121": (484, 83_648),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_papers(name):
    seen = fewshift.inspect(getattr(torchvision.models, name)(weights=None))
    assert (seen.coefficients, seen.affine_parameters) == COUNTS[name]
    if name == "densenet121":
        assert seen.parameters == 7_978_856


BUILD = {
    "resnet18": lambda: timm.create_model("resnet18", num_classes=4),
    "efficientnet_lite0": lambda: timm.create_model("efficientnet_lite0", num_classes=4),
    "mobilenetv3_small_050": lambda: timm.create_model("mobilenetv3_small_050", num_classes=4),
    "densenet121": lambda: timm.create_model("densenet121", num_classes=4),
    "regnetx_002": lambda: timm.create_model("regnetx_002", num_classes=4),
    "torchvision shufflenet": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=4),
}


@pytest.mark.parametrize("name", BUILD)
def test_adapted_weights_load_strictly_into_a_fresh_network_with_the_same_logits(name):
    torch.manual_seed(0)
    model = unsettle(BUILD[name]())
    support = make_support(1, 4, 32)
    method = LCCS(init=0.5, epochs=1, n=2, classifier="ncc")
    result = fewshift.adapt(model, support, method=method, validate=None)
    fresh = BUILD[name]()
    fresh.load_state_dict(result.model.state_dict(), strict=True)
    with torch.no_grad():
        expected = result.model(support.images)
        assert torch.allclose(fresh.eval()(support.images), expected, atol=1e-5)
        assert not torch.allclose(model(support.images), expected, atol=1e-3)

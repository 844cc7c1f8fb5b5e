"""Layers that look like BatchNorm and compute something else are left alone; all kinds of BatchNorm are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import fewshift
from fewshift import FewshiftError, Network
from fewshift.core.folding import OTHERWISE
from tests.helpers.networks import Tiny, make_support, unsettle


def computed(layer, inputs, weight):
    return F.batch_norm(inputs, layer.running_mean, layer.running_var, weight, layer.bias, False, 0.0, layer.eps)


class OnePlus(nn.BatchNorm2d):
    def forward(self, inputs):
        return computed(self, inputs, 1 + self.weight)


class Clamped(nn.BatchNorm2d):
    def forward(self, inputs):
        return computed(self, inputs, self.weight.clamp(-1, 1))


class Attentive(nn.BatchNorm2d):
    def forward(self, inputs):
        share = self.weight.abs() / self.weight.abs().sum()
        return super().forward(inputs) * share[:, None, None] * len(share)


class WithHook(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.register_forward_hook(lambda layer, _, output: output * layer.weight.abs()[:, None, None])


class OwnEps(nn.Module):
    """A frozen layer whose eps nobody can see."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.rand(channels) - 0.5)

    def forward(self, inputs):
        return F.batch_norm(inputs, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, 0.1)


class ByBatch(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(True)


class ByBatchToo(nn.BatchNorm2d):
    def forward(self, inputs):
        return F.batch_norm(inputs, None, None, self.weight, self.bias, True)


class Scaled(nn.BatchNorm2d):
    """Is linear in its weight, though it is not the plain layer."""

    def forward(self, inputs):
        return super().forward(inputs).mul(2).relu()


def with_layer(kind):
    network = Tiny()
    network.bn1 = kind(6)
    return unsettle(network).eval()


@pytest.mark.parametrize("kind", [OnePlus, Clamped, Attentive, WithHook, OwnEps])
def test_a_layer_that_computes_something_else_is_left_alone_and_named(kind):
    network, support = with_layer(kind), make_support()
    seen = Network.of(network, support.images)
    assert [layer.name for layer in seen.layers] == ["bn2"]
    assert [(skipped.name, skipped.reason) for skipped in seen.skipped] == [("bn1", OTHERWISE)]

    adapted = fewshift.adapt(network, support, method="adabn", accept="always", validate=None).model
    reference = with_layer(kind)
    reference.load_state_dict(network.state_dict())
    entering = []
    with reference.bn2.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0])), torch.no_grad():
        reference(support.images)
    values = entering[0].transpose(0, 1).flatten(1)
    reference.bn2.running_mean, reference.bn2.running_var = values.mean(1), values.var(1, correction=0)
    assert torch.allclose(adapted(support.images), reference(support.images), atol=1e-5)


@pytest.mark.parametrize("kind", [ByBatch, ByBatchToo])
@pytest.mark.parametrize("method", ["adabn", "auto"])
def test_a_layer_that_always_normalises_with_its_batch_is_refused(kind, method):
    with pytest.raises(FewshiftError, match=f"'bn1' is a {kind.__name__}: it normalises with its batch"):
        fewshift.adapt(with_layer(kind), make_support(), method=method)


@pytest.mark.parametrize(
    "kind",
    [
        nn.BatchNorm2d,
        Scaled,
        BatchNormAct2d,
        FrozenBatchNorm2d,
        nn.SyncBatchNorm,
        lambda channels: nn.BatchNorm2d(channels, affine=False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_kind_of_batchnorm_is_adapted(kind, dtype):
    network = with_layer(kind).to(dtype)
    assert [layer.name for layer in Network.of(network, make_support().images).layers] == ["bn1", "bn2"]


def test_judging_a_layer_changes_nothing_in_it():
    network, images = with_layer(ByBatch), make_support().images
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    Network.of(network, images)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())

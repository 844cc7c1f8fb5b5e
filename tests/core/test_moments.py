"""Moments, and the identity between statistics and affine parameters, against naive loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.func import functional_call
from torchvision.ops import FrozenBatchNorm2d

from fewshift.core.moments import concatenated, merged, moments, source_layers
from fewshift.core.network import Network
from fewshift.core.reading import read, tied
from fewshift.core.source_layer import Normal, SourceLayer
from tests.helpers.networks import make_tiny, unsettle


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 7), (5, 4, 3, 6), (2, 4, 2, 3, 4)])
def test_moments_are_those_of_a_naive_loop(shape, interleaved):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double() * 3 + 2
    if interleaved and inputs.ndim == 4:
        inputs = inputs.to(memory_format=torch.channels_last)
    seen = moments(inputs)
    for image in range(shape[0]):
        for channel in range(shape[1]):
            values = inputs[image, channel].flatten().numpy()
            assert seen.mean[image, channel] == pytest.approx(values.mean())
            assert seen.var[image, channel] == pytest.approx(values.var(), abs=1e-12)
    for channel in range(shape[1]):
        values = inputs[:, channel].flatten().numpy()
        assert seen.pooled_mean[channel] == pytest.approx(values.mean())
        assert seen.pooled_var[channel] == pytest.approx(values.var())
        assert seen.unbiased_var[channel] == pytest.approx(values.var(ddof=1))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_do_not_cancel_when_the_mean_is_large(layout):
    inputs = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.3 + 300
    inputs = inputs.to(memory_format=layout)
    naive = inputs.double().flatten(2).var(2, correction=0)
    assert torch.allclose(moments(inputs).var, naive, rtol=1e-5)


def test_half_precision_is_summed_in_float32():
    inputs = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16() + 4
    naive = inputs.double().flatten(2).var(2, correction=0)
    assert torch.allclose(moments(inputs).var, naive, rtol=1e-5)


def test_changing_statistics_and_changing_affine_parameters_are_the_same_thing():
    """The identity of the paper's section 3.1, to 1e-10 in float64, also for negative sigma."""
    generator = torch.Generator().manual_seed(0)
    layer = unsettle(nn.BatchNorm2d(5).double())
    z = torch.randn(3, 5, 4, 4, generator=generator).double()
    mean, std = torch.randn(5, generator=generator).double(), torch.randn(5, generator=generator).double()
    shape = (1, -1, 1, 1)
    direct = layer.weight.view(shape) * (z - mean.view(shape)) / std.view(shape) + layer.bias.view(shape)
    weight, bias = SourceLayer.of(layer).affine(Normal(mean, std))
    through = nn.functional.batch_norm(z, layer.running_mean, layer.running_var, weight, bias, eps=layer.eps)
    assert (direct - through).abs().max() < 1e-10


def test_any_target_batchnorm_equals_source_affine_with_other_statistics():
    """sigma* = sigma_t gamma_s / gamma_t, mu* = mu_t - (beta_t - beta_s) sigma_t / gamma_t."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, generator=generator).double()
    mu, sigma, gamma, beta, gamma_s, beta_s = torch.rand(6, generator=generator).double() + 0.5
    target = gamma * (z - mu) / sigma + beta
    std, mean = sigma * gamma_s / gamma, mu - (beta - beta_s) * sigma / gamma
    assert (gamma_s * (z - mean) / std + beta_s - target).abs().max() < 1e-10


def test_layers_without_affine_parameters_carry_the_statistics_themselves(support):
    torch.manual_seed(0)
    model = make_tiny()
    model.bn1 = nn.BatchNorm2d(6, affine=False)
    unsettle(model)
    network = Network.of(model, support.images)
    source = source_layers(network)
    reading = read(network, [support.images], tied(network, 0.5))
    normals = {name: source[name].blend(seen.normal(source[name].eps), 0.5) for name, seen in reading.moments.items()}
    tensors = merged(network, normals)
    assert {"bn1.running_mean", "bn1.running_var", "bn2.weight", "bn2.bias"} == tensors.keys()
    assert torch.allclose(network.with_tensors(tensors)(support.images), reading.logits[0], atol=1e-5)
    broken = {"bn1": Normal(normals["bn1"].mean, -normals["bn1"].std)}
    with pytest.raises(ValueError, match="'bn1' has no weight and bias of its own"):
        merged(network, broken)


def test_images_of_different_sizes_pool_by_their_positions():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, side, side + 1, generator=generator).double() * side for side in (2, 5, 7)]
    pooled = concatenated([moments(part) for part in parts])
    for channel in range(3):
        values = np.concatenate([part[:, channel].flatten().numpy() for part in parts])
        assert float(pooled.pooled_mean[channel]) == pytest.approx(values.mean())
        assert float(pooled.pooled_var[channel]) == pytest.approx(values.var())
        assert float(pooled.as_one().unbiased_var[channel]) == pytest.approx(values.var(ddof=1))


def test_the_deviation_of_an_image_is_unbiased_with_eps_inside_the_root():
    inputs = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    expected = [[np.sqrt(inputs[n, c].numpy().var(ddof=1) + 0.1) for c in range(2)] for n in range(3)]
    np.testing.assert_allclose(moments(inputs).image_std(0.1), expected)


FLAVOURS = {
    "1d": lambda: (nn.BatchNorm1d(4), (6, 4)),
    "1d sequences": lambda: (nn.BatchNorm1d(4), (6, 4, 5)),
    "2d": lambda: (nn.BatchNorm2d(4, eps=1e-2), (6, 4, 5, 5)),
    "3d": lambda: (nn.BatchNorm3d(4), (6, 4, 2, 3, 3)),
    "without affine": lambda: (nn.BatchNorm2d(4, affine=False), (6, 4, 5, 5)),
    "frozen": lambda: (FrozenBatchNorm2d(4), (6, 4, 5, 5)),
    "with activation": lambda: (BatchNormAct2d(4), (6, 4, 5, 5)),
}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_merging_is_what_the_network_learned_with(flavour):
    """The merged plain network, the working copy with other affine parameters, and the formula: the same logits."""
    layer, shape = FLAVOURS[flavour]()
    torch.manual_seed(0)
    model = unsettle(nn.Sequential(layer, nn.Flatten(), nn.Linear(torch.Size(shape[1:]).numel(), 3))).double()
    images = torch.randn(shape).double() * 2 + 1
    network = Network.of(model, images)
    source = source_layers(network)["0"]
    normal = Normal(torch.randn(4).double(), torch.rand(4).double() + 0.3)
    weight, bias = source.affine(normal)
    learned = functional_call(network.copy(), {"0.weight": weight, "0.bias": bias}, (images,))
    plain = network.with_tensors(merged(network, {"0": normal}))
    assert torch.allclose(plain(images), learned, atol=1e-10)
    around = (1, -1, *(1,) * (len(shape) - 2))
    gamma, beta, mean, std = (value.view(around) for value in (source.gamma, source.beta, normal.mean, normal.std))
    hidden = gamma * (images - mean) / std + beta
    hidden = hidden.relu() if flavour == "with activation" else hidden
    assert torch.allclose(model[1:](hidden), learned, atol=1e-10)
    assert {name: tensor.shape for name, tensor in plain.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }


def test_the_source_statistics_give_back_the_source_to_the_last_bit():
    layer = unsettle(nn.BatchNorm2d(5))
    source = SourceLayer.of(layer)
    weight, bias = source.affine(source.normal)
    assert torch.equal(weight, layer.weight)
    assert torch.equal(bias, layer.bias)

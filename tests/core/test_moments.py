"""Moments, blends and spanning vectors, against naive loops in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fewshift.core.moments import (
    Normal,
    SourceLayer,
    merged,
    moments,
    normalised,
    source_layers,
)
from fewshift.core.network import Network
from fewshift.core.reading import read, read_by_ema, tied
from fewshift.core.spans import directions, kept, spanning_vectors
from tests.helpers.networks import make_support, make_tiny, unsettle


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


def test_v_zero_is_the_source_exactly(tiny, support):
    network = Network.of(tiny, support.images)
    assert torch.equal(read(network, [support.images], tied(network, 0.0)).logits[0], tiny(support.images))


def test_v_one_is_the_train_mode_forward(support):
    model = make_tiny()
    model.drop.p = 0.0
    network = Network.of(model, support.images)
    logits = read(network, [support.images], tied(network, 1.0)).logits[0]
    assert torch.allclose(logits, copy.deepcopy(model).train()(support.images), atol=1e-6)


def naive_blended_forward(model: nn.Module, images: torch.Tensor, v: float) -> torch.Tensor:
    """The tiny network written out, each layer blending standard deviations in float64."""

    def bn(layer, z):
        flat = z.transpose(0, 1).flatten(1)
        mean, std = flat.mean(1), (flat.var(1, correction=0) + layer.eps).sqrt()
        source = (layer.running_var + layer.eps).sqrt()
        mean, std = v * mean + (1 - v) * layer.running_mean, v * std + (1 - v) * source
        shape = (1, -1, 1, 1)
        return layer.weight.view(shape) * (z - mean.view(shape)) / std.view(shape) + layer.bias.view(shape)

    hidden = bn(model.bn1, model.conv1(images)).relu()
    hidden = (hidden + bn(model.bn2, model.conv2(hidden))).relu()
    return model.fc(hidden.mean((2, 3)))


@pytest.mark.parametrize("v", [0.0, 0.3, 1.0])
def test_every_layer_sees_what_the_new_statistics_below_it_produce(v):
    model, support = make_tiny().double(), make_support()
    images = support.images.double()
    network = Network.of(model, images)
    assert torch.allclose(
        read(network, [images], tied(network, v)).logits[0], naive_blended_forward(model, images, v), atol=1e-10
    )


def test_the_first_ema_batch_is_assigned_and_later_ones_weigh_a_tenth(tiny):
    images = make_support(4).images
    first, second = images[:6], images[6:]
    network = Network.of(tiny, images)
    found = read_by_ema(network, [first, second], tied(network, 0.0))["bn1"]
    inputs = [tiny.conv1(batch).transpose(0, 1).flatten(1).double() for batch in (first, second)]
    mean = 0.9 * inputs[0].mean(1) + 0.1 * inputs[1].mean(1)
    var = 0.9 * inputs[0].var(1, correction=0) + 0.1 * inputs[1].var(1, correction=0)
    assert torch.allclose(found.mean, mean, atol=1e-6)
    assert torch.allclose(found.std, (var + tiny.bn1.eps).sqrt(), atol=1e-6)


def test_a_single_batch_is_a_fixed_point_of_the_ema(tiny, support):
    network = Network.of(tiny, support.images)
    blend = tied(network, 0.4)
    exact, source = read(network, [support.images], blend).moments, source_layers(network)
    for name, normal in read_by_ema(network, [support.images] * 10, blend).items():
        assert torch.allclose(normal.mean, exact[name].pooled_mean, atol=1e-6)
        assert torch.allclose(normal.std, exact[name].normal(source[name].eps).std, atol=1e-6)


def naive_spanning_vectors(inputs: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Column by column, with NumPy's SVD."""
    count, channels = inputs.shape[:2]
    rows = inputs.reshape(count, channels, -1)
    means = np.array([[row.mean() for row in image] for image in rows]).T
    stds = np.array([[np.sqrt(row.var(ddof=1) + eps) for row in image] for image in rows]).T
    pooled = rows.transpose(1, 0, 2).reshape(channels, -1)
    bases = []
    for columns, first in ((means, pooled.mean(1)), (stds, np.sqrt(pooled.var(1) + eps))):
        u = first / np.linalg.norm(first)
        left = np.stack([z - u * (u @ z) for z in columns.T], 1)
        vectors, values, _ = np.linalg.svd(left, full_matrices=False)
        bases.append((first, vectors * values))
    return bases


def test_spanning_vectors_agree_with_a_naive_loop(tiny):
    images = make_support(2).images.double()
    model = make_tiny().double()
    network = Network.of(model, images)
    seen = read(network, [images], tied(network, 0.0)).moments["bn1"]
    source = SourceLayer.of(model.bn1)
    span = spanning_vectors(seen, source, 4)
    (mean, mean_basis), (std, std_basis) = naive_spanning_vectors(model.conv1(images).detach().numpy(), model.bn1.eps)
    for ours, theirs, first, own in (
        (span.mean, mean_basis, mean, source.normal.mean),
        (span.std, std_basis, std, source.normal.std),
    ):
        assert ours.shape[1] == 1 + 4
        assert torch.allclose(ours[:, 0], own)
        np.testing.assert_allclose(ours[:, 1], first, atol=1e-8)
        for column in range(3):  # a singular vector's sign is free
            left, right = ours[:, 2 + column].numpy(), theirs[:, column]
            np.testing.assert_allclose(left * np.sign(left @ right), right, atol=1e-8)


def test_directions_are_orthogonal_to_the_first_vector_and_to_each_other_and_as_long_as_their_singular_values():
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(12, 5, generator=generator).double() + 2
    first = columns.mean(1)
    vectors, values = directions(columns, first)
    basis = vectors * values
    real = basis[:, values > 0]
    assert (first @ real).abs().max() < 1e-8 * first.norm() * real.norm(dim=0).max()
    gram = real.T @ real
    assert torch.allclose(gram, torch.diag(values[values > 0] ** 2), atol=1e-8)
    assert (values.diff() <= 0).all()
    assert (values > 0).sum() <= 5 - 1  # the columns average to the first vector: one direction is gone


def test_null_directions_are_zero_not_noise():
    columns = torch.randn(3, 10, generator=torch.Generator().manual_seed(0)).double() + 1
    _, values = directions(columns, columns.mean(1))
    assert (values > 0).sum() == 2
    assert values[-1] == 0


def test_a_zero_first_vector_is_not_divided_by():
    columns = torch.randn(4, 3).double()
    vectors, values = directions(columns, torch.zeros(4).double())
    assert torch.isfinite(vectors).all()
    assert torch.allclose(values, torch.linalg.svdvals(columns))


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 1), (0.85, 2), (0.97, 3)])
def test_a_fraction_takes_the_fewest_directions_that_explain_it(fraction, expected):
    values = torch.tensor([2.0, 1.5, 0.7, 0.2]).double()  # squares: 4, 2.25, 0.49, 0.04 of 6.78
    assert kept(values, fraction) == expected


def test_the_released_scale_of_the_standard_deviations_is_that_of_the_means():
    model, images = make_tiny(), make_support(2).images
    network = Network.of(model, images)
    seen = read(network, [images], tied(network, 0.0)).moments["bn1"]
    source = SourceLayer.of(model.bn1)
    span = spanning_vectors(seen, source, 4, borrow_scale=True)
    assert torch.allclose(span.std[:, 2:].norm(dim=0), span.mean[:, 2:].norm(dim=0), rtol=1e-5)
    own = spanning_vectors(seen, source, 4)
    assert not torch.allclose(own.std[:, 2:].norm(dim=0), own.mean[:, 2:].norm(dim=0), rtol=1e-2)


def test_one_position_per_image_leaves_the_pooled_deviation_alone():
    seen = moments(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    span = spanning_vectors(seen, SourceLayer.of(nn.BatchNorm1d(4)), 6)
    assert span.std.shape[1] == 2
    assert torch.isfinite(span.mean).all()
    with pytest.raises(ValueError, match="one position per image"):
        spanning_vectors(seen, SourceLayer.of(nn.BatchNorm1d(4)), 6, guard=False)


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


class Shared(nn.Module):
    """One BatchNorm layer used twice, at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, images):
        hidden = self.bn(self.conv(images)).relu()
        return self.fc(self.bn(self.again(hidden)).relu().mean((2, 3)))


def test_a_layer_called_twice_pools_the_moments_of_its_calls(support):
    torch.manual_seed(0)
    model = unsettle(Shared())
    network = Network.of(model, support.images)
    assert network.layers[0].calls == 2
    seen = read(network, [support.images], tied(network, 1.0)).moments["bn"]
    assert seen.count.unique().tolist() == [16, 64]
    # at the fixed point the pooled statistics are those of the inputs that they themselves produce
    held = normalised(network, {"bn": seen.normal(model.bn.eps)})
    first = held.conv(support.images)
    second = held.again(held.bn(first).relu())
    pooled = torch.cat([it.transpose(0, 1).flatten(1) for it in (first, second)], 1)
    assert torch.allclose(seen.pooled_mean.float(), pooled.mean(1), atol=2e-2)
    assert torch.allclose(seen.pooled_var.float(), pooled.var(1, correction=0), rtol=5e-2)


def test_layers_without_affine_parameters_carry_the_statistics_themselves(support):
    torch.manual_seed(0)
    model = make_tiny()
    model.bn1 = nn.BatchNorm2d(6, affine=False)
    unsettle(model)
    network = Network.of(model, support.images)
    source = source_layers(network)
    reading = read(network, [support.images], tied(network, 0.5))
    normals = {name: source[name].blend(it.normal(source[name].eps), 0.5) for name, it in reading.moments.items()}
    tensors = merged(network, normals)
    assert {"bn1.running_mean", "bn1.running_var", "bn2.weight", "bn2.bias"} == tensors.keys()
    assert torch.allclose(network.with_tensors(tensors)(support.images), reading.logits[0], atol=1e-5)
    broken = {"bn1": Normal(normals["bn1"].mean, -normals["bn1"].std)}
    with pytest.raises(ValueError, match="'bn1' has no affine parameters"):
        merged(network, broken)

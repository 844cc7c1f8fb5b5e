"""Spanning vectors against NumPy's SVD and exact special cases; coefficients against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fewshift import FewshiftError
from fewshift.core.moments import moments, source_layers
from fewshift.core.network import Network
from fewshift.core.reading import read, tied
from fewshift.core.source_layer import SourceLayer
from fewshift.core.spans import Convex, Linear, Span, directions, kept, spanning_vectors
from tests.helpers.networks import make_support, make_tiny, unsettle


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


def test_spanning_vectors_agree_with_a_naive_loop():
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
    with pytest.raises(FewshiftError, match="one position per image"):
        spanning_vectors(seen, SourceLayer.of(nn.BatchNorm1d(4)), 6, guard=False)


# exact special cases


def layer_and_inputs(images=6, channels=4, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(images, channels, size, size, generator=generator).double() * 2 + 1
    return SourceLayer.of(unsettle(nn.BatchNorm2d(channels).double())), inputs


def test_one_support_vector_is_the_pooled_one():
    source, inputs = layer_and_inputs()
    span = spanning_vectors(moments(inputs), source, 1)
    pooled = inputs.transpose(0, 1).flatten(1).numpy()
    np.testing.assert_allclose(span.mean, np.stack([source.normal.mean, pooled.mean(1)], 1), atol=1e-12)
    deviation = np.sqrt(pooled.var(1) + source.eps)
    np.testing.assert_allclose(span.std, np.stack([source.normal.std, deviation], 1), atol=1e-12)


def test_a_single_image_has_no_direction_of_means():
    source, inputs = layer_and_inputs(images=1)
    span = spanning_vectors(moments(inputs), source, 5)
    assert span.mean.shape == (4, 3)
    assert (span.mean[:, 2] == 0).all()  # its mean is the pooled mean


def test_images_that_are_all_alike_have_no_direction():
    source, inputs = layer_and_inputs()
    alike = inputs[:1].expand(6, -1, -1, -1)
    span = spanning_vectors(moments(alike), source, 6)
    assert (span.mean[:, 2:] == 0).all()
    assert kept(directions(moments(alike).mean.T, moments(alike).pooled_mean)[1], 0.9) == 0


def test_constant_images_vary_in_their_means_alone():
    source, _ = layer_and_inputs()
    levels = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]).double()
    span = spanning_vectors(moments(levels[:, :, None, None].expand(-1, -1, 3, 3)), source, 3)
    # each image's deviation is sqrt(eps) in every channel; without its part along the pooled deviation (s, s, s, r)
    s, r = math.sqrt(2 / 9 + source.eps), math.sqrt(source.eps)
    ones, pooled = np.ones(4) * r, np.array([s, s, s, r])
    left = ones - pooled * (pooled @ ones) / (pooled @ pooled)
    assert float(span.std[:, 2].norm()) == pytest.approx(np.linalg.norm(left) * math.sqrt(3))
    assert (span.std[:, 3:] == 0).all()
    # the means: e1, e2, e3 less their common direction leave two singular values of one
    np.testing.assert_allclose(span.mean[:, 1], [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-12)
    np.testing.assert_allclose(span.mean[:, 2:].norm(dim=0), [1, 1], atol=1e-12)


def test_a_dead_channel_is_zero_in_every_direction():
    source, inputs = layer_and_inputs()
    inputs[:, 2] = 0
    span = spanning_vectors(moments(inputs), source, 4)
    assert (span.mean[2, 1:].abs() < 1e-12).all()
    assert float(span.std[2, 1]) == pytest.approx(math.sqrt(source.eps))
    assert torch.isfinite(span.std).all()


def test_the_same_images_give_the_same_vectors_in_any_order():
    source, inputs = layer_and_inputs()
    first, second = (spanning_vectors(moments(part), source, 4) for part in (inputs, inputs.flip(0)))
    assert torch.allclose(first.mean, second.mean, atol=1e-10)
    assert torch.allclose(first.std, second.std, atol=1e-10)


# coefficients


@pytest.mark.parametrize("make", [Linear, Convex])
@pytest.mark.parametrize("v", [0.0, 0.3, 1.0])
def test_coefficients_start_at_the_blend(make, v):
    source, inputs = layer_and_inputs()
    span = spanning_vectors(moments(inputs), source, 1 if make is Convex else 4)
    normal, blend = make(span, v, split=False).normal(), source.blend(moments(inputs).normal(source.eps), v)
    assert torch.allclose(normal.mean, blend.mean, atol=1e-12)
    assert torch.allclose(normal.std, blend.std, atol=1e-12)


def test_a_combination_is_a_sum_of_columns():
    generator = torch.Generator().manual_seed(0)
    span = Span(*(torch.randn(3, 4, generator=generator).double() for _ in range(2)))
    eta, rho = torch.randn(2, 4, generator=generator).double()
    normal = span.combine(eta, rho)
    for channel in range(3):
        assert float(normal.mean[channel]) == pytest.approx(
            sum(float(span.mean[channel, i] * eta[i]) for i in range(4))
        )
        assert float(normal.std[channel]) == pytest.approx(sum(float(span.std[channel, i] * rho[i]) for i in range(4)))


def test_convex_weights_return_to_the_unit_interval():
    span = Span(torch.eye(2).double(), torch.eye(2).double())
    weights = Convex(span, 0.5, split=False)
    with torch.no_grad():
        weights.parameters()[0].copy_(torch.tensor([1.7, -0.2]))
    weights.project()
    assert weights.values() == {"eta": [0.0, 1.0], "rho": [1.0, 0.0]}


@pytest.mark.parametrize("make", [Linear, Convex])
def test_the_gradient_of_the_loss_is_that_of_finite_differences(make):
    support = make_support(2)
    model, images = make_tiny().double(), support.images.double()
    network = Network.of(model, images)
    seen, source = read(network, [images], tied(network, 0.4)).moments, source_layers(network)
    n = 1 if make is Convex else 3
    layers = {name: make(spanning_vectors(seen[name], source[name], n), 0.4, split=False) for name in seen}
    parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]

    def loss():
        affine = {}
        for name, layer in layers.items():
            affine[f"{name}.weight"], affine[f"{name}.bias"] = source[name].affine(layer.normal())
        return F.cross_entropy(functional_call(model, affine, (images,)), support.labels)

    gradients = torch.autograd.grad(loss(), parameters)
    step = 1e-6
    for parameter, gradient in zip(parameters, gradients, strict=True):
        for index in range(parameter.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[index] += sign * step
                    values.append(loss().item())
                    parameter[index] -= sign * step
            assert float(gradient[index]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)
        assert gradient.abs().max() > 1e-6

"""Normalisation layers: instance normalisation, IBN, and whitening by Newton's iteration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift import FewshiftError
from fewshift.core.network import is_batchnorm, list_layers
from fewshift.core.normalisation import (
    EPS,
    InstanceBatchNorm,
    InstanceNorm,
    IterNormLayer,
    SwitchableWhiteningLayer,
    image_moments,
    inverse_root,
    pooled,
    transformed,
)
from tests.helpers.networks import unsettle

APART, TOGETHER = torch.contiguous_format, torch.channels_last  # how channels lie in memory
LAYOUTS = pytest.mark.parametrize("layout", [APART, TOGETHER])


def make_images(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, layout: torch.memory_format = APART
) -> Tensor:
    """Images whose channels depend on each other, each image in its own way."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    mixing = torch.randn(shape[0], shape[1], shape[1], generator=generator, dtype=torch.float64)
    means = torch.randn(shape[0], shape[1], 1, 1, generator=generator, dtype=torch.float64)
    images = torch.einsum("nij,njhw->nihw", mixing, noise) + means
    return images.to(dtype).contiguous(memory_format=layout)


def make_covariances(*shape: int) -> Tensor:
    factors = torch.randn(*shape, 3 * shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return factors @ factors.mT / factors.shape[-1]


def channel_covariance(images: Tensor) -> np.ndarray:
    """Of all positions of (N, C, H, W), as NumPy has it."""
    return np.atleast_2d(np.cov(images.detach().double().transpose(0, 1).flatten(1).numpy(), bias=True))


def unsettled(layer: nn.Module) -> nn.Module:
    """Parameters away from 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return layer.double()


# --- the parts


def test_newton_tends_to_the_inverse_root_of_an_eigen_decomposition():
    covariances = make_covariances(3, 2, 5)
    values, vectors = torch.linalg.eigh(covariances)
    exact = vectors @ (values.rsqrt()[..., None] * vectors.mT)
    errors = [float((inverse_root(covariances, steps) - exact).abs().max()) for steps in range(8)]
    assert errors == sorted(errors, reverse=True)
    for steps in (12, 50):  # rounding errors do not grow
        torch.testing.assert_close(inverse_root(covariances, steps), exact)


def test_without_iterations_newton_divides_by_the_root_of_the_trace():
    covariances = make_covariances(2, 1, 4)
    for matrix, root in zip(covariances[:, 0], inverse_root(covariances, 0)[:, 0], strict=True):
        torch.testing.assert_close(root, torch.eye(4, dtype=torch.float64) / matrix.trace().sqrt())


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_newton_is_exact_for_one_channel(steps):
    variances = torch.tensor([0.01, 1.0, 250.0]).view(3, 1, 1, 1)
    torch.testing.assert_close(inverse_root(variances, steps), variances.rsqrt(), rtol=1e-6, atol=0)


@LAYOUTS
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_moments_of_images_are_numpys(layout, group):
    images = make_images(3, 6, 4, 5, layout=layout)
    means, covariances = image_moments(images.flatten(2), group)
    assert covariances.shape == (3, 6 // group, group, group)
    for image, mean, blocks in zip(images, means, covariances, strict=True):
        torch.testing.assert_close(mean, image.mean((1, 2)))
        for index, block in enumerate(blocks):
            part = image[None, index * group : (index + 1) * group]
            np.testing.assert_allclose(block.numpy(), channel_covariance(part), rtol=1e-10, atol=1e-12)
    mean, covariance = pooled(means, covariances)
    torch.testing.assert_close(mean[0], images.mean((0, 2, 3)))
    for index, block in enumerate(covariance[0]):
        part = images[:, index * group : (index + 1) * group]
        np.testing.assert_allclose(block.numpy(), channel_covariance(part), rtol=1e-10, atol=1e-12)


@LAYOUTS
def test_large_means_leave_small_variances_alone(layout):
    exact = make_images(2, 4, 8, 8)
    images = (exact + 3000).float().contiguous(memory_format=layout)
    _, covariances = image_moments(images.flatten(2), 4)
    for image, covariance in zip(images, covariances, strict=True):
        np.testing.assert_allclose(covariance[0].numpy(), channel_covariance(image[None]), rtol=1e-4, atol=1e-4)


@LAYOUTS
def test_a_transformation_is_a_matrix_at_every_position(layout):
    maps, matrices = make_images(2, 4, 3, 5, layout=layout), make_covariances(2, 2, 2)
    shifts = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    output = transformed(maps.flatten(2), matrices, shifts).view_as(maps)
    for n, row, column in ((n, row, column) for n in range(2) for row in range(3) for column in range(5)):
        blocks = torch.block_diag(*matrices[n])
        torch.testing.assert_close(output[n, :, row, column], blocks @ maps[n, :, row, column] + shifts[n])


# --- the layers beside a naive one


def naive_whitening(layer: IterNormLayer | SwitchableWhiteningLayer, images: Tensor) -> Tensor:
    """Group by group and image by image, with nothing but products; in training mode."""
    outputs = []
    for n, start in ((n, start) for n in range(len(images)) for start in range(0, layer.channels, layer.group)):
        part = images[:, start : start + layer.group].flatten(2)
        together = part.transpose(0, 1).flatten(1)
        mean, own_mean = together.mean(1, keepdim=True), part[n].mean(1, keepdim=True)
        covariance = (together - mean) @ (together - mean).T / together.shape[1]
        if isinstance(layer, SwitchableWhiteningLayer):
            own = (part[n] - own_mean) @ (part[n] - own_mean).T / part.shape[2]
            of_mean, of_covariance = layer.mean_logits.softmax(0), layer.covariance_logits.softmax(0)
            mean = of_mean[0] * mean + of_mean[1] * own_mean
            covariance = of_covariance[0] * covariance + of_covariance[1] * own
        covariance = covariance + EPS * torch.eye(layer.group, dtype=images.dtype)
        root = torch.eye(layer.group, dtype=images.dtype)
        for _ in range(layer.iterations):
            root = 1.5 * root - 0.5 * root @ root @ root @ covariance / covariance.trace()
        white = root / covariance.trace().sqrt() @ (part[n] - mean)
        rows = slice(start, start + layer.group)
        outputs.append(layer.weight[rows, None] * white + layer.bias[rows, None])
    return torch.stack(outputs).view_as(images)


@LAYOUTS
@pytest.mark.parametrize(
    "layer",
    [
        IterNormLayer(6, 3),
        IterNormLayer(6, 6, iterations=2),
        IterNormLayer(6, 1),
        SwitchableWhiteningLayer(6, 2),
        SwitchableWhiteningLayer(6, 6, iterations=0),
        SwitchableWhiteningLayer(6, 3, tied=True),
    ],
    ids=repr,
)
def test_whitening_and_its_gradients_are_those_of_the_formula(layer, layout):
    layer = unsettled(layer)
    images = make_images(3, 6, 4, 2, layout=layout).requires_grad_()
    weights = make_images(3, 6, 4, 2, seed=5)
    output, expected = layer(images), naive_whitening(layer, images)
    torch.testing.assert_close(output, expected)
    assert output.is_contiguous(memory_format=layout)
    inputs = [images, *layer.parameters()]
    for got, wanted in zip(
        torch.autograd.grad((output * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8)


@LAYOUTS
@pytest.mark.parametrize("affine", [True, False])
def test_instance_normalisation_and_its_gradients_are_torchs(layout, affine):
    layer = unsettled(InstanceNorm(4, affine))
    images = make_images(3, 4, 5, 6, layout=layout).requires_grad_()
    expected = F.instance_norm(images, weight=layer.weight, bias=layer.bias)
    output = layer(images)
    torch.testing.assert_close(output, expected)
    assert output.is_contiguous(memory_format=layout)
    inputs, weights = [images, *layer.parameters()], make_images(3, 4, 5, 6, seed=5)
    for got, wanted in zip(
        torch.autograd.grad((output * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("layer", [IterNormLayer(4, 2), SwitchableWhiteningLayer(4, 2), InstanceNorm(4)], ids=repr)
@pytest.mark.parametrize("gradient", ["of a sum", "of a part"])
def test_gradients_do_not_depend_on_how_they_lie_in_memory(layer, gradient):
    layer = layer.double()
    gradients = []
    for layout in (APART, TOGETHER):
        images = make_images(2, 4, 3, 3, layout=layout).requires_grad_()
        output = layer(images)
        (output.sum() if gradient == "of a sum" else output[:, 1:3, :2].pow(3).sum()).backward()
        gradients.append(images.grad)
    torch.testing.assert_close(*gradients)


# --- instance normalisation and IBN


@LAYOUTS
def test_instance_normalisation_leaves_mean_beta_and_deviation_gamma(layout):
    layer = unsettled(InstanceNorm(4))
    output = layer(make_images(3, 4, 8, 8, layout=layout))
    for image in output:
        torch.testing.assert_close(image.mean((1, 2)), layer.bias.data)
        deviations = image.std((1, 2), correction=0)
        torch.testing.assert_close(deviations, layer.weight.abs().data, rtol=1e-4, atol=1e-4)


def test_of_one_position_instance_normalisation_leaves_beta():
    layer = unsettled(InstanceNorm(3))
    torch.testing.assert_close(layer(make_images(2, 3, 1, 1))[:, :, 0, 0], layer.bias.expand(2, 3))


@LAYOUTS
def test_the_first_half_of_ibn_does_not_see_a_change_of_contrast_and_the_second_does(layout):
    layer = unsettled(InstanceBatchNorm(6))
    images = make_images(4, 6, 8, 8, layout=layout)
    scales, shifts = torch.rand(2, 4, 6, 1, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    before, after = layer(images), layer(images * scales + shifts)
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=1e-3, atol=1e-3)
    assert (after[:, 3:] - before[:, 3:]).abs().mean() > 0.1
    assert before.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(("share", "first"), [(0.5, 4), (0.25, 2), (0.4, 3)])
def test_ibn_begins_as_the_batchnorm_in_its_place(share, first):
    batchnorm = unsettle(nn.BatchNorm2d(8, eps=1e-3)).double()
    layer = InstanceBatchNorm(8, share).double()
    layer.begin_as(batchnorm)
    images = make_images(3, 8, 4, 4)
    torch.testing.assert_close(layer.eval()(images)[:, first:], batchnorm(images)[:, first:])
    inner = F.instance_norm(images[:, :first], weight=batchnorm.weight[:first], bias=batchnorm.bias[:first])
    torch.testing.assert_close(layer(images)[:, :first], inner)


@LAYOUTS
def test_the_gradient_of_ibn_is_that_of_its_halves(layout):
    layer = unsettled(InstanceBatchNorm(4))
    images = make_images(3, 4, 5, 5, layout=layout).requires_grad_()
    weights = make_images(3, 4, 5, 5, seed=5)
    (gradient,) = torch.autograd.grad((layer(images) * weights).sum(), images)
    halves = (
        F.instance_norm(images[:, :2], weight=layer.instance.weight, bias=layer.instance.bias),
        F.batch_norm(images[:, 2:], None, None, layer.batch.weight, layer.batch.bias, training=True),
    )
    (expected,) = torch.autograd.grad((torch.cat(halves, 1) * weights).sum(), images)
    torch.testing.assert_close(gradient, expected)


# --- whitening by the batch


def test_iternorm_whitens_the_batch_the_better_the_longer_it_iterates():
    images = make_images(4, 8, 6, 6)
    errors = []
    for iterations in (1, 2, 3, 4, 5, 6):
        covariance = channel_covariance(IterNormLayer(8, 4, iterations).double()(images))
        errors.append(max(np.abs(covariance[rows, rows] - np.eye(4)).max() for rows in (slice(4), slice(4, 8))))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-2


def test_iternorm_of_single_channels_is_batchnorm_in_training():
    batchnorm, images = unsettle(nn.BatchNorm2d(4)).train(), make_images(3, 4, 5, 5, dtype=torch.float32)
    layer = IterNormLayer(4, 1)
    layer.begin_as(batchnorm)
    torch.testing.assert_close(layer(images), batchnorm(images), rtol=1e-6, atol=1e-6)


def test_iternorm_does_not_see_the_scale_of_its_input():
    images, layer = make_images(4, 4, 6, 6), IterNormLayer(4, 4).double()
    torch.testing.assert_close(layer(40 * images), layer(images), rtol=1e-3, atol=1e-3)


def test_a_covariance_by_its_trace_has_no_eigenvalue_above_1():
    _, covariances = image_moments(make_images(5, 6, 4, 4).flatten(2), 6)
    trace = covariances.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert (torch.linalg.eigvalsh(covariances) / trace[..., None]).max() <= 1


def test_iternorm_averages_whitening_matrices_and_uses_them_at_test():
    layer = unsettled(IterNormLayer(4, 2, decay=0.8))
    mean, whitening = torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    for seed in range(3):
        images = make_images(3, 4, 4, 4, seed=seed)
        layer(images)
        rows = images.transpose(0, 1).flatten(1)
        blocks = torch.tensor(channel_covariance(images)) + EPS * torch.eye(4)
        roots = [inverse_root(blocks[None, None, at : at + 2, at : at + 2], 5)[0, 0] for at in (0, 2)]
        mean = 0.8 * mean + 0.2 * rows.mean(1)
        whitening = 0.8 * whitening + 0.2 * torch.block_diag(*roots)
    layer.eval()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    images = make_images(2, 4, 3, 3, seed=9)
    expected = torch.einsum("ij,njhw->nihw", whitening, images - mean.view(4, 1, 1))
    expected = layer.weight.view(4, 1, 1) * expected + layer.bias.view(4, 1, 1)
    torch.testing.assert_close(layer(images), expected)
    torch.testing.assert_close(layer(images[:1]), expected[:1])  # whoever its mates are
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


def test_iternorm_begins_as_the_batchnorm_in_its_place():
    batchnorm = unsettle(nn.BatchNorm2d(6, eps=1e-3)).double()
    layer = IterNormLayer(6, 3).double()
    layer.begin_as(batchnorm)
    images = make_images(2, 6, 4, 4)
    torch.testing.assert_close(layer.eval()(images), batchnorm(images))


# --- switchable whitening


def switched(layer: SwitchableWhiteningLayer, logits: tuple[float, float]) -> SwitchableWhiteningLayer:
    with torch.no_grad():
        layer.mean_logits.copy_(torch.tensor(logits))
        layer.covariance_logits.copy_(torch.tensor(logits))
    return layer.double()


BATCH, IMAGE = (50.0, -50.0), (-50.0, 50.0)


def test_by_the_batch_alone_the_batch_is_white():
    layer = switched(SwitchableWhiteningLayer(4, 2, iterations=20), BATCH)
    covariance = channel_covariance(layer(make_images(4, 4, 6, 6)))
    for rows in (slice(2), slice(2, 4)):
        np.testing.assert_allclose(covariance[rows, rows], np.eye(2), atol=1e-3)


@LAYOUTS
def test_by_the_image_alone_each_image_is_white_whoever_its_mates_are(layout):
    layer = switched(SwitchableWhiteningLayer(4, 4, iterations=20), IMAGE)
    images = make_images(3, 4, 7, 7, layout=layout)
    output = layer(images)
    for index, image in enumerate(output):
        np.testing.assert_allclose(channel_covariance(image[None]), np.eye(4), atol=1e-2)
        torch.testing.assert_close(layer(images[index : index + 1])[0], image)
    torch.testing.assert_close(layer.eval()(images), output)


def test_by_the_batch_alone_single_channels_are_batchnorm():
    layer = switched(SwitchableWhiteningLayer(4, 1), BATCH)
    images = make_images(3, 4, 5, 5)
    torch.testing.assert_close(layer(images), F.batch_norm(images, None, None, training=True))


def test_without_iterations_images_are_scaled_by_the_root_of_the_trace():
    layer = switched(SwitchableWhiteningLayer(4, 4, iterations=0), BATCH)
    images = make_images(3, 4, 5, 5)
    trace = images.var((0, 2, 3), correction=0).sum() + 4 * EPS
    torch.testing.assert_close(layer(images), (images - images.mean((0, 2, 3), keepdim=True)) / trace.sqrt())


def test_switchable_whitening_keeps_99_parts_of_its_running_moments_and_uses_them_at_test():
    layer = switched(SwitchableWhiteningLayer(4, 2, iterations=25), BATCH)
    images = make_images(3, 4, 4, 4)
    layer(images)
    np.testing.assert_allclose(layer.running_mean, 0.01 * images.mean((0, 2, 3)))
    covariance = channel_covariance(images)
    for index, rows in enumerate((slice(2), slice(2, 4))):
        expected = 0.99 * np.eye(2) + 0.01 * covariance[rows, rows]
        np.testing.assert_allclose(layer.running_covariance[index], expected)
        values, vectors = np.linalg.eigh(expected + EPS * np.eye(2))
        root = torch.from_numpy(vectors @ np.diag(values**-0.5) @ vectors.T)
        centred = images[:, rows] - layer.running_mean[rows].view(2, 1, 1)
        torch.testing.assert_close(layer.eval()(images)[:, rows], torch.einsum("ij,njhw->nihw", root, centred))


def test_switchable_whitening_begins_with_the_moments_of_a_batchnorm():
    batchnorm = unsettle(nn.BatchNorm2d(4)).double()
    layer = switched(SwitchableWhiteningLayer(4, 2, iterations=25), BATCH)
    layer.begin_as(batchnorm)
    images = make_images(2, 4, 3, 3)
    torch.testing.assert_close(layer.eval()(images), batchnorm(images), rtol=1e-4, atol=1e-4)


def test_tied_mixtures_are_one_parameter():
    assert len(list(SwitchableWhiteningLayer(4, 2).parameters())) == 4
    assert len(list(SwitchableWhiteningLayer(4, 2, tied=True).parameters())) == 3


# --- all of them


@pytest.mark.parametrize("layer", [IterNormLayer(4, 2), SwitchableWhiteningLayer(4, 2)], ids=repr)
def test_channels_that_are_dead_or_alike_leave_finite_numbers(layer):
    images = make_images(3, 4, 4, 4, dtype=torch.float32)
    images[:, 1] = images[:, 0]
    images[:, 2] = 7.0
    images.requires_grad_()
    output = layer(images)
    output.square().sum().backward()
    assert output.isfinite().all()
    assert images.grad.isfinite().all()


@pytest.mark.parametrize("layer", [IterNormLayer(4, 2), SwitchableWhiteningLayer(4, 2)], ids=repr)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_whitened_in_single_precision(layer, kind):
    images = make_images(3, 4, 4, 4).to(kind)
    output = layer(images)
    assert output.dtype == kind
    torch.testing.assert_close(output, layer(images.float()).to(kind))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(images.float()), layer(images.float()), rtol=0, atol=0)
        assert layer(images.float()).dtype == torch.float32


def test_only_the_batchnorm_half_of_ibn_is_taken_for_batchnorm():
    model = nn.Sequential(IterNormLayer(4, 2), SwitchableWhiteningLayer(4, 2), InstanceNorm(4), InstanceBatchNorm(4))
    assert [name for name, module in model.named_modules() if is_batchnorm(module)] == ["3.batch"]
    listed = list_layers(model)
    assert [(layer.name, layer.channels) for layer in listed.layers] == [("3.batch", 2)]
    skipped = {layer.name: layer.reason for layer in listed.skipped}
    assert {"2", "3.instance"} <= skipped.keys()
    assert "instance normalisation has no source statistics" in skipped["2"]


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: IterNormLayer(6, 4), "6 channels .*groups of 4.*divisor"),
        (lambda: SwitchableWhiteningLayer(20), "20 channels .*groups of 16.*divisor"),
        (lambda: IterNormLayer(6, 0), "6 channels .*groups of 0.*divisor"),
        (lambda: InstanceBatchNorm(4, 0.1), "0.1 of 4 channels .*empty"),
    ],
)
def test_layers_that_cannot_be_are_refused_with_the_numbers(make, facts):
    with pytest.raises(FewshiftError, match=facts):
        make()


@pytest.mark.parametrize("layer", [IterNormLayer(4, 2), SwitchableWhiteningLayer(4, 2)], ids=repr)
def test_one_position_has_no_covariance_in_training(layer):
    with pytest.raises(FewshiftError, match="one position has no covariance to whiten in training: give more or"):
        layer(torch.ones(1, 4, 1, 1))
    assert layer.eval()(torch.ones(1, 4, 1, 1)).isfinite().all()
    assert layer.train()(torch.randn(3, 4)).shape == (3, 4)

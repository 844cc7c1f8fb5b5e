"""Passes over images: every route against naive loops over the layers of small networks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from fewshift import LCCS, FewshiftError, Network, Support, Target
from fewshift.core.averages import averaged_over_batches, pooled_exactly, read_by_ema
from fewshift.core.moments import normalised, source_layers
from fewshift.core.reading import (
    IN_STEP,
    LAYER_BY_LAYER,
    ONE_BATCH,
    read,
    read_support,
    tied,
)
from tests.helpers.networks import Shared, make_support, make_tiny, mixed_sizes, scenes, street, unsettle


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
    estimate = read_by_ema(network, [first, second], tied(network, 0.0))["bn1"]
    inputs = [tiny.conv1(batch).transpose(0, 1).flatten(1).double() for batch in (first, second)]
    mean = 0.9 * inputs[0].mean(1) + 0.1 * inputs[1].mean(1)
    var = 0.9 * inputs[0].var(1, correction=0) + 0.1 * inputs[1].var(1, correction=0)
    assert torch.allclose(estimate.mean, mean, atol=1e-6)
    assert torch.allclose(estimate.std, (var + tiny.bn1.eps).sqrt(), atol=1e-6)


def test_a_single_batch_is_a_fixed_point_of_the_ema(tiny, support):
    network = Network.of(tiny, support.images)
    blend = tied(network, 0.4)
    exact, source = read(network, [support.images], blend).moments, source_layers(network)
    for name, normal in read_by_ema(network, [support.images] * 10, blend).items():
        assert torch.allclose(normal.mean, exact[name].pooled_mean, atol=1e-6)
        assert torch.allclose(normal.std, exact[name].normal(source[name].eps).std, atol=1e-6)


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
    pooled = torch.cat([part.transpose(0, 1).flatten(1) for part in (first, second)], 1)
    assert torch.allclose(seen.pooled_mean.float(), pooled.mean(1), atol=2e-2)
    assert torch.allclose(seen.pooled_var.float(), pooled.var(1, correction=0), rtol=5e-2)


@pytest.mark.parametrize("v", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("frugal", [False, True])
def test_chunks_give_the_statistics_and_answers_of_one_batch(v, frugal):
    model, support = street().double(), scenes()
    images = support.images.double()
    network = Network.of(model, images)
    whole = read(network, [images], tied(network, v))
    parts = read(network, images.split(2), tied(network, v), frugal=frugal)
    assert (whole.route, parts.route) == (ONE_BATCH, LAYER_BY_LAYER if frugal else IN_STEP)
    assert torch.allclose(torch.cat(parts.logits), whole.logits[0], atol=1e-9)
    for name, seen in whole.moments.items():
        assert torch.allclose(parts.moments[name].mean, seen.mean, atol=1e-9)
        assert torch.allclose(parts.moments[name].pooled_var, seen.pooled_var, atol=1e-9)


@pytest.mark.parametrize("frugal", [False, True])
def test_layers_executed_twice_pool_over_chunks_as_over_one_batch(frugal):
    torch.manual_seed(0)
    model, images = unsettle(Shared()).double(), torch.randn(6, 3, 8, 8).double()
    network = Network.of(model, images)
    whole = read(network, [images], tied(network, 0.7))
    parts = read(network, images.split(4), tied(network, 0.7), frugal=frugal)
    assert torch.allclose(torch.cat(parts.logits), whole.logits[0], atol=1e-9)


def test_images_of_different_sizes_pool_every_pixel():
    model, support = street().double(), mixed_sizes().prepared(lambda images: images.double())
    network = Network.of(model, support.images[0][None])
    seen = read_support(network, support, tied(network, 0.0))
    assert seen.route == IN_STEP
    pixels = torch.cat([model.stem[0](image[None]).flatten(2)[0] for image in support.images], 1)
    first = seen.moments["stem.1"]
    assert torch.allclose(first.pooled_mean, pixels.mean(1), atol=1e-9)
    assert torch.allclose(first.pooled_var, pixels.var(1, correction=0), atol=1e-9)


def test_the_pooling_branch_gets_the_statistics_of_the_whole_support():
    support = scenes()
    network = Network.of(street(), support.images)
    for route in ([support.images], support.images.split(1)):
        var = read(network, list(route), tied(network, 1.0)).moments["pool.2"].pooled_var
        assert (var > 1e-6).all()  # of each image alone it would be zero


def test_a_pass_that_fails_in_one_chunk_ends_all_of_them():
    model, images = street(), scenes(3).images
    network = Network.of(model, images)
    with pytest.raises(RuntimeError, match=r"size of tensor|channels"):
        read(network, [images, images[:, :2]], tied(network, 0.5))


def test_how_the_support_passed_is_recorded_and_changes_nothing():
    model, support = street(), scenes()
    routes = {
        ONE_BATCH: support,
        LAYER_BY_LAYER: Support(support.images, support.labels, at_once=2),
        IN_STEP: mixed_sizes(),
    }
    method = LCCS(grid=3, epochs=1)
    results = {route: method.fit(model, Target(labelled)) for route, labelled in routes.items()}
    assert {route: result.notes["statistics"] for route, result in results.items()} == {
        route: route for route in routes
    }
    whole, parts = (results[route].predictor(support.images)["out"] for route in (ONE_BATCH, LAYER_BY_LAYER))
    assert torch.allclose(whole, parts, atol=1e-5)


def test_too_little_memory_means_layer_by_layer(monkeypatch):
    monkeypatch.setattr("fewshift.core.reading.free_memory", lambda _: 1 << 16)
    assert LCCS(grid=2, epochs=0).fit(street(), Target(scenes())).notes["statistics"] == LAYER_BY_LAYER


# a naive loop over the layers


def deep(seed=0):
    """Four BatchNorm layers in a row, with different eps."""
    torch.manual_seed(seed)
    blocks = [
        layer
        for number, (before, after) in enumerate([(3, 5), (5, 4), (4, 6), (6, 3)])
        for layer in (
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after, eps=10.0 ** -(number + 2)),
            nn.ReLU(),
        )
    ]
    return unsettle(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))).double()


def naive_pass(model, images, blend):
    """The network run layer by layer; every BatchNorm in NumPy, with statistics of its own current input."""
    statistics, hidden = {}, images
    for name, layer in model.named_children():
        if not isinstance(layer, nn.BatchNorm2d):
            hidden = layer(hidden)
            continue
        z = hidden.detach().numpy()
        means = np.array([[channel.mean() for channel in image] for image in z])
        mean = np.array([z[:, c].mean() for c in range(z.shape[1])])
        std = np.sqrt(np.array([z[:, c].var() for c in range(z.shape[1])]) + layer.eps)
        statistics[name] = means, mean, std
        v, source_std = blend[name], np.sqrt(layer.running_var.numpy() + layer.eps)
        mean = (1 - v) * layer.running_mean.numpy() + v * mean
        std = (1 - v) * source_std + v * std
        gamma, beta = (tensor.detach().numpy()[:, None, None] for tensor in (layer.weight, layer.bias))
        hidden = torch.from_numpy(gamma * (z - mean[:, None, None]) / std[:, None, None] + beta)
    return statistics, hidden.detach()


@pytest.mark.parametrize("frugal", [False, True])
@pytest.mark.parametrize("cut", [15, 4], ids=["one batch", "chunks"])
def test_a_blend_of_its_own_in_every_layer_agrees_with_a_naive_loop(cut, frugal):
    model, images = deep(), make_support().images.double()
    network = Network.of(model, images)
    blend = {layer.name: v for layer, v in zip(network.layers, (0.9, 0.1, 0.6, 1.0), strict=True)}
    statistics, logits = naive_pass(model, images, blend)
    reading, source = read(network, images.split(cut), blend, frugal=frugal), source_layers(network)
    assert torch.allclose(torch.cat(reading.logits), logits, atol=1e-10)
    for name, (means, mean, std) in statistics.items():
        np.testing.assert_allclose(reading.moments[name].mean, means, atol=1e-10)
        np.testing.assert_allclose(reading.moments[name].pooled_mean, mean, atol=1e-10)
        np.testing.assert_allclose(reading.moments[name].normal(source[name].eps).std, std, atol=1e-10)


def test_the_ema_of_deep_layers_follows_inputs_that_the_estimates_below_produce():
    model, images = deep(), make_support().images.double()
    network = Network.of(model, images)
    layers = [name for name, layer in model.named_children() if isinstance(layer, nn.BatchNorm2d)]
    mean, var = {}, {}
    for batch in images.split(5):
        hidden = batch
        for name, layer in model.named_children():
            if name not in layers:
                hidden = layer(hidden)
                continue
            z = hidden.transpose(0, 1).flatten(1)
            mean[name] = z.mean(1) if name not in mean else 0.9 * mean[name] + 0.1 * z.mean(1)
            biased = z.var(1, correction=0)
            var[name] = biased if name not in var else 0.9 * var[name] + 0.1 * biased
            mu = 0.3 * mean[name] + 0.7 * layer.running_mean
            sigma = 0.3 * (var[name] + layer.eps).sqrt() + 0.7 * (layer.running_var + layer.eps).sqrt()
            shape = (1, -1, 1, 1)
            hidden = layer.weight.view(shape) * (hidden - mu.view(shape)) / sigma.view(shape) + layer.bias.view(shape)
    estimates = read_by_ema(network, images.split(5), tied(network, 0.3))
    for name in layers:
        assert torch.allclose(estimates[name].mean, mean[name], atol=1e-10)
        assert torch.allclose(estimates[name].std, (var[name] + model.get_submodule(name).eps).sqrt(), atol=1e-10)


def test_pooling_exactly_over_batches_is_one_large_batch():
    model, images = deep(), make_support().images.double()
    network = Network.of(model, images)
    statistics, _ = naive_pass(model, images, tied(network, 1.0))
    for size in (4, 15):
        normals = pooled_exactly(network, lambda size=size: iter(images.split(size)))
        for name, (_, mean, std) in statistics.items():
            np.testing.assert_allclose(normals[name].mean, mean, atol=1e-10)
            np.testing.assert_allclose(normals[name].std, std, atol=1e-10)


def test_the_even_average_over_batches_is_that_of_torch():
    model, images = deep(), make_support().images.double()
    network, reference = Network.of(model, images), deep()
    update_bn(list(images.split(5)), reference)
    normals = averaged_over_batches(network, images.split(5), lambda step: 1 / (step + 1))
    for name, normal in normals.items():
        layer = reference.get_submodule(name)
        assert torch.allclose(normal.mean, layer.running_mean, atol=1e-10)
        assert torch.allclose(normal.std.square(), layer.running_var + layer.eps, atol=1e-10)


def test_reading_leaves_the_network_as_it_was():
    model, images = deep(), make_support().images.double()
    before = copy.deepcopy(model.state_dict())
    network = Network.of(model, images)
    hooks = [dict(module._forward_pre_hooks) for module in network.model.modules()]
    read(network, images.split(4), tied(network, 1.0))
    read(network, images.split(4), tied(network, 1.0), frugal=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.model.state_dict().items())
    assert [dict(module._forward_pre_hooks) for module in network.model.modules()] == hooks


def test_an_input_that_is_not_finite_names_the_layer():
    model, images = deep(), make_support().images.double()
    network = Network.of(model, images)
    with pytest.raises(FewshiftError, match=r"layer '1' is not finite"):
        read(network, [images * 1e200], tied(network, 1.0))


class Forked(nn.Module):
    """Runs one BatchNorm layer for small images, another for large ones."""

    def __init__(self):
        super().__init__()
        self.small, self.large, self.fc = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.Linear(3, 3)

    def forward(self, images):
        hidden = self.small(images) if images.shape[-1] < 10 else self.large(images)
        return self.fc((self.large(hidden) if images.shape[-1] < 10 else self.small(hidden)).mean((2, 3)))


def test_chunks_that_run_different_layers_are_refused():
    network = Network.of(Forked().eval(), torch.randn(2, 3, 8, 8))
    with pytest.raises(FewshiftError, match=r"layer '(small|large)' for one image and another layer"):
        read(network, [torch.randn(2, 3, 8, 8), torch.randn(2, 3, 12, 12)], tied(network, 0.5))


def test_a_layer_called_twice_is_passed_three_times_each_from_what_the_last_pooled():
    torch.manual_seed(0)
    model, images = unsettle(Shared()).double(), make_support().images.double()
    layer = model.bn

    def pooled(inputs):
        pixels = torch.cat([z.transpose(0, 1).flatten(1) for z in inputs], 1)
        return pixels.mean(1), (pixels.var(1, correction=0) + layer.eps).sqrt()

    def run(held=None):
        """Both calls with `held`; without it each call pools what was seen up to then."""
        inputs = []

        def bn(z):
            inputs.append(z)
            mean, std = pooled(inputs) if held is None else held
            mean = 0.6 * mean + 0.4 * layer.running_mean
            std = 0.6 * std + 0.4 * (layer.running_var + layer.eps).sqrt()
            mean, std, gamma, beta = (value.view(1, -1, 1, 1) for value in (mean, std, layer.weight, layer.bias))
            return gamma * (z - mean) / std + beta

        logits = model.fc(bn(model.again(bn(model.conv(images)).relu())).relu().mean((2, 3)))
        return pooled(inputs), logits

    held, _ = run()
    for _ in range(2):
        held, _ = run(held)
    _, logits = run(held)
    network = Network.of(model, images)
    reading = read(network, [images], tied(network, 0.6))
    assert torch.allclose(reading.moments["bn"].pooled_mean, held[0], atol=1e-10)
    assert torch.allclose(reading.logits[0], logits, atol=1e-10)

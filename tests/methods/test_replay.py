"""Running a network again from the middle: the same numbers as running all of it, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock

from fewshift.methods._replay import resumed
from fewshift.methods.delta_reg import filter_importance
from tests.helpers.networks import make_support, make_tiny, same_state, state, unsettle


class Devious(nn.Module):
    """Everything that must not be skipped carelessly, before and after the layer `watched`."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.same, self.act, self.late = nn.Identity(), nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True)
        self.norm, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.legacy = nn.Sequential(nn.Hardtanh(-0.5, 0.5, inplace=True), nn.Conv2d(6, 6, 1))  # alters its input
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.pair = Pair()
        self.lister = Lister()
        self.watched = nn.Conv2d(6, 6, 3, padding=1)
        self.fc = nn.Linear(6, 3)

    def forward(self, images):
        x = self.stem(images)
        before = self.norm(x)
        seen_before = before * 2  # reads what the in-place activation is about to overwrite
        after = self.act(self.same(before))
        x = x + self.legacy(after) + after + seen_before  # `after` was altered again
        x += self.twice(self.twice(x))
        left, right = self.pair(x)
        features = [left]
        x = self.lister(right, features) + features[1]
        skip = self.norm2(x)
        x = self.watched(skip)
        skip += 1  # a remembered output is written into
        x = self.late(x).add_(skip) + self.twice(features[0]) + before
        return {"out": self.fc(x.mean((2, 3)))}


class Pair(nn.Module):
    def forward(self, x):
        return x.sin(), x.cos()


class Lister(nn.Module):
    """Returns one output and appends another to a list."""

    def forward(self, x, features):
        features.append(x * 3)
        return x.exp()


def made(make, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return unsettle(make(**kwargs)).requires_grad_(False)


NETWORKS = {
    "tiny": (make_tiny, ["conv1", "conv2"]),
    "devious": (lambda: made(Devious), ["stem.0", "legacy.1", "twice", "watched"]),
    "resnet": (
        lambda: made(
            torchvision.models.ResNet, block=BasicBlock, layers=[1, 1, 1, 1], num_classes=3, width_per_group=64
        ),
        ["conv1", "layer2.0.downsample.0", "layer4.0.conv2"],
    ),
    "densenet": (
        lambda: made(torchvision.models.DenseNet, growth_rate=4, block_config=(2, 2), num_init_features=6),
        ["features.conv0", "features.transition1.conv", "features.denseblock2.denselayer2.conv1"],
    ),
    "efficientnet": (
        lambda: made(timm.create_model, model_name="tf_efficientnet_lite0", num_classes=3),
        ["blocks.1.1.conv_pwl", "blocks.5.0.conv_dw", "conv_head"],
    ),
}


def logits(output):
    return output["out"] if isinstance(output, dict) else output


def without(model, name, channel, images):
    """What anyone would write: a copy of the network with that filter set to zero."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_submodule(name).weight[channel] = 0
        return logits(broken(images))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", NETWORKS)
@torch.no_grad()
def test_a_filter_set_to_zero_in_the_middle_gives_the_same_bits_as_in_the_whole_network(which, dtype):
    make, names = NETWORKS[which]
    model, images = make().to(dtype), make_support(1, size=32).images.to(dtype)
    for name in names:
        bias = model.get_submodule(name).bias
        with resumed(model, name, images) as run:
            for channel in (0, 3):

                def zeroed(output, channel=channel, bias=bias):
                    output[:, channel] = 0 if bias is None else bias[channel]
                    return output

                assert torch.equal(logits(run(zeroed)), without(model, name, channel, images)), name
            assert torch.equal(logits(run(lambda output: output)), logits(model(images))), name


def test_importance_is_that_of_the_naive_loop_over_all_batches():
    model, support = made(torchvision.models.resnet18, num_classes=3), make_support(12, size=32)
    parts = list(zip(support.images.split(32), support.labels.split(32), strict=True))  # 32 + 4 images
    rises = filter_importance(model, ["layer4.1.conv2"], parts, F.cross_entropy)
    base = sum(F.cross_entropy(model(x), y).item() for x, y in parts) / 2
    for channel in (0, 100, 511):
        losses = [F.cross_entropy(without(model, "layer4.1.conv2", channel, x), y).item() for x, y in parts]
        expected = torch.tensor(sum(losses) / 2 - base)
        assert torch.equal(rises["layer4.1.conv2"][channel], expected)


@torch.no_grad()
def test_what_comes_before_the_layer_is_not_computed_again():
    model, images = made(torchvision.models.resnet18, num_classes=3), make_support(1, size=32).images
    ran = []
    with resumed(model, "layer3.1.conv2", images) as run:
        for name, module in model.named_modules():
            if not list(module.children()) and "forward" not in vars(module):
                module.register_forward_hook(lambda *_, name=name: ran.append(name))
        run(lambda output: output)
    assert ran
    assert all(name.startswith(("layer3.1.", "layer4.", "avgpool", "fc")) for name in ran)


@torch.no_grad()
def test_hooks_of_the_network_are_applied_once():
    model, images = make_tiny(), make_support(1).images
    model.bn1.register_forward_hook(lambda _, __, output: output * 2)
    model.conv2.register_forward_hook(lambda _, __, output: output + 1)
    with resumed(model, "conv2", images) as run:
        assert torch.equal(run(lambda output: output), model(images))


@torch.no_grad()
def test_the_network_is_left_as_it_was_after_work_and_after_an_error():
    model, images = made(Devious), make_support(1).images
    own = model.norm.forward = lambda x, original=model.norm.forward: original(x)  # a forward method of its own
    before, random = state(model), torch.get_rng_state()
    with resumed(model, "watched", images) as run, pytest.raises(RuntimeError, match="size of tensor"):
        run(lambda output: output[:, :2])
    with pytest.raises(ZeroDivisionError), resumed(model, "watched", images):
        1 / 0  # noqa: B018
    assert [module for module in model.modules() if "forward" in vars(module)] == [model.norm]
    assert model.norm.forward is own
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert same_state(before, state(model))
    assert torch.equal(random, torch.get_rng_state())

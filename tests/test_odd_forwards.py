"""Networks that compute in other types than their weights, leave a bias out, are scripted in part, or refuse images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fewshift
from fewshift import METHODS, AdaBN, FewshiftError, Target
from fewshift.core.method import Needs
from fewshift.core.support import Unlabelled
from tests.helpers.hard_networks import Untied, made
from tests.helpers.methods import quick
from tests.helpers.networks import Tiny, make_support, same_state, state, unsettle

# --- autocast


class Autocast(Tiny):
    """Computes in bfloat16, with weights in float32."""

    def forward(self, images):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(images)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs is not Needs.STREAM])
def test_every_method_adapts_a_forward_with_autocast_or_says_why_not(name):
    network, support = made(Autocast), make_support()
    target = Target(support, Unlabelled(make_support(seed=3).images))
    if name in ("blend-head", "late-fusion"):  # rounding hides that the head gives the output
        with pytest.raises(FewshiftError, match=r"head|layers follow 'fc'"):
            quick(name).adapt(network, target)
        return
    adapted = quick(name).adapt(network, target)
    assert torch.isfinite(adapted(support.images)).all()
    assert {tensor.dtype for tensor in adapted.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs is not Needs.STREAM])
def test_every_method_may_run_as_a_whole_with_autocast(name):
    support = make_support()
    target = Target(support, Unlabelled(make_support(seed=3, size=12 if name == "sdda" else 8).images))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        adapted = quick(name).adapt(made(Tiny), target)
    assert torch.isfinite(adapted(support.images)).all()


def test_auto_takes_a_forward_with_autocast():
    network = made(Autocast)
    before = state(network)
    assert fewshift.adapt(network, make_support(), accept="always").accepted
    assert same_state(state(network), before)


# --- BatchNorm without a bias


def biasless():
    """Has a BatchNorm layer with a weight and no bias, and one with a bias and no weight."""
    network = made(Untied)
    network.bn1.register_parameter("bias", None)
    network.bn2.register_parameter("weight", None)
    return network


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs is not Needs.STREAM])
def test_every_method_adapts_layers_without_a_bias(name):
    network, support = biasless(), make_support()
    adapted = quick(name).adapt(network, Target(support, Unlabelled(make_support(seed=3).images)))
    assert torch.isfinite(adapted(support.images)).all()
    if METHODS[name]().plain:
        assert state(adapted).keys() == state(network).keys()


def test_statistics_of_layers_without_a_bias_are_exact():
    network, support = biasless(), make_support()
    expected = twin_with_neutral(network).train()(support.images)
    result = fewshift.adapt(network, support, method="adabn", accept="always", validate=None)
    assert torch.allclose(result.model(support.images), expected, atol=1e-5)
    again = fewshift.revert(fewshift.apply(network, result.delta), result.delta)
    assert same_state(state(again), state(network))


def twin_with_neutral(network):
    """The same network with a bias of 0 and a weight of 1 in the place of those that are missing."""
    other = made(Untied)
    missing = {"bn1.bias": torch.zeros(6), "bn2.weight": torch.ones(6)}
    other.load_state_dict({**network.state_dict(), **missing})
    return other


# --- scripts, and networks that refuse


def test_layers_that_are_never_executed_are_named(support):
    class Idle(Tiny):
        def forward(self, images):
            return self.fc(images.mean((2, 3)).repeat(1, 2))

    with pytest.raises(FewshiftError, match="'bn1' is a BatchNorm2d: never executed"):
        AdaBN().adapt(made(Idle), Target(support))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_a_scripted_layer_inside_a_network_is_named(support):
    class Scripted(Tiny):
        def __init__(self):
            super().__init__()
            self.conv2 = torch.jit.script(nn.Conv2d(6, 6, 3, padding=1, bias=False))

    for call in (fewshift.adapt, fewshift.inspect):
        with pytest.raises(FewshiftError, match="layer 'conv2' of the network is scripted"):
            call(unsettle(Scripted()), support if call is fewshift.adapt else support.images)


def test_eight_bit_weights_are_one_sentence(support):
    network = made(Tiny).to(torch.float8_e4m3fn)
    for call in (fewshift.adapt, fewshift.evaluate):
        with pytest.raises(FewshiftError, match="the network cannot run on images"):
            call(network, support)


@pytest.mark.parametrize("images", [torch.randn(6, 2, 8, 8), torch.randn(6, 3, 8)], ids=["channels", "dimensions"])
def test_evaluate_says_which_images_a_network_cannot_take(images, tiny):
    with pytest.raises(FewshiftError, match="the network cannot run on images of shape"):
        fewshift.evaluate(tiny, (images, torch.arange(6) % 3))


def test_a_twin_has_the_same_answers_before_anything_is_adapted(support):
    network = biasless()
    assert torch.allclose(network(support.images), twin_with_neutral(network)(support.images), atol=1e-6)
    assert AdaBN().adapt(network, Target(support)).bn1.bias is None


# --- evaluation mode


class Mute(Tiny):
    """Its `train` gives nothing back, as where BatchNorm is kept frozen."""

    def train(self, mode=True):
        super().train(mode)


class Switching(Tiny):
    """Normalises with its batch, which it switches to within the pass."""

    def forward(self, images):
        self.bn1.train()
        return super().forward(images)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs is not Needs.STREAM])
def test_a_network_whose_train_gives_nothing_back_is_adapted_like_any_other(name):
    support = make_support()
    target = Target(support, Unlabelled(make_support(seed=3).images))
    mute, plain = (quick(name).adapt(made(kind), target)(support.images) for kind in (Mute, Tiny))
    torch.testing.assert_close(mute, plain, rtol=0, atol=0)


def test_what_calls_adapt_takes_a_network_whose_train_gives_nothing_back():
    network, support = made(Mute), make_support()
    result = fewshift.adapt(network, support, method="adabn", accept="always")
    assert same_state(state(result.delta.apply(network)), state(result.model))
    assert fewshift.inspect(network, support.images).head == "fc"
    assert fewshift.evaluate(network, (support.images, support.labels)).accuracy


def test_a_layer_that_is_switched_to_its_batch_within_the_pass_is_refused():
    with pytest.raises(FewshiftError, match=r"bn1.*normalises with its batch"):
        fewshift.adapt(made(Switching), make_support(), method="adabn", validate=None)


# --- a batch of one


class Squeezing(Tiny):
    """Drops every dimension of size 1: that of the batch, if it has one image."""

    def forward(self, images):
        return super().forward(images).squeeze()


def test_a_network_that_drops_the_dimension_of_the_batch_is_one_sentence():
    support = make_support()
    with pytest.raises(FewshiftError, match=r"shape \(3,\), so it drops the dimension of the batch"):
        fewshift.evaluate(made(Squeezing), (support.images[:1], support.labels[:1]))

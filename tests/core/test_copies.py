"""Adaptation works on copies: a network of which no copy is separate is refused, and stays as it is."""

from __future__ import annotations

import threading
import types
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fewshift
from fewshift import FewshiftError
from tests.helpers.networks import Tiny, make_support, make_tiny, same_state, state, unsettle


class Cloning(Tiny):
    """Its state dict holds copies."""

    def state_dict(self, *words, **options):
        return {name: tensor.clone() for name, tensor in super().state_dict(*words, **options).items()}


class Renaming(Tiny):
    """Its state dict has other names."""

    def state_dict(self, *words, **options):
        return {f"net.{name}": tensor for name, tensor in super().state_dict(*words, **options).items()}


class Itself(Tiny):
    """Its copy is itself."""

    def __deepcopy__(self, memo):
        return self


class Lambda(Tiny):
    """A part of its forward is a function that refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = lambda images: self.bn1(self.conv1(images)).relu()

    def forward(self, images):
        hidden = self.block(images)
        return self.fc((hidden + self.bn2(self.conv2(hidden))).relu().mean((2, 3)))


class Hidden(Lambda):
    """The same, where no attribute shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = {"deep": [self.block]}

    def forward(self, images):
        hidden = self.block["deep"][0](images)
        return self.fc((hidden + self.bn2(self.conv2(hidden))).relu().mean((2, 3)))


class Storing(Tiny):
    """Reads what a hook has left in it."""

    def __init__(self) -> None:
        super().__init__()
        self.store = {}
        self.bn1.register_forward_hook(lambda _, __, output: self.store.update(last=output))

    def forward(self, images):
        self.bn1(self.conv1(images))
        return self.fc(self.bn2(self.conv2(self.store["last"].relu())).relu().mean((2, 3)))


def rewired(network):
    """The network with another forward, around its own."""
    old = network.forward
    network.forward = lambda images: old(images / 2)
    return network


REFUSED = {
    "state dict of copies": (Cloning, r"state_dict\(\) does not hold its own 'conv1.weight'"),
    "state dict of other names": (Renaming, r"state_dict\(\) does not hold its own 'conv1.weight'"),
    "no copy": (Itself, "gives the network itself and no copy"),
    "lambda": (Lambda, "the network keeps the function '.*lambda.*'.* make it a method"),
    "hidden lambda": (Hidden, "still runs the original's layer 'conv1'.* make it a method"),
    "hook": (Storing, "layer 'bn1' keeps the function '.*lambda.*'.* make it a method"),
    "other forward": (lambda: rewired(Tiny()), "the network keeps the function '.*rewired.*'.* make it a method"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("training", [False, True])
def test_a_network_without_a_separate_copy_is_refused_and_stays_as_it_is(kind, training):
    make, sentence = REFUSED[kind]
    network = unsettle(make()).train(training)
    before = state(network)
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.adapt(network, make_support(), method="adabn")
    assert same_state(state(network), before)
    assert network.training == training
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_method_in_the_place_of_forward_is_copied_with_its_network():
    network, twin = make_tiny(), make_tiny()
    network.forward = types.MethodType(lambda self, images: Tiny.forward(self, images / 2), network)
    support = make_support()
    halved = fewshift.Support(support.images / 2, support.labels)
    ours = fewshift.adapt(network, support, method="adabn", validate=None).model
    expected = fewshift.adapt(twin, halved, method="adabn", validate=None).model
    torch.testing.assert_close(ours(support.images), expected(halved.images))


def test_a_hook_that_refers_to_no_module_of_the_network_is_kept():
    network, shapes = make_tiny(), []
    network.bn1.register_forward_hook(lambda _, __, output: shapes.append(output.shape))
    fewshift.adapt(network, make_support(), method="adabn", validate=None)
    assert shapes


class Asking(nn.Module):
    """Asks a network in another thread while this one runs."""

    served: nn.Module
    answers: ClassVar[list[Tensor]] = []

    def forward(self, hidden):
        def ask():
            self.answers.append(self.served(make_support().images))

        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        return hidden


def test_another_thread_may_run_the_network_meanwhile():
    network = make_tiny()
    network.drop = Asking()
    Asking.served = network  # not the copy
    fewshift.adapt(network, make_support(), method="adabn", validate=None)
    assert Asking.answers


@pytest.mark.parametrize("call", ["apply", "revert"])
def test_what_a_delta_makes_answers_as_in_evaluation(call):
    network, support = make_tiny(), make_support()
    result = fewshift.adapt(network, support, method="adabn", validate=None)
    start = network if call == "apply" else result.model
    expected = result.model if call == "apply" else network
    made = getattr(result.delta, call)(start.train())
    assert not made.training
    assert torch.equal(made(support.images), expected.eval()(support.images))

"""Networks that flatten their maps with `view`, as textbooks do: they insist on one order in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fewshift
from fewshift import METHODS, Network, Target
from fewshift.core.support import Unlabelled
from tests.helpers.hard_networks import made, twin
from tests.helpers.methods import quick
from tests.helpers.networks import Tiny, make_support, make_tiny, same_state, state


class Viewing(Tiny):
    """Has a head for every place of its maps."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6 * 8 * 8, 3)

    def forward(self, images):
        hidden = self.bn1(self.conv1(images)).relu()
        hidden = (hidden + self.bn2(self.conv2(hidden))).relu()
        return self.fc(hidden.view(len(hidden), -1))


class Flattening(Viewing):
    """The same for maps in any order."""

    def forward(self, images):
        hidden = self.bn1(self.conv1(images)).relu()
        hidden = (hidden + self.bn2(self.conv2(hidden))).relu()
        return self.fc(hidden.flatten(1))


class Grey(Viewing):
    """Its images look alike in both orders; its maps do not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1, bias=False)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_what_it_gives_for_maps_that_are_copied(name):
    viewing, images = made(Viewing), make_support(seed=3).images
    flattening = twin(viewing, Flattening)
    ours, theirs = (
        quick(name).adapt(network, Target(make_support(), Unlabelled(images))) for network in (viewing, flattening)
    )
    assert torch.allclose(ours(images), theirs(images), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [Viewing, Grey])
def test_everything_that_passes_images_takes_such_a_network(kind):
    network, channels = made(kind), 3 if kind is Viewing else 1
    support = make_support(channels=channels)
    pictures, labelled = make_support(seed=3, channels=channels).images, (support.images, support.labels)
    before = state(network)
    result = fewshift.adapt(network, support, unlabelled=pictures, accept="always")
    assert torch.isfinite(fewshift.apply(network, result.delta)(pictures)).all()
    fewshift.shift(network, pictures)
    fewshift.compare(network, labelled, ["source", "adabn", "lccs"])
    fewshift.learning_curve(network, labelled)
    assert same_state(state(network), before)


def test_a_network_is_passed_in_the_order_that_it_can_take():
    images = make_support().images
    layouts = {kind: Network.of(made(kind), images).layout for kind in (Viewing, Flattening)}
    assert layouts == {Viewing: torch.contiguous_format, Flattening: torch.channels_last}
    assert Network.of(made(Flattening).double(), images).layout is torch.contiguous_format  # no faster
    assert Network.of(make_tiny(), images[0][None]).layout is torch.channels_last


def test_finding_the_order_changes_neither_weights_nor_random_numbers():
    network, images = made(Flattening), make_support().images
    strides, random = [tensor.stride() for tensor in network.parameters()], torch.get_rng_state()
    Network.of(network, images)
    assert [tensor.stride() for tensor in network.parameters()] == strides
    assert torch.equal(torch.get_rng_state(), random)

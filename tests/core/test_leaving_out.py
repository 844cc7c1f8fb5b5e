"""Passes in which each image is normalised with the statistics of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewshift import FewshiftError, Network
from fewshift.core.reading import read, read_support, tied
from tests.helpers.networks import Shared, make_support, make_tiny, unsettle


def naive_apart(model: nn.Module, images: torch.Tensor, v: float) -> torch.Tensor:
    """The tiny network written out: before each layer every image gets the blend with the statistics of the others."""

    def bn(layer, z):
        rows = []
        for place in range(len(z)):
            others = torch.cat([z[:place], z[place + 1 :]]).transpose(0, 1).flatten(1)
            source = (layer.running_var + layer.eps).sqrt()
            mean = v * others.mean(1) + (1 - v) * layer.running_mean
            std = v * (others.var(1, correction=0) + layer.eps).sqrt() + (1 - v) * source
            normal = (z[place] - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
            rows.append(layer.weight.view(-1, 1, 1) * normal + layer.bias.view(-1, 1, 1))
        return torch.stack(rows)

    hidden = bn(model.bn1, model.conv1(images)).relu()
    hidden = (hidden + bn(model.bn2, model.conv2(hidden))).relu()
    return model.fc(hidden.mean((2, 3)))


ROUTES = [(15, False), (4, False), (4, True)]  # one batch, in step, layer by layer


@pytest.mark.parametrize(("size", "frugal"), ROUTES)
@pytest.mark.parametrize("v", [0.0, 0.3, 1.0])
def test_an_image_left_out_is_normalised_with_the_others(v, size, frugal):
    model, images = make_tiny().double(), make_support().images.double()
    network = Network.of(model, images)
    reading = read(network, images.split(size), tied(network, v), frugal=frugal, leave_out=True)
    with torch.no_grad():
        expected = naive_apart(model, images, v)
    assert torch.allclose(torch.cat(reading.logits), expected, atol=1e-9)
    assert torch.allclose(reading.features @ model.fc.weight.T + model.fc.bias, expected, atol=1e-9)


def test_one_image_among_copies_of_itself_is_not_changed_by_leaving_it_out():
    images = make_support().images[:1].repeat(5, 1, 1, 1)
    network = Network.of(make_tiny(), images)
    apart, together = (read(network, [images], tied(network, 0.7), leave_out=way).logits[0] for way in (True, False))
    assert torch.allclose(apart, together, atol=1e-5)


def test_a_layer_that_runs_twice_leaves_out_both_its_runs():
    # of many images, one changes the statistics of the others little, so leaving it out changes little
    images = make_support(40).images
    network = Network.of(unsettle(Shared()), images)
    apart, together = (read(network, [images], tied(network, 1.0), leave_out=way).logits[0] for way in (True, False))
    few = images[:4]
    own = Network.of(unsettle(Shared()), few)
    alone = read(own, [few], tied(own, 1.0), leave_out=True).logits[0]
    assert float((apart - together).abs().max()) < 0.2 * float((alone - together[:4]).abs().max())


def test_a_single_image_has_no_others():
    images = make_support().images[:1]
    network = Network.of(make_tiny(), images)
    with pytest.raises(FewshiftError, match=r"single image has no others.*add"):
        read(network, [images], tied(network, 0.5), leave_out=True)


def test_images_beside_the_support_share_in_its_statistics():
    support, beside = make_support(2), make_support(3, seed=5).images
    network = Network.of(make_tiny(), support.images)
    reading = read_support(network, support, tied(network, 1.0), beside=beside)
    together = read(network, [torch.cat([support.images, beside])], tied(network, 1.0))
    assert torch.allclose(torch.cat(reading.logits), torch.cat(together.logits), atol=1e-6)

"""Networks that compute layers anew on the way back, or pass a batch in parts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fewshift
from fewshift import METHODS, FewshiftError, Target
from tests.helpers.methods import quick
from tests.helpers.networks import Tiny, make_support, make_tiny, unsettle


class Recomputing(Tiny):
    """Keeps the activations of no part."""

    reentrant = False

    def first(self, images):
        return self.bn1(self.conv1(images)).relu()

    def second(self, hidden):
        return (hidden + self.bn2(self.conv2(hidden))).relu()

    def forward(self, images):
        hidden = checkpoint(self.first, images, use_reentrant=self.reentrant)
        return self.fc(checkpoint(self.second, hidden, use_reentrant=self.reentrant).mean((2, 3)))


GRADIENTS = ["lccs", "finetune-bn", "finetune-features", "l2", "l2-sp", "delta-reg", "lp-ft", "tent"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_network_that_recomputes_is_refused_where_gradients_are_taken(name):
    method, support = quick(name), make_support()

    def adapted_and_asked():
        return method.adapt(unsettle(Recomputing()), Target(support))(support.images)  # a stream is learnt from now

    with pytest.raises(FewshiftError, match=r"on the way back .*set_grad_checkpointing\(False\)"):
        adapted_and_asked()


@pytest.mark.parametrize("name", ["adabn", "blend", "blend-head"])
def test_where_none_are_taken_it_is_adapted_as_its_twin(name):
    assert name in METHODS
    torch.manual_seed(0)
    recomputing, plain, support = unsettle(Recomputing()), make_tiny(), make_support()
    plain.load_state_dict(recomputing.state_dict())
    ours, expected = (
        fewshift.adapt(network, support, method=name, validate=None).model(support.images)
        for network in (recomputing, plain)
    )
    assert torch.equal(ours, expected)


class InParts(Tiny):
    """Passes four images at a time."""

    def forward(self, images):
        return torch.cat([super(InParts, self).forward(part) for part in images.split(4)])


@pytest.mark.parametrize("name", ["adabn", "lccs", "auto"])
def test_a_network_that_passes_a_batch_in_parts_is_refused(name):
    with pytest.raises(FewshiftError, match=r"runs layer 'bn1' once for two images and not so for these.*in chunks"):
        fewshift.adapt(unsettle(InParts()), make_support(), method=quick(name), validate=None)

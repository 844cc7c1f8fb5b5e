"""What an adaptation hands over is what it measured, whatever its networks go through afterwards."""

from __future__ import annotations

import pytest
import torch

import fewshift
from tests.helpers.networks import make_support, make_tiny, same_state, state


def adapted(accept="always"):
    network = make_tiny()
    return network, fewshift.adapt(network, make_support(), method="adabn", validate=None, accept=accept)


def test_the_delta_is_that_of_the_network_before_it_was_overwritten():
    network, result = adapted()
    network.load_state_dict(result.model.state_dict())  # "use it"
    again = fewshift.apply(make_tiny(), result.delta)
    assert same_state(state(again), state(network))


@pytest.mark.parametrize("later", [lambda model: model.train()(make_support().images), lambda model: model.half()])
def test_the_delta_is_that_of_the_network_before_it_was_used(later):
    network, result = adapted()
    before = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
    later(result.model)
    assert same_state(state(fewshift.apply(network, result.delta)), before)


def test_the_delta_of_a_rejected_adaptation_is_empty_whatever_happens_to_the_network():
    network, result = adapted(accept="better")
    assert not result.accepted
    with torch.no_grad():
        network.fc.weight.add_(1)
    assert not result.delta.bits
    assert result.candidate_delta.bits
    assert same_state(state(fewshift.apply(make_tiny(), result.delta)), state(make_tiny()))


def test_a_rejected_adaptation_has_an_empty_delta_though_its_candidate_has_none():
    support = make_support()
    result = fewshift.adapt(make_tiny(), support, method="late-fusion", accept=100.0)
    assert not result.accepted
    assert not result.delta.bits
    with pytest.raises(fewshift.FewshiftError, match="has no delta"):
        _ = result.candidate_delta


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path):
    _, result = adapted()
    with pytest.raises(fewshift.FewshiftError, match="has a NUL in its name"):
        result.delta.save(f"{tmp_path}/a\0b")


def test_an_adaptation_stands_for_its_delta():
    network, result = adapted()
    support = make_support(seed=5)
    judged = [
        fewshift.evaluate(network, (support.images, support.labels), delta=each) for each in (result, result.delta)
    ]
    assert judged[0].accuracy == judged[1].accuracy

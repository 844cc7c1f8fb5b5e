"""A network with one output tells two classes apart: sigmoid(z) is the probability of the second."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import fewshift
from fewshift.core.network import Network, logits_of
from fewshift.errors import FewshiftError
from tests.helpers.networks import Tiny, make_support, make_tiny, same_state, state

SUPPORT = make_support(shots=8, classes=2)


def test_one_logit_is_read_as_two_with_the_probability_of_the_sigmoid() -> None:
    z = torch.linspace(-5, 5, 11)[:, None]
    torch.testing.assert_close(logits_of(z).softmax(1), torch.cat([1 - z.sigmoid(), z.sigmoid()], 1))


def test_to_methods_the_head_has_two_rows_with_the_same_answers() -> None:
    model = make_tiny(1)
    before = state(model)
    view = Network.of(model, SUPPORT.images)
    assert (view.classes, view.output, view.head) == (2, (2,), "fc")
    answers = view.model(SUPPORT.images).softmax(1)
    torch.testing.assert_close(answers[:, 1:], model.eval()(SUPPORT.images).sigmoid())
    assert same_state(state(model), before)


@pytest.mark.parametrize("method", ["auto", "blend-head", "lccs", "adabn", "finetune-head", "lp-ft", "source"])
def test_what_methods_make_of_it_has_one_output_and_a_delta(method: str) -> None:
    model = make_tiny(1)
    result = fewshift.adapt(model, SUPPORT, method=method, accept="always", validate=None)
    images = make_support(shots=3, classes=2, seed=4).images
    assert result.model(images).shape == (6, 1)
    adapted = fewshift.apply(model, result.delta)
    assert torch.equal(adapted(images), result.model(images))
    assert same_state(state(fewshift.revert(adapted, result.delta)), state(model))


def test_a_binary_network_learns_a_new_place_and_is_evaluated_by_the_sign_of_its_output() -> None:
    model, place = make_tiny(1), make_support(shots=30, classes=2)
    support, others = place.part(torch.arange(16)), place.part(torch.arange(16, 60))
    result = fewshift.adapt(model, support)
    assert result.accepted
    scores = fewshift.evaluate(model, others, delta=result.delta).accuracy
    networks = {"source": model.eval(), "adapted": result.model.eval()}
    right = {name: (net(others.images)[:, 0] > 0).long() == others.labels for name, net in networks.items()}
    assert scores == {name: pytest.approx(100 * float(values.float().mean())) for name, values in right.items()}
    assert scores["adapted"] > scores["source"] + 20


def test_a_rejected_adaptation_is_the_network_that_was_given() -> None:
    model = make_tiny(1)
    result = fewshift.adapt(model, SUPPORT, accept=lambda gain: False)
    assert same_state(state(result.model), state(model))
    assert not result.delta.bits


def test_the_second_class_name_is_what_a_positive_logit_means(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=1).eval()
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    loaded = fewshift.load("timm:test_resnet", tmp_path / "w.safetensors", classes=["sound", "torn"])
    pixels = np.random.default_rng(0).integers(0, 255, (4, 40, 40, 3), dtype=np.uint8)
    for number, values in enumerate(pixels):
        Image.fromarray(values).save(tmp_path / f"{number}.png")
    steps = loaded.fewshift_card.preprocess
    images = torch.stack([steps(Image.fromarray(values)) for values in pixels])
    with torch.no_grad():
        network.fc.bias -= network(images).median()  # both answers occur
        loaded.fc.bias.copy_(network.fc.bias)
        expected = ["torn" if z > 0 else "sound" for z in network(images)[:, 0]]
    rows = fewshift.predict(loaded, [tmp_path / f"{number}.png" for number in range(4)]).rows
    assert [row.name for row in rows] == expected
    assert set(expected) == {"sound", "torn"}


def test_a_network_that_ends_in_a_sigmoid_is_refused() -> None:
    with pytest.raises(FewshiftError, match="sigmoid of 'fc', a probability and no logit: leave the sigmoid out"):
        fewshift.adapt(Ending(torch.sigmoid), SUPPORT)


def test_where_the_head_cannot_have_two_rows_methods_without_a_head_work() -> None:
    model = Ending(lambda z: z.reshape(-1, 1) * 2)
    assert Network.of(model, SUPPORT.images).head is None
    before = copy.deepcopy(model).eval()(SUPPORT.images)
    result = fewshift.adapt(model, SUPPORT, method="adabn", accept="always", validate=None)
    assert result.model(SUPPORT.images).shape == before.shape


class Ending(Tiny):
    """The tiny network with one output, and something after its head."""

    def __init__(self, end: object) -> None:
        super().__init__(1)
        self.end = end

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.end(super().forward(images))  # type: ignore[operator]
        return output


def test_one_channel_of_pixel_logits_stays_one() -> None:
    logits = nn.Conv2d(3, 1, 1)(torch.zeros(2, 3, 4, 4))
    assert logits_of(logits).shape == (2, 1, 4, 4)

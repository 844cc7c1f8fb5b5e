"""Images and labels that do not fit are one sentence wherever they are passed, not only as the support."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fewshift
from fewshift import FewshiftError
from tests.helpers.networks import Tiny, make_support, make_tiny, scenes, street, unsettle

OUT_OF_RANGE = "out of range for a network with . outputs: use labels from 0"


@pytest.mark.parametrize("move", [5, -1])
def test_labels_that_judge_a_learning_curve_are_checked(move):
    judges = make_support(shots=3, seed=9)
    with pytest.raises(FewshiftError, match=OUT_OF_RANGE):
        fewshift.learning_curve(
            make_tiny(), make_support(shots=3), method="adabn", draws=1, labelled=(judges.images, judges.labels + move)
        )


@pytest.mark.parametrize("label", [7, -1])
def test_pixel_labels_that_are_no_output_are_refused_by_evaluate(label):
    street_scenes = scenes(4)
    labels = street_scenes.labels.clone()
    labels[0, 5, 5] = label
    with pytest.raises(FewshiftError, match=OUT_OF_RANGE):
        fewshift.evaluate(street(), (street_scenes.images, labels))


@pytest.mark.parametrize("where", ["adapt", "unlabelled", "compare", "learning_curve"])
def test_images_of_other_channels_are_refused_before_the_work(where):
    support, other = make_support(shots=3), make_support(shots=3, seed=9)
    grey = other.images[:, :1]
    calls = {
        "adapt": lambda: fewshift.adapt(make_tiny(), support, method="adabn", validate=(grey, other.labels)),
        "unlabelled": lambda: fewshift.adapt(make_tiny(), support, method="adabn", unlabelled=grey),
        "compare": lambda: fewshift.compare(make_tiny(), support, ["adabn"], validate=(grey, other.labels)),
        "learning_curve": lambda: fewshift.learning_curve(
            make_tiny(), support, method="adabn", draws=1, labelled=(grey, other.labels)
        ),
    }
    with pytest.raises(FewshiftError, match=r"cannot run on images of shape \(\d, 1, 8, 8\)"):
        calls[where]()


class Dropping(Tiny):
    """Drops out in evaluation mode, too."""

    def forward(self, images):
        hidden = F.dropout(self.bn1(self.conv1(images)).relu(), 0.5, training=True)
        return self.fc((hidden + self.bn2(self.conv2(hidden))).relu().mean((2, 3)))


class Jittering(Tiny):
    """Draws from NumPy and Python in evaluation mode, torch knows nothing of it."""

    def forward(self, images):
        return super().forward(images * (1 + random.random() + np.random.random_sample()))


class Drawing(Tiny):
    """Draws a random number that changes nothing."""

    def forward(self, images):
        return super().forward(images) + 0 * torch.rand(1)


@pytest.mark.parametrize("kind", [Dropping, Jittering])
def test_a_network_whose_answers_are_left_to_chance_is_refused(kind):
    network = unsettle(kind())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(FewshiftError, match="draws random numbers in evaluation mode"):
        fewshift.adapt(network, make_support(), method="adabn")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_random_numbers_that_change_no_answer_are_none_of_our_business():
    assert fewshift.adapt(unsettle(Drawing()), make_support(), method="adabn", accept="always").accepted

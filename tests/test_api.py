"""The front door: what it takes, what it refuses, what it leaves alone."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.utils import parametrizations

import fewshift
from fewshift import LCCS, FewshiftError, Preprocess, Support, Target
from fewshift.methods.auto import Auto
from tests.helpers.networks import make_support, make_tiny, same_state, state


class Pairs:
    """A dataset of (image, label) with names, as torchvision's have them."""

    classes = ("ant", "bee", "cat")

    def __init__(self, support, label=int, image=lambda image: image):
        self.support, self.label, self.image = support, label, image

    def __len__(self):
        return len(self.support)

    def __getitem__(self, index):
        return self.image(self.support.images[index]), self.label(self.support.labels[index])


SUPPORT = make_support()
QUICK = Auto(epochs=1)
LABELS = LCCS(grid=2, epochs=1)  # learns from labels, once
FORMS = {
    "tensors": (SUPPORT.images, SUPPORT.labels),
    "small integers": (SUPPORT.images, SUPPORT.labels.to(torch.uint8)),
    "a list of labels": (SUPPORT.images, SUPPORT.labels.tolist()),
    "arrays": (SUPPORT.images.numpy(), SUPPORT.labels.numpy()),
    "a dataset": Pairs(SUPPORT),
    "numpy labels": Pairs(SUPPORT, label=np.int64),
    "a support": SUPPORT,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_support_gives_the_same_network(form):
    expected = LABELS.adapt(make_tiny(), Target(SUPPORT))
    result = fewshift.adapt(make_tiny(), FORMS[form], method=LABELS, accept="always", validate=None)
    assert same_state(state(result.model), state(expected))
    assert result.support.labels.tolist() == SUPPORT.labels.tolist()
    if "dataset" in form:
        assert result.classes == ("ant", "bee", "cat")


BAD = {
    "validate": ({"validate": "often"}, "'often' is no folder or file: choose 'cv', 'loo'"),
    "accept": ({"accept": "maybe"}, "accept='maybe' .*'not-worse', 'better', 'always', a number"),
    "a stream": ({"method": "tent"}, "tent adapts while it predicts a stream"),
    "an unknown method": ({"method": "magic"}, "no method 'magic': choose one of auto, blend"),
    "a seed": ({"seed": 2**64}, "is no seed: give a whole number"),
    "no seed": ({"seed": None}, "is no seed"),
    "names": ({"classes": "abc"}, "classes='abc' is one word"),
    "twice the same name": ({"classes": ["a", "b", "a"]}, "class name 'a' occurs twice"),
    "a device": ({"device": "xyz"}, "device xyz cannot be used"),
    "augment": ({"augment": lambda image: None}, "augment did not return a tensor"),
    "unlabelled": ({"unlabelled": 7}, "cannot read images from int"),
    "a folder without steps": ({"unlabelled": "photos"}, "images from photos need preprocessing"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_one_sentence(mistake):
    options, sentence = BAD[mistake]
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.adapt(make_tiny(), SUPPORT, **options)


UNREADABLE = {
    "one-hot": ((SUPPORT.images, torch.eye(3)[SUPPORT.labels].long()), "labels have shape"),
    "a column": ((SUPPORT.images, SUPPORT.labels.unsqueeze(1)), "labels have shape"),
    "fractions": (Pairs(SUPPORT, label=lambda label: label.item() + 0.7), "labels are not integers"),
    "words": (Pairs(SUPPORT, label=lambda label: "ant"), "labels are not numbers"),
    "pictures": (Pairs(SUPPORT, image=lambda image: "picture"), "images are not tensors"),
    "a number": (7, "cannot read a support set from int"),
    "nothing": (None, "auto needs support images"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_support_that_cannot_be_read_is_one_sentence(kind):
    support, sentence = UNREADABLE[kind]
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.adapt(make_tiny(), support)


def test_images_of_different_shapes_are_refused():
    shapes = iter([(3, 8, 8), (3, 9, 8)] * 20)
    with pytest.raises(FewshiftError, match="different shapes"):
        fewshift.adapt(make_tiny(), Pairs(SUPPORT, image=lambda image: torch.zeros(next(shapes))))


def test_exploding_images_name_the_layer():
    with pytest.raises(FewshiftError, match="layer 'bn1' is not finite"):
        fewshift.adapt(make_tiny(), replace(SUPPORT, images=SUPPORT.images * 1e30))


def test_class_255_of_many_is_a_class_like_any_other():
    model = make_tiny(classes=300)
    labels = torch.where(SUPPORT.labels == 0, 255, SUPPORT.labels)
    notes = LCCS(init=0.0, epochs=1).fit(model, Target(Support(SUPPORT.images, labels))).notes
    expected = nn.functional.cross_entropy(model(SUPPORT.images), labels)
    assert notes["support_loss"][0] == pytest.approx(expected.item(), abs=1e-5)


class Twins(nn.Module):
    """One BatchNorm layer and one head under two names each."""

    def __init__(self):
        super().__init__()
        self.net = make_tiny()
        self.again, self.head = self.net.bn1, self.net.fc

    def forward(self, images):
        return self.net(images)


def test_modules_with_two_names_change_once():
    result = fewshift.adapt(Twins(), SUPPORT, method=LCCS(epochs=1, classifier="ncc"), accept="always")
    assert result.delta.bits
    adapted = fewshift.apply(Twins(), result.delta)
    assert same_state(state(adapted), state(result.model))
    assert same_state(state(fewshift.revert(adapted, result.delta)), state(Twins()))


def weight_normed():
    model = make_tiny()
    parametrizations.weight_norm(model.fc)
    return model


class Uncopyable(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.lock = make_tiny(), threading.Lock()

    def forward(self, images):
        return self.net(images)


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.net, self.error = make_tiny(), error

    def forward(self, images):
        raise self.error


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_tiny()

    def forward(self, images):
        return self.net(images).sum()


STRANGE = {
    "DataParallel": (lambda: nn.DataParallel(make_tiny()), "pass its .module"),
    "a lock": (Uncopyable, "cannot be copied"),
    "an assertion": (lambda: Failing(AssertionError("no")), r"cannot run on images of shape .*\(no\)"),
    "a key": (lambda: Failing(KeyError("x")), "cannot run on images"),
    "a scalar": (Flat, "2 images .*shape"),
    "a word": (lambda: "resnet18", r"expected an nn\.Module"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_networks_are_refused_in_one_sentence(kind):
    build, sentence = STRANGE[kind]
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.adapt(build(), SUPPORT)


def test_a_parametrised_head_is_left_to_the_source():
    result = fewshift.adapt(weight_normed(), SUPPORT, method=QUICK)
    assert list(result.choice.answers) == ["blend"]
    assert torch.isfinite(result.model(SUPPORT.images)).all()


def test_a_parametrised_batchnorm_is_skipped_with_its_reason():
    model = make_tiny()
    torch.nn.utils.parametrize.register_parametrization(model.bn1, "weight", nn.ReLU())
    result = fewshift.adapt(model, SUPPORT, method="adabn", validate=None)
    skipped = {layer.name: layer.skipped for layer in result.layers}
    assert "parametrisation" in skipped["bn1"]
    assert skipped["bn2"] is None


def test_masks_of_infinity_are_no_broken_weights():
    model = make_tiny()
    model.register_buffer("mask", torch.tensor(float("-inf")))
    assert fewshift.adapt(model, SUPPORT, method=LABELS, validate=None).accepted


def test_a_bad_seed_leaves_the_global_random_state_alone():
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    for seed in (-1, 2**70, 1.5, "a"):
        with pytest.raises(FewshiftError, match="is no seed"):
            fewshift.adapt(make_tiny(), SUPPORT, seed=seed, augment=lambda image: image)
    assert before[0] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert torch.equal(before[2], torch.get_rng_state())


def test_threads_do_not_disturb_each_other():
    def noisy(image):
        return image + 0.1 * torch.randn_like(image) + np.random.rand()

    model = make_tiny()

    def run():
        return state(
            fewshift.adapt(model, SUPPORT, augment=noisy, seed=3, method=LABELS, accept="always", validate=None).model
        )

    expected, states = run(), []
    threads = [threading.Thread(target=lambda: states.append(run())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 4
    assert all(same_state(other, expected) for other in states)


def test_progress_is_told_to_whoever_listens():
    heard = []
    fewshift.adapt(make_tiny(), SUPPORT, method=LCCS(grid=3, epochs=2), progress=lambda *words: heard.append(words))
    assert ("initialisation", 3, 3) in heard
    assert ("gradient steps", 2, 2) in heard
    assert heard[-1] == ("cross-validation", 3, 3)


def test_a_loss_of_ones_own_is_used():
    calls = []

    def loss(logits, labels):
        calls.append(len(labels))
        return nn.functional.cross_entropy(logits, labels)

    fewshift.adapt(make_tiny(), SUPPORT, loss=loss, method=LCCS(grid=3, epochs=2), validate=None)
    assert calls == [15] * (3 + 2)  # every blend of the grid, every step


def test_unlabelled_images_alone_are_enough_for_a_method_that_wants_no_labels():
    result = fewshift.adapt(make_tiny(), None, method="adabn", unlabelled=SUPPORT.images, classes=["a", "b", "c"])
    assert result.support is None
    assert result.delta.classes == ("a", "b", "c")
    assert result.delta.shots is None


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"epochs": 1.5}, "a whole number from 0"),
        ({"epochs": True}, "a whole number from 0"),
        ({"lr": -1.0}, "a number from 0"),
        ({"lr": float("nan")}, "a number from 0"),
        ({"lr": "fast"}, "a number from 0"),
        ({"min_sigma": -1.0}, "a number from 0"),
        ({"n": True}, "does not fit lccs"),
        ({"grid": 10**11}, "too large"),
    ],
)
def test_settings_of_the_wrong_kind_are_one_sentence(bad, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        LCCS(**bad)


def test_a_whole_number_serves_where_a_fraction_may_stand():
    assert LCCS(lr=1, init=1).settings()["lr"] == 1


def test_preprocessing_travels_with_the_delta():
    steps = Preprocess(None, 8, (0.5,) * 3, (0.5,) * 3)
    result = fewshift.adapt(make_tiny(), SUPPORT, method="adabn", preprocess=steps, accept="always")
    assert Preprocess.from_json(dict(result.delta.preprocess)) == steps


def test_unlabelled_pictures_are_preprocessed_like_labelled_ones():
    pictures = [Image.new("RGB", (10, 9), (shade, 40, 90)) for shade in range(0, 240, 30)]
    steps = Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
    result = fewshift.adapt(make_tiny(), None, method="adabn", unlabelled=pictures, preprocess=steps)
    tensors = torch.stack([steps(picture) for picture in pictures])
    expected = fewshift.adapt(make_tiny(), None, method="adabn", unlabelled=tensors)
    assert same_state(state(result.model), state(expected.model))
    assert fewshift.adapt(make_tiny(), None, method="adabn", unlabelled=tensors.numpy()).accepted


@pytest.mark.parametrize("shots", [1, 3])
def test_shots_are_drawn_from_each_class_by_the_seed(shots):
    result = fewshift.adapt(make_tiny(), SUPPORT, method="adabn", shots=shots, seed=2, validate=None)
    assert result.support.counts == {0: shots, 1: shots, 2: shots}
    chosen = fewshift.draw_support(SUPPORT.labels, shots, 2)
    assert torch.equal(result.support.images, SUPPORT.images[chosen])
    assert result.delta.shots == shots


def test_too_many_shots_are_one_sentence():
    with pytest.raises(FewshiftError, match="class 0 has 5 images, 6 shots asked"):
        fewshift.adapt(make_tiny(), SUPPORT, shots=6)


def test_the_result_has_everything_as_json():
    result = fewshift.adapt(make_tiny(), SUPPORT, method=QUICK)
    facts = json.loads(json.dumps(result.to_json()))
    assert (facts["method"], facts["settings"]) == ("auto", QUICK.settings())
    assert facts["chosen"] == result.choice.chosen
    assert (facts["accepted"], facts["gain"]["wins"]) == (result.accepted, result.gain.wins)
    assert [layer["name"] for layer in facts["layers"]] == ["bn1", "bn2"]

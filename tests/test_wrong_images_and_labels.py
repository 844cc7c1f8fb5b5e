"""Images and labels that do not fit are one sentence wherever they are passed, not only as the support."""

from __future__ import annotations

import random
from unicodedata import normalize

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import fewshift
from fewshift import METHODS, FewshiftError
from fewshift.images.class_names import class_numbers
from fewshift.images.inputs import as_labelled
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


# --- arrays


def adapted(images, labels, **more):
    return fewshift.adapt(make_tiny(), (images, labels), method="adabn", validate=None, accept="always", **more)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (lambda x: x[:, ::-1, ::-1].copy()[:, ::-1, ::-1], lambda y: y[::-1].copy()[::-1]),  # strides are negative
        (lambda x: x.astype(">f4"), lambda y: y.astype(">i8")),
        (lambda x: x.astype(np.longdouble), lambda y: y.astype(np.uint64)),
    ],
)
def test_arrays_are_what_their_numbers_are(images, labels):
    support = make_support()
    plain = adapted(support.images, support.labels)
    other = adapted(images(support.images.numpy()), labels(support.labels.numpy()))
    assert other.delta.adapted == plain.delta.adapted
    pixels = images(support.images.numpy())
    plain, other = (
        fewshift.adapt(make_tiny(), None, method="adabn", unlabelled=each, accept="always")
        for each in (support.images, pixels)
    )
    assert other.delta.adapted == plain.delta.adapted


@pytest.mark.parametrize("kind", [object, str])
def test_arrays_of_anything_but_numbers_are_one_sentence(kind):
    support = make_support()
    with pytest.raises(FewshiftError, match="images are not numbers"):
        adapted(support.images.numpy().astype(kind), support.labels)
    with pytest.raises(FewshiftError, match="labels are not numbers"):
        adapted(support.images, np.array(["ant"] * len(support)))


def test_pixels_in_an_array_are_preprocessed_like_the_picture_that_they_are_of():
    generator = np.random.default_rng(0)
    pixels = [generator.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(6)]
    steps = fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
    labels = [0, 1, 2] * 2
    pictures = [Image.fromarray(each) for each in pixels]
    forms = (pixels, pictures, [steps(picture).numpy() for picture in pictures])
    supports = [as_labelled(list(zip(images, labels, strict=True)), steps) for images in forms]
    for other in supports[1:]:
        assert torch.equal(other.images, supports[0].images)


@pytest.mark.parametrize("column", [np.array, torch.tensor])
def test_labels_of_a_list_of_images_may_be_a_column(column):
    support = make_support()
    plain = adapted(support.images, support.labels)
    assert adapted(list(support.images), column(support.labels.tolist())).delta.adapted == plain.delta.adapted


def test_files_with_an_array_of_labels_are_files_with_labels(tmp_path):
    for number in range(3):
        Image.new("RGB", (8, 8), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    files = sorted(tmp_path.glob("*.png"))
    read = as_labelled((files, np.array([2, 0, 1])), fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3))
    assert [read[index][1] for index in range(3)] == [2, 0, 1]


# --- names and numbers of classes


@pytest.mark.parametrize("classes", [{"dog": 1, "cat": 0, "eel": 2}, {"dog": "1", "cat": "0", "eel": "2"}])
def test_a_table_of_numbers_names_the_outputs_by_them(classes):
    support = make_support()
    assert adapted(support.images, support.labels, classes=classes).classes == ("cat", "dog", "eel")


@pytest.mark.parametrize("classes", [{"cat", "dog", "eel"}, {"cat": 1, "dog": 2, "eel": 3}, {"cat": 0, "dog": 0}])
def test_names_without_an_order_are_refused(classes):
    support = make_support()
    with pytest.raises(FewshiftError, match="give a list of names"):
        adapted(support.images, support.labels, classes=classes)


def listed(folder, labels):
    """Files with these labels, as `fewshift evaluate` reads a table of them."""
    for number, label in enumerate(labels):
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
        with (folder / "labels.csv").open("a") as table:
            table.write(f"{number}.png,{label}\n")
    return as_labelled(folder / "labels.csv", fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3))


def test_whole_numbers_with_a_point_are_the_numbers_of_outputs(tmp_path):
    assert [label for _, label in listed(tmp_path, [f"{number}.0" for number in range(11)])] == list(range(11))


def test_a_negative_number_is_no_class(tmp_path):
    with pytest.raises(FewshiftError, match="has the label -1"):
        listed(tmp_path, [-1, 0, 1])


def test_an_accent_may_be_written_behind_its_letter():
    assert class_numbers([normalize("NFD", "caf\u00e9")], ["tea", normalize("NFC", "caf\u00e9")], "the list") == {
        normalize("NFD", "caf\u00e9"): 1
    }


# --- functions


def nothing(logits, labels):
    return None


@pytest.mark.parametrize("method", ["auto", "l2", "lccs"])
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (5, "is no loss"),
        (torch.nn.CrossEntropyLoss, "is no loss"),
        (nothing, "gives None"),
        (torch.nn.CrossEntropyLoss(reduction="none"), "gives a tensor of shape"),
        (lambda logits: logits.sum(), "let it take logits and labels"),
        (lambda logits, labels: F.cross_entropy(logits, labels).detach(), "without gradient"),
    ],
)
def test_what_is_no_loss_is_one_sentence(method, loss, says):
    if method == "auto" and says != "is no loss":
        method = "finetune-bn"  # auto may not ask for it
    with pytest.raises(FewshiftError, match=f"loss=.*{says}"):
        fewshift.adapt(make_tiny(), make_support(), method=method, loss=loss, validate=None)


def test_what_is_no_augmentation_is_one_sentence():
    with pytest.raises(FewshiftError, match="augment=5 is no function"):
        fewshift.adapt(make_tiny(), make_support(), augment=5)


def test_more_classes_than_a_label_of_a_pixel_can_be_are_one_sentence(tmp_path):
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
        Image.new("L" if name == "labels" else "RGB", (16, 16)).save(tmp_path / name / "a.png")
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 300, 1), torch.nn.BatchNorm2d(300))
    with pytest.raises(FewshiftError, match="has 300 classes, and a label of a pixel is a number below 255"):
        fewshift.evaluate(network, tmp_path, preprocess=fewshift.Preprocess(None, None, (0.5,) * 3, (0.5,) * 3))


def test_pictures_are_no_files():
    with pytest.raises(FewshiftError, match="Image is no image file"):
        fewshift.predict(
            make_tiny(), [Image.new("RGB", (8, 8))], preprocess=fewshift.Preprocess(None, 8, (0.5,) * 3, (0.5,) * 3)
        )


def test_a_number_of_draws_is_a_number():
    with pytest.raises(FewshiftError, match="draws=True is no number"):
        fewshift.learning_curve(make_tiny(), make_support(), method="adabn", draws=True)


def test_without_epochs_lp_ft_trains_a_head_alone():
    network = make_tiny()
    result = fewshift.adapt(network, make_support(), method=METHODS["lp-ft"](epochs=0, probe_epochs=2), validate=None)
    changed = {name for name in result.candidate_delta.bits if not name.startswith("fc.")}
    assert not changed

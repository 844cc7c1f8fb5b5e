"""What looks wrong is noticed before a network is adapted, and what is right is left in peace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fewshift
from fewshift import CautionWarning, FewshiftError, Preprocess, Support, draw_support
from fewshift.core.network import Network
from fewshift.core.support import Target
from fewshift.lab.datasets import digits
from fewshift.models.cards import Card, known_card, with_card
from fewshift.report.cautions import plain, sentence
from fewshift.trust import at_home
from fewshift.trust.evidence import Evidence
from fewshift.trust.permuted import find_cycles, find_moves, rings
from fewshift.trust.sanity import Caution, CautionKind, believed, half_way_answers
from fewshift.trust.shift import Shift

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HALF = Preprocess(None, None, (0.5,), (0.5,))


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """Digits of MNIST, and a card that says nothing but the preprocessing."""
    return digits.source_network()


@pytest.fixture(scope="module")
def own() -> tuple[Tensor, Tensor]:
    """Digits of the network's own place that it never saw, in [0, 1]."""
    return digits.split()[1]


@pytest.fixture(scope="module")
def other() -> tuple[Tensor, Tensor]:
    """Digits of the other place, in [0, 1]."""
    return digits.uci()


def support(place: tuple[Tensor, Tensor], shots: int, seed: int = 0, names: tuple[str, ...] | None = None) -> Support:
    images, labels = place
    drawn = draw_support(labels, shots, seed)
    return Support(digits.normalise(images[drawn]), labels[drawn], names)


def relabelled(labelled: Support, new: list[int]) -> Support:
    return Support(labelled.images, torch.tensor(new)[labelled.labels], labelled.classes)


def warnings_of(network: nn.Module, labelled: object, **arguments: object) -> dict[CautionKind, Caution]:
    result = fewshift.adapt(network, labelled, method="adabn", validate=None, **arguments)
    return {caution.kind: caution for caution in result.warnings}


def write(place: tuple[Tensor, Tensor], names: tuple[str, ...], folder: Path) -> None:
    """Two digits of each class, in folders of these names."""
    images, labels = place
    for index in draw_support(labels, 2, 0).tolist():
        path = folder / names[int(labels[index])] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((255 * images[index, 0]).round().byte().numpy()).save(path)


def kept(labelled: Support, keep: Tensor) -> Support:
    return labelled.part(keep.nonzero().flatten())


# labels


@pytest.mark.parametrize("shots", [1, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_clean_support_raises_no_warning(network, other, shots, seed):
    assert warnings_of(network, support(other, shots, seed)) == {}


def test_a_strong_shift_is_not_taken_for_permuted_labels(network, other):
    images, labels = other
    inverted = support((1 - images, labels), 10)
    right = network(inverted.images).argmax(1) == inverted.labels
    assert right.double().mean() < 0.15
    assert warnings_of(network, inverted) == {}


def test_labels_shifted_by_one_class_are_refused_with_the_order_that_fits(network, own):
    shifted = relabelled(support(own, 5, names=NAMES), [1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
    with pytest.raises(FewshiftError, match=r"'one' looks like the network's 'zero'.* 0 of 50 .*--no-check") as error:
        warnings_of(network, shifted)
    assert "--classes one,two,three,four,five,six,seven,eight,nine,zero" in str(error.value)


def test_the_refusal_names_folders_to_rename_where_the_order_is_known(own):
    known = with_card(digits.source_network(), Card(classes=NAMES, preprocess=digits.PREPROCESS))
    with pytest.raises(FewshiftError, match="rename the folders"):
        warnings_of(known, relabelled(support(own, 5), [1, 2, 0, 3, 4, 5, 6, 7, 8, 9]))


def test_without_the_check_permuted_labels_are_a_warning(network, own):
    caution = warnings_of(network, relabelled(support(own, 5), [1, 2, 0, *range(3, 10)]), check=False)[
        CautionKind.PERMUTED
    ]
    assert set(caution.pairs) == {("1", "0"), ("2", "1"), ("0", "2")}


def test_two_swapped_classes_are_a_warning_with_both_counts(network, own):
    labelled = relabelled(support(own, 5, names=NAMES), [0, 1, 7, 3, 4, 5, 6, 2, 8, 9])
    predicted, rows = network(labelled.images).argmax(1), torch.isin(labelled.labels, torch.tensor([2, 7]))
    caution = warnings_of(network, labelled)[CautionKind.SWAPPED]
    assert set(caution.classes) == {"two", "seven"}
    assert caution.images == 10
    assert caution.before == (int((predicted == labelled.labels)[rows].sum()),)
    assert caution.after == (int((predicted == 9 - labelled.labels)[rows].sum()),)  # 2 + 7 = 9
    assert "two and seven look swapped" in sentence(caution)


def test_a_swap_of_classes_that_the_source_does_not_know_is_seen_with_the_statistics_of_the_place(network, other):
    labelled = support(other, 5, seed=1, names=NAMES)
    sevens = labelled.labels == 7
    assert int((network(labelled.images).argmax(1) == 7)[sevens].sum()) == 0
    caution = warnings_of(network, relabelled(labelled, [0, 1, 2, 7, 4, 5, 6, 3, 8, 9]))[CautionKind.SWAPPED]
    assert set(caution.classes) == {"three", "seven"}
    assert caution.half_way
    assert "asked with these images' statistics" in sentence(caution)


def test_labels_shifted_by_one_class_are_refused_where_the_source_has_few_images_right(network, other):
    labelled = support(other, 5, seed=1, names=NAMES)
    assert (network(labelled.images).argmax(1) == labelled.labels).double().mean() < 0.5
    with pytest.raises(FewshiftError, match="With these images' statistics it has"):
        warnings_of(network, relabelled(labelled, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]))


def test_answers_that_no_order_makes_half_right_prove_nothing():
    labels = torch.arange(10).repeat_interleave(5)
    answered = torch.where(labels < 2, 1 - labels, 9)  # two classes look swapped, and all others look like the last
    half_way = 10 * torch.eye(10, dtype=torch.float64)[answered]
    assert find_moves(torch.zeros(50, 10).double(), half_way, labels).cycles == []
    assert [cycle.classes for cycle in find_cycles(half_way, labels)] == [(0, 1)]


def test_a_network_without_statistics_is_asked_as_it_is():
    images, labels = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2] * 2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    assert half_way_answers(Network.of(model, images), Target(Support(images, labels))) is None


def test_one_image_of_each_class_is_too_little_to_call_two_swapped():
    logits = 10 * torch.eye(7, dtype=torch.float64)
    assert find_cycles(logits, torch.tensor([1, 0, 2, 3, 4, 5, 6])) == []


def test_a_label_that_looks_like_a_class_without_images_is_noticed():
    logits = 10 * torch.eye(3, dtype=torch.float64)[[2] * 5 + [1] * 5]
    (cycle,) = find_cycles(logits, torch.tensor([0] * 5 + [1] * 5))
    assert (cycle.classes, cycle.as_labelled, cycle.as_moved, cycle.images) == ((0, 2), 0, 5, 5)


def test_the_rings_of_a_permutation_are_its_cycles():
    assert list(rings([1, 2, 0, 3, 5, 4])) == [(0, 1, 2), (4, 5)]


# classes


def test_uneven_classes_are_counted(network, other):
    many = support(other, 20, names=NAMES)
    order = torch.arange(len(many)) % 20  # of an image within its class
    uneven = kept(many, (many.labels == 3) | (order < 2))
    caution = warnings_of(network, uneven)[CautionKind.UNEVEN]
    assert dict(zip(caution.classes, caution.counts, strict=True)) == dict.fromkeys(NAMES, 2) | {"three": 20}
    assert "20 of three" in sentence(caution)


@pytest.mark.parametrize(("most", "least"), [(6, 2), (30, 6)])
def test_classes_of_about_the_same_size_or_with_enough_images_are_even(network, other, most, least):
    many = support(other, most)
    order = torch.arange(len(many)) % most
    assert CautionKind.UNEVEN not in warnings_of(network, kept(many, (many.labels == 3) | (order < least)))


def test_nothing_is_known_about_a_class_without_images(network, other):
    many = support(other, 5, names=NAMES)
    caution = warnings_of(network, kept(many, many.labels != 5))[CautionKind.UNSEEN]
    assert caution.classes == ("five",)
    assert "nothing is known about five" in sentence(caution)


def test_unlabelled_images_show_how_often_a_class_without_images_is_predicted(network, other):
    many, stream = support(other, 5, names=NAMES), digits.normalise(other[0][:100])
    result = fewshift.adapt(network, kept(many, many.labels != 5), method="adabn", validate=None, unlabelled=stream)
    (caution,) = result.warnings
    with torch.no_grad():
        counts = [int((model.eval()(stream).argmax(1) == 5).sum()) for model in (network, result.candidate)]
    assert (caution.images, [*caution.before, *caution.after]) == (100, counts)
    assert f"five ({counts[0]} before, {counts[1]} after)" in sentence(caution)


def test_a_class_predicted_less_than_half_as_often_may_be_forgotten():
    caution = Caution(CautionKind.UNSEEN, ("ant", "bee", "cat"), images=50, before=(10, 10, 1), after=(4, 5, 0))
    assert caution.forgotten == ("ant",)
    assert "ant may be forgotten" in sentence(caution)


# preprocessing


@pytest.mark.parametrize("assumed", [Preprocess(None, None, (127.0,), (58.0,)), HALF])
def test_a_wrong_preprocessing_is_noticed_and_the_right_one_named(network, other, assumed):
    images, labels = other[0][:50], other[1][:50]
    bare = with_card(digits.source_network(), Card())
    caution = warnings_of(bare, (assumed.normalise(images), labels), preprocess=assumed)[CautionKind.PREPROCESSING]
    best = caution.homes.better[0]
    assert (best.name, best.mean, best.std) == ("MNIST's", (0.1307,), (0.3081,))
    assert "--mean 0.1307 --std 0.3081" in sentence(caution)


def test_labels_name_the_preprocessing_where_the_first_layer_alone_does_not(network, other, monkeypatch):
    monkeypatch.setattr(at_home, "CLOSER", 100)  # no layer is ever that much closer
    images, labels = other[0][:50], other[1][:50]
    bare, steps = with_card(digits.source_network(), Card()), {"preprocess": HALF}
    found = warnings_of(bare, (HALF.normalise(images), labels), **steps)
    assert found[CautionKind.PREPROCESSING].homes.better[0].name == "MNIST's"
    mixed = labels[torch.randperm(50, generator=torch.Generator().manual_seed(0))]
    assert CautionKind.PREPROCESSING not in warnings_of(bare, (HALF.normalise(images), mixed), check=False, **steps)


@pytest.mark.parametrize("scale", [1, 255])
def test_tensors_that_nobody_has_normalised_are_noticed(network, own, scale):
    images, labels = own
    drawn = draw_support(labels, 5, 0)
    caution = warnings_of(network, (scale * images[drawn], labels[drawn]))[CautionKind.PREPROCESSING]
    assert caution.homes.better[0].name == "its card's"


def test_a_crop_larger_than_the_resized_image_is_said(network, other):
    steps = Preprocess(20, 28, (0.1307,), (0.3081,))
    caution = warnings_of(network, support(other, 3), preprocess=steps)[CautionKind.BORDERS]
    assert caution.sizes == (20, 28)


def test_probabilities_taken_for_logits_are_said(network, other):
    cautions = warnings_of(nn.Sequential(network, nn.Softmax(1)), support(other, 3))
    assert CautionKind.PROBABILITIES in cautions


def test_logits_are_not_taken_for_probabilities(network, other):
    log_probabilities = nn.Sequential(network, nn.LogSoftmax(1))
    assert CautionKind.PROBABILITIES not in warnings_of(log_probabilities, support(other, 3))


@pytest.fixture
def delta(network, other):
    return fewshift.adapt(network, support(other, 3), method="adabn", validate=None).delta


@pytest.fixture
def picture(tmp_path, other):
    path = tmp_path / "digit.png"
    Image.fromarray((255 * other[0][0, 0]).byte().numpy()).save(path)
    return path


def test_steps_that_contradict_the_deltas_are_said(network, delta, picture):
    steps = Preprocess(28, 28, (0.5,), (0.3081,))
    with pytest.warns(CautionWarning, match=r"mean \[0.5\].*made with \[0.1307\]"):
        fewshift.predict(network, picture, delta=delta, preprocess=steps)


def test_the_deltas_own_steps_are_no_contradiction(network, delta, picture):
    fewshift.predict(network, picture, delta=delta, preprocess=digits.PREPROCESS)  # warnings are errors in tests


# the card


def test_folders_whose_order_nothing_says_are_noted_and_that_is_not_serious(network, own, tmp_path):
    names = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")
    write(own, names, tmp_path)
    caution = warnings_of(network, tmp_path)[CautionKind.ASSUMED_ORDER]
    assert (caution.classes, caution.serious) == (names, False)
    assert warnings_of(network, tmp_path, classes=names) == {}
    known = with_card(digits.source_network(), Card(classes=names, preprocess=digits.PREPROCESS))
    assert warnings_of(known, tmp_path) == {}


def test_folders_named_like_outputs_leave_nothing_to_assume(network, own, tmp_path):
    write(own, tuple("0123456789"), tmp_path)
    assert warnings_of(network, tmp_path) == {}


def test_classes_in_another_order_than_on_the_card_are_refused(other):
    known = with_card(digits.source_network(), Card(classes=NAMES, preprocess=digits.PREPROCESS))
    with pytest.raises(FewshiftError, match="output 0 is 'zero' there and 'nine' here"):
        warnings_of(known, support(other, 3), classes=NAMES[::-1])


def test_misspelt_keys_of_a_card_are_said(network, other):
    card = Card(preprocess=known_card(network).preprocess, misspelt=(("resise", "resize"),))
    caution = warnings_of(with_card(digits.source_network(), card), support(other, 3))[CautionKind.CARD_KEY]
    assert "'resise' is not known, did you mean 'resize'?" in sentence(caution)


def test_every_kind_of_caution_has_a_sentence_and_survives_json(network, own):
    cautions = warnings_of(network, (own[0][:20], own[1][:20] % 3), classes=NAMES).values()
    assert {caution.kind for caution in cautions} >= {CautionKind.UNSEEN, CautionKind.PREPROCESSING}
    for caution in cautions:
        assert json.loads(json.dumps(plain(caution)))["kind"] == caution.kind.value


def test_a_shift_that_a_wrong_preprocessing_makes_is_no_evidence():
    shift = Shift((), 9.0, 1.5, images=7, total=7)
    evidence = Evidence(None, shift=shift)
    assert believed(evidence, [Caution(CautionKind.PREPROCESSING)]).shift is None
    assert believed(evidence, [Caution(CautionKind.UNEVEN)]).shift is shift

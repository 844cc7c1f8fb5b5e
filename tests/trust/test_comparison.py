"""Comparing methods: the same held-out images for all, paired differences, a choice by a rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor, nn

import fewshift
from fewshift import LCCS, METHODS, Comparison, FewshiftError, Method, Source, Support, Target
from fewshift.core.method import Fitted, Needs
from fewshift.methods.auto import Auto
from fewshift.methods.finetune import L2
from fewshift.trust.comparison import Ranking, Row
from fewshift.trust.evidence import Evidence, Missing
from fewshift.trust.guard import decide
from fewshift.trust.held_out import ImageAnswers, folds_of, log_losses
from tests.helpers.networks import make_support, make_tiny, same_state, scenes, state, street

SUPPORT = make_support(5)
FOUR = ["source", "adabn", L2(epochs=2), Auto(epochs=2)]
LABELS = ["source", "adabn", "l2", "auto"]


@pytest.fixture(scope="module")
def four() -> Comparison:
    return fewshift.compare(make_tiny(), SUPPORT, FOUR, select="best")


# the same images


def test_every_method_is_asked_about_the_same_images_in_the_same_folds(four):
    folds = folds_of(SUPPORT, "cv", 0)
    assert [row.label for row in four.rows] == LABELS
    for row in four.rows:
        held = row.evidence.held
        assert held.images.tolist() == torch.cat(folds).tolist()
        assert held.folds.tolist() == [number for number, fold in enumerate(folds) for _ in fold]
        assert torch.equal(held.labels, SUPPORT.labels[torch.cat(folds)])


@pytest.mark.parametrize("index", range(1, 4))
def test_a_row_says_of_a_method_what_adapt_says(four, index):
    assert four.rows[index].gain == fewshift.adapt(make_tiny(), SUPPORT, method=FOUR[index]).gain


def by_hand(model: nn.Module, support: Support, method: Method, seed: int) -> dict[int, list[bool]]:
    """Which answers to an image are right, when it is held out with its fold."""
    right: dict[int, list[bool]] = {}
    folds = folds_of(support, "cv", seed)
    for fold, (kept, held) in zip(folds, support.splits(folds), strict=True):
        adapted = method.adapt(model, Target(kept), seed)
        for image, answer, label in zip(fold.tolist(), adapted(held.images).argmax(1), held.labels, strict=True):
            right.setdefault(image, []).append(bool(answer == label))
    return right


@pytest.mark.parametrize("shots", [2, 5])
def test_a_difference_is_paired_by_image(shots):
    support, methods = make_support(shots), [L2(epochs=2), METHODS["adabn"]()]
    gain = fewshift.compare(make_tiny(), support, methods, seed=3).difference("l2", "adabn")
    one, other = (by_hand(make_tiny(), support, method, 3) for method in methods)
    changes = [sum(one[image]) / len(one[image]) - sum(other[image]) / len(other[image]) for image in one]
    pairs = [pair for image in one for pair in zip(one[image], other[image], strict=True)]
    n = len(changes) + 2
    mean = sum(changes) / n
    half = stats.norm.ppf(0.95) * math.sqrt(((sum(change**2 for change in changes) + 0.5) / n - mean**2) / n)
    assert gain.point == pytest.approx(100 * sum(changes) / len(changes))
    assert (gain.low, gain.high) == pytest.approx((100 * (mean - half), 100 * (mean + half)), abs=1e-4)
    assert (gain.wins, gain.losses) == (pairs.count((True, False)), pairs.count((False, True)))


def test_the_other_way_round_a_difference_changes_its_sign(four):
    for one, row in four.differences.items():
        assert set(row) == set(LABELS) - {one}
        for other, gain in row.items():
            back = four.differences[other][one]
            assert gain.point == pytest.approx(-back.point)
            assert (gain.low, gain.wins) == (pytest.approx(-back.high), back.losses)


def test_the_difference_to_the_source_is_the_gain(four):
    for row in four.rows[1:]:
        difference, gain = four.difference(row.label, "source"), row.gain
        losses = {name: getattr(gain, name) for name in ("loss_change", "loss_error")}
        assert replace(difference, **losses) == gain
        assert {name: getattr(difference, name) for name in losses} == pytest.approx(losses)  # added in another order


def test_the_source_is_there_to_be_compared_with_though_it_was_not_named():
    comparison = fewshift.compare(make_tiny(), SUPPORT, ["adabn"])
    assert [row.label for row in comparison.rows] == ["adabn"]
    assert comparison.difference("adabn", "source") == comparison.rows[0].gain


def test_one_left_out_at_a_time_is_asked_about_once():
    comparison = fewshift.compare(make_tiny(), make_support(2), ["source", "adabn"], validate="loo")
    assert [row.gain.predictions for row in comparison.rows] == [6, 6]


def test_pixels_are_compared_by_the_share_that_is_right():
    model, support, methods = street(), scenes(4), [L2(epochs=1), METHODS["adabn"]()]
    comparison = fewshift.compare(model, support, methods, select="best", seed=2)
    folds = folds_of(support, "cv", 2)
    shares: list[list[float]] = []
    losses: list[list[float]] = []
    for kept, held in support.splits(folds):
        answers = [method.adapt(model, Target(kept), 2)(held.images)["out"].detach() for method in methods]
        for index, label in enumerate(held.labels):
            known = label != 255
            pixels = [answer[index][:, known].T for answer in answers]
            shares.append([float((rows.argmax(1) == label[known]).double().mean()) for rows in pixels])
            losses.append([float(F.cross_entropy(rows, label[known])) for rows in pixels])
    one, other = torch.tensor(shares).double().mean(0).tolist()
    difference = comparison.difference("l2", "adabn")
    assert (difference.point, difference.images) == (pytest.approx(100 * (one - other)), 4)
    assert [row.accuracy for row in comparison.rows] == pytest.approx([100 * one, 100 * other])
    expected = torch.tensor(losses).double()
    assert [row.cross_entropy for row in comparison.rows] == pytest.approx(expected.mean(0).tolist(), rel=1e-5)
    # each image is answered by what has the least loss on the images of the other folds
    numbers = torch.cat([torch.full((len(fold),), number) for number, fold in enumerate(folds)])
    honest = [shares[row][int(expected[numbers != numbers[row]].mean(0).argmin())] for row in range(4)]
    assert comparison.selected_gain.after == pytest.approx(100 * sum(honest) / 4)


# what is fitted


@dataclass(frozen=True)
class Recording(Method):
    """The source network, and a note of how many images it was fitted to."""

    name: ClassVar[str] = "recording"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "nothing"
    sizes: ClassVar[list[int]] = []

    def fit(self, network, target, seed=0) -> Fitted:
        self.sizes.append(len(target.support))
        return Source().fit(network, target, seed)


def test_nothing_is_fitted_to_the_whole_support_without_need():
    Recording.sizes.clear()
    fewshift.compare(make_tiny(), SUPPORT, [Recording()])
    assert Recording.sizes == [9, 9, 12]


def test_labelled_images_are_asked_about_after_one_fit_to_the_whole_support():
    Recording.sizes.clear()
    model, others, method = make_tiny(), make_support(20, seed=9), L2(epochs=2)
    comparison = fewshift.compare(model, SUPPORT, [Recording(), method], validate=others)
    assert Recording.sizes == [15]
    one, other = (
        (net(others.images).argmax(1) == others.labels).double()
        for net in (method.adapt(model, Target(SUPPORT)), model)
    )
    assert comparison.difference("l2", "recording").point == pytest.approx(100 * float((one - other).mean()))


def test_labelled_images_can_judge_what_needs_no_labels():
    others = make_support(20, seed=9)
    comparison = fewshift.compare(make_tiny(), None, ["source", "adabn"], unlabelled=SUPPORT.images, validate=others)
    assert comparison.rows[1].gain.images == 60


def test_the_given_network_is_unchanged_and_the_same_seed_gives_the_same_comparison(four):
    model = make_tiny()
    before = state(model)
    again = fewshift.compare(model, SUPPORT, FOUR, select="best")
    assert same_state(state(model), before)
    assert again.differences == four.differences
    assert again.selected_gain == four.selected_gain


def test_progress_names_the_methods():
    heard: list[tuple[str, int, int]] = []
    fewshift.compare(make_tiny(), SUPPORT, ["adabn"], progress=lambda *words: heard.append(words))
    assert ("adabn: cross-validation", 3, 3) in heard
    assert ("methods", 1, 1) in heard


# names


def test_a_method_with_several_settings_is_named_by_what_differs():
    methods = [Auto(epochs=1), Auto(epochs=2, lr=0.01), METHODS["adabn"]]
    comparison = fewshift.compare(make_tiny(), make_support(1), methods)
    default = Auto().lr
    labels = [row.label for row in comparison.rows]
    assert labels == [f"auto (epochs=1, lr={default})", "auto (epochs=2, lr=0.01)", "adabn"]
    assert [type(row.method) for row in comparison.rows] == [Auto, Auto, METHODS["adabn"]]


# failures


def test_what_cannot_do_without_a_class_has_a_reason_and_the_others_go_on():
    comparison = fewshift.compare(make_tiny(), make_support(1), ["flute", "adabn"])
    flute, adabn = comparison.rows
    assert (flute.gain, flute.accuracy, flute.cross_entropy) == (None, None, None)
    assert flute.evidence.missing is Missing.NEEDS_ALL
    assert "flute" in comparison.failures["flute"]
    assert adabn.gain is not None
    assert comparison.weak
    assert list(comparison.differences) == ["adabn"]
    with pytest.raises(FewshiftError, match="flute has no numbers"):
        comparison.difference("adabn", "flute")


def test_what_cannot_do_with_all_images_either_says_so():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()
    comparison = fewshift.compare(model, SUPPORT, ["adabn", "auto"], select="clear")
    for row in comparison.rows:
        assert row.evidence.missing is None
        assert "BatchNorm" in comparison.failures[row.label]
    assert (comparison.judged, comparison.selected, comparison.selected_gain) == ((), "source", None)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"methods": ["source", "tent"]}, "tent .* stream of batches .*leave it out"),
        ({"methods": ["nonsense"]}, "'nonsense': choose one of auto, blend, "),
        ({"methods": "lccs"}, "'lccs' is no list: give a list"),
        ({"methods": []}, "nothing to compare: name at least one"),
        ({"methods": ["lccs", LCCS()]}, "lccs .*twice"),
        ({"methods": ["shot"]}, "shot needs unlabelled"),
        ({"select": "luck"}, "select='luck' .*'best', 'clear' or None"),
        ({"validate": None}, "'cv' or 'loo'"),
        ({"validate": "nowhere"}, "'nowhere' is no folder"),
        ({"validate": SUPPORT}, "15 of the 15 support images are also among the 15 evaluation images"),
        ({"support": None}, "by labels: pass a support set"),
        ({"seed": -1}, "seed=-1 is no seed"),
        ({"support": Support(SUPPORT.images, SUPPORT.labels + 1)}, "label 3 .* out of range"),
        ({"validate": Support(make_support(2, seed=9).images, torch.arange(6) % 3 + 1)}, "label 3 .* out of range"),
        ({"model": street(), "support": scenes(1)}, "a single image leaves nothing to hold out: label another"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, facts):
    with pytest.raises(FewshiftError, match=facts):
        fewshift.compare(**{"model": make_tiny(), "support": SUPPORT, "methods": ["adabn"]} | arguments)


def test_what_was_not_compared_has_no_difference(four):
    with pytest.raises(FewshiftError, match="'flute' was not compared: choose one of source, adabn, l2, auto"):
        four.difference("auto", "flute")


# choice


def ranking(labels: Tensor, select: str | None = None, folds: int = 5, **logits: Tensor) -> Ranking:
    """Answers that are made up; images are cut into folds."""
    images = torch.arange(len(labels))
    rows = {}
    for name, answers in logits.items():
        held = ImageAnswers(images, images % folds, labels, logits["source"].double(), answers.double())
        rows[name] = Row(name, Source(), Evidence(held.gain(), held), 0.0)
    return Ranking(tuple(rows.values()), rows["source"], select)


def chances(count: int, images: int = 40, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Methods that guess."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    names = ["source", *(f"m{number}" for number in range(count - 1))]
    return labels, {name: torch.randn(images, 3, generator=generator) for name in names}


def test_rows_are_ranked_by_accuracy_and_equals_by_cross_entropy():
    labels, logits = chances(1)
    right = 2.0 * F.one_hot(labels, 3)
    # as often right as the other, and as sure where it is wrong
    first, second = (right.clone(), right.clone())
    first[0], second[0] = torch.tensor([0.0, 2.0, 0.0]), torch.tensor([1.9, 2.0, 0.0])
    ranked = ranking(labels, **logits, first=first, second=second, perfect=right).ranked
    assert [row.label for row in ranked] == ["perfect", "second", "first", "source"]


def test_the_best_has_the_least_cross_entropy(four):
    losses = {
        row.label: float(log_losses(row.evidence.held.adapted, row.evidence.held.labels).mean()) for row in four.rows
    }
    assert four.selected == min(losses, key=losses.get)


def test_of_equals_the_first_named_is_taken():
    labels, logits = chances(1)
    right = 2.0 * F.one_hot(labels, 3)
    assert ranking(labels, "best", **logits, first=right, second=right.clone()).selected == "first"


@pytest.mark.parametrize("select", ["best", "clear"])
def test_what_selecting_is_worth_is_measured_on_images_that_did_not_select(select):
    labels, logits = chances(6, seed=2)
    logits["m4"] = logits["m4"] + F.one_hot(labels, 3) * 0.6
    selected = ranking(labels, select, **logits)
    answers = labels.clone()
    for fold in range(5):
        mine = torch.arange(len(labels)) % 5 == fold
        losses = {name: float(log_losses(rows[~mine], labels[~mine]).mean()) for name, rows in logits.items()}
        best = min(losses, key=losses.get)
        if select == "clear":
            images = torch.arange(len(labels))[~mine]
            others = ImageAnswers(images, images % 5, labels[~mine], logits["source"][~mine], logits[best][~mine])
            best = best if decide("not-worse", Evidence(others.gain(), others)).accepted else "source"
        answers[mine] = logits[best][mine].argmax(1)
    assert selected.selected_gain.after == pytest.approx(100 * balanced_accuracy_score(labels, answers))
    assert selected.selected_gain.before == pytest.approx(selected.source.accuracy)


def test_the_winner_of_a_lottery_gains_and_selecting_it_does_not():
    labels, logits = chances(30)
    lottery = ranking(labels, "best", **logits)
    winner = next(row for row in lottery.rows if row.label == lottery.selected)
    assert winner.gain.point > 10
    assert lottery.selected_gain.point < winner.gain.point - 10


def test_a_gain_that_is_not_clear_leaves_the_source():
    labels, logits = chances(1)
    slight = logits["source"] + F.one_hot(labels, 3) * 0.05
    clear = logits["source"] + F.one_hot(labels, 3) * 9.0
    assert ranking(labels, "best", **logits, other=slight).selected == "other"
    assert ranking(labels, "clear", **logits, other=slight).selected == "source"
    assert ranking(labels, "clear", **logits, other=clear).selected == "other"


def test_selecting_by_labelled_images_in_one_fold_has_an_honest_gain_too():
    labels, logits = chances(4)
    together, apart = (ranking(labels, "best", folds=folds, **logits) for folds in (1, 3))
    one, three = together.selected_gain, apart.selected_gain  # their intervals differ: three folds are three networks
    assert (one.point, one.wins, one.losses, one.nats) == (three.point, three.wins, three.losses, three.nats)


def test_without_a_rule_nothing_is_selected(four):
    plain = replace(four, select=None)
    assert (plain.selected, plain.rule, plain.selected_gain) == (None, None, None)

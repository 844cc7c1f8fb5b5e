"""Comparing methods: the same held-out images for all, paired differences, a choice by a rule, a page and a command."""
# ruff: noqa: F811 - fixtures are imported, and then are arguments

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fewshift
from fewshift import LCCS, METHODS, Comparison, FewshiftError, Method, Source, Support, Target
from fewshift.core.method import Fitted, Needs
from fewshift.methods.finetune import L2
from fewshift.trust.comparison import Row
from fewshift.trust.gain import HeldOut, folds_of, gain_of, log_losses
from fewshift.trust.guard import Evidence
from tests.cli.test_commands import network_options, place, run, small_network  # noqa: F401
from tests.core.test_pixels import scenes, street
from tests.helpers.networks import make_support, make_tiny, same_state, state
from tests.helpers.pages import Page

SUPPORT = make_support(5)
FAST = LCCS(classifier="evidence", grid=3, epochs=2)
FOUR = ["source", "adabn", L2(epochs=2), FAST]
Z = 1.6448536  # of a normal interval with 90 %


@pytest.fixture(scope="module")
def four() -> Comparison:
    return fewshift.compare(make_tiny(), SUPPORT, FOUR, select="best")


# the same images


def test_every_method_is_asked_about_the_same_images_in_the_same_folds(four):
    folds = folds_of(SUPPORT, "cv", 0)
    for row in four.rows:
        assert row.evidence.held.images.tolist() == torch.cat(folds).tolist()
        assert row.evidence.held.folds.tolist() == [number for number, fold in enumerate(folds) for _ in fold]
        assert torch.equal(row.evidence.held.labels, SUPPORT.labels[torch.cat(folds)])


def test_rows_are_in_the_order_given(four):
    assert [row.label for row in four.rows] == ["source", "adabn", "l2", "lccs"]


@pytest.mark.parametrize("index", range(1, 4))
def test_a_row_says_of_a_method_what_adapt_says(four, index):
    assert four.rows[index].gain == fewshift.adapt(make_tiny(), SUPPORT, method=FOUR[index]).gain


def by_hand(model: nn.Module, support: Support, method: Method, seed: int) -> dict[int, list[bool]]:
    """Which answers to an image are right, when it is held out with its fold."""
    right: dict[int, list[bool]] = {}
    folds = folds_of(support, "cv", seed)
    for fold, (kept, out) in zip(folds, support.splits(folds), strict=True):
        adapted = method.adapt(model, Target(kept), seed)
        for image, answer, label in zip(fold.tolist(), adapted(out.images).argmax(1), out.labels, strict=True):
            right.setdefault(image, []).append(bool(answer == label))
    return right


@pytest.mark.parametrize("shots", [2, 5])
def test_a_difference_is_paired_by_image(shots):
    support, methods = make_support(shots), [L2(epochs=2), METHODS["adabn"]()]
    found = fewshift.compare(make_tiny(), support, methods, seed=3)
    one, other = (by_hand(make_tiny(), support, it, 3) for it in methods)
    changes = [sum(one[it]) / len(one[it]) - sum(other[it]) / len(other[it]) for it in one]
    pairs = [pair for it in one for pair in zip(one[it], other[it], strict=True)]
    n = len(changes) + 2
    mean = sum(changes) / n
    half = Z * math.sqrt(((sum(it**2 for it in changes) + 1) / n - mean**2) / n)

    gain = found.difference("l2", "adabn")
    assert gain.point == pytest.approx(100 * sum(changes) / len(changes))
    assert (gain.low, gain.high) == pytest.approx((100 * (mean - half), 100 * (mean + half)), abs=1e-4)
    assert (gain.wins, gain.losses) == (pairs.count((True, False)), pairs.count((False, True)))


def test_the_other_way_round_a_difference_changes_its_sign(four):
    for one, row in four.differences.items():
        assert set(row) == {"source", "adabn", "l2", "lccs"} - {one}
        for other, gain in row.items():
            back = four.differences[other][one]
            assert gain.point == pytest.approx(-back.point)
            assert (gain.low, gain.wins) == (pytest.approx(-back.high), back.losses)


def test_the_difference_to_the_source_is_the_gain(four):
    for row in four.rows[1:]:
        gain = four.difference(row.label, "source")
        # LCCS asks the source network in another memory layout
        assert gain.loss_change == pytest.approx(row.gain.loss_change, abs=1e-4)
        assert replace(row.gain, loss_change=gain.loss_change, loss_error=gain.loss_error) == gain


def test_the_source_is_there_to_be_compared_with_though_it_was_not_named():
    found = fewshift.compare(make_tiny(), SUPPORT, ["adabn"])
    assert [row.label for row in found.rows] == ["adabn"]
    assert found.difference("adabn", "source") == found.rows[0].gain


def test_one_left_out_at_a_time_is_asked_about_once():
    found = fewshift.compare(make_tiny(), make_support(2), ["source", "adabn", "lccs"], validate="loo")
    assert [row.gain.predictions for row in found.rows] == [6, 6, 6]
    assert found.rows[2].method == LCCS()  # as in adapt


def test_pixels_are_compared_by_the_share_that_is_right(tmp_path):
    model, support, methods = street(), scenes(4), [L2(epochs=1), METHODS["adabn"]()]
    found = fewshift.compare(model, support, methods, select="best", seed=2)
    folds = folds_of(support, "cv", 2)
    shares: list[list[float]] = []
    losses: list[list[float]] = []
    for kept, out in support.splits(folds):
        answers = [it.adapt(model, Target(kept), 2)(out.images)["out"].detach() for it in methods]
        for index, label in enumerate(out.labels):
            known = label != 255
            shares.append([float((it[index].argmax(0) == label)[known].double().mean()) for it in answers])
            losses.append([float(F.cross_entropy(it[index][:, known].T, label[known])) for it in answers])
    one, other = torch.tensor(shares).double().mean(0).tolist()
    assert found.difference("l2", "adabn").point == pytest.approx(100 * (one - other))
    assert found.difference("l2", "adabn").images == 4
    assert [row.accuracy for row in found.rows] == pytest.approx([100 * one, 100 * other])
    expected = torch.tensor(losses).double()
    assert [row.cross_entropy for row in found.rows] == pytest.approx(expected.mean(0).tolist(), rel=1e-5)

    # each image is answered by what has the least loss on the images of the other folds
    numbers = torch.cat([torch.full((len(fold),), number) for number, fold in enumerate(folds)])
    honest = [shares[it][int(expected[numbers != numbers[it]].mean(0).argmin())] for it in range(4)]
    assert found.selected_gain.after == pytest.approx(100 * sum(honest) / 4)
    assert "% of the pixels of 4 held-out images right" in found.words
    page = Page(found.report(tmp_path / "page.html"))
    assert "an image counts by the share of its pixels that is right" in page.words
    assert "temperature" not in page.words


# what is fitted


@dataclass(frozen=True)
class Recording(Method):
    """The source network, and a note of how many images it was fitted to."""

    name: ClassVar[str] = "recording"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "nothing"
    fits: ClassVar[list[int]] = []

    def fit(self, network, target, seed=0) -> Fitted:
        self.fits.append(len(target.support))
        return Source().fit(network, target, seed)


def test_nothing_is_fitted_to_the_whole_support_that_needs_not_be(monkeypatch):
    fits: list[tuple[str, int]] = []
    plain = LCCS.fit
    monkeypatch.setattr(LCCS, "fit", lambda self, network, target, seed=0: (
        fits.append((self.classifier, len(target.support))), plain(self, network, target, seed))[1])  # fmt: skip
    Recording.fits.clear()
    fewshift.compare(make_tiny(), SUPPORT, [Recording(), FAST])
    assert Recording.fits == [12] * 5
    assert fits == [("evidence", 15)]


def test_labelled_images_are_asked_about_after_one_fit_to_the_whole_support():
    Recording.fits.clear()
    model, others = make_tiny(), make_support(20, seed=9)
    method = L2(epochs=2)
    found = fewshift.compare(model, SUPPORT, [Recording(), method], validate=others)
    assert Recording.fits == [15]
    one, other = ((it(others.images).argmax(1) == others.labels).double()
                  for it in (method.adapt(model, Target(SUPPORT)), model))  # fmt: skip
    assert found.difference("l2", "recording").point == pytest.approx(100 * float((one - other).mean()))
    assert "60 labelled images" in found.words


def test_labelled_images_can_judge_what_needs_no_labels():
    others = make_support(20, seed=9)
    found = fewshift.compare(make_tiny(), None, ["source", "adabn"], unlabelled=SUPPORT.images, validate=others)
    assert found.rows[1].gain.images == 60


def test_a_support_image_among_the_labelled_images_is_a_leak():
    with pytest.raises(FewshiftError, match="15 of the 15 support images are also among the 15 evaluation images"):
        fewshift.compare(make_tiny(), SUPPORT, ["adabn"], validate=SUPPORT)


def test_the_given_network_is_unchanged_and_the_same_seed_gives_the_same_comparison(four):
    model = make_tiny()
    before = state(model)
    again = fewshift.compare(model, SUPPORT, FOUR, select="best")
    assert same_state(state(model), before)
    assert again.differences == four.differences
    assert again.selected_gain == four.selected_gain


def test_progress_names_the_methods():
    told: list[tuple[str, int, int]] = []
    fewshift.compare(make_tiny(), SUPPORT, ["adabn"], progress=lambda *it: told.append(it))
    assert ("adabn: cross-validation", 5, 5) in told
    assert ("methods", 1, 1) in told


# names


def test_a_method_with_several_settings_is_named_by_what_differs():
    methods = [L2(epochs=1), L2(epochs=2, lr=0.01), "adabn"]
    found = fewshift.compare(make_tiny(), SUPPORT, methods)
    default = L2().lr
    assert [row.label for row in found.rows] == [f"l2 (epochs=1, lr={default})", "l2 (epochs=2, lr=0.01)", "adabn"]


def test_a_name_a_type_and_a_method_are_all_methods():
    found = fewshift.compare(make_tiny(), SUPPORT, ["source", METHODS["adabn"], L2(epochs=1)])
    assert [type(row.method) for row in found.rows] == [Source, METHODS["adabn"], L2]


def test_the_name_alone_chooses_by_evidence():
    assert fewshift.compare(make_tiny(), SUPPORT, ["lccs"]).rows[0].method == LCCS(classifier="evidence")


# failures


def test_what_cannot_do_without_a_class_has_a_reason_and_the_others_go_on():
    found = fewshift.compare(make_tiny(), make_support(1), ["flute", "adabn"])
    flute, adabn = found.rows
    assert (flute.gain, flute.accuracy, flute.cross_entropy) == (None, None, None)
    assert "flute cannot do without the images that were held out" in flute.reason
    assert adabn.gain is not None
    assert list(found.differences) == ["adabn"]
    assert "(classes have a single image" in found.words
    with pytest.raises(FewshiftError, match="flute has no numbers"):
        found.difference("adabn", "flute")


def test_what_cannot_do_with_all_images_either_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()
    found = fewshift.compare(model, SUPPORT, ["adabn", "lccs"], select="clear")
    assert all("BatchNorm" in row.reason and "held out" not in row.reason for row in found.rows)
    assert found.words.startswith("no method could be judged: adabn: ")
    assert (found.picture(), found.selected, found.selected_gain) == ("", "source", None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"methods": ["source", "tent"]}, "tent adapts to a stream of batches while it predicts, .*: leave it out"),
        ({"methods": ["testtime-bn"]}, "testtime-bn adapts to a stream"),
        ({"methods": ["nonsense"]}, "there is no method 'nonsense': choose one of source, "),
        ({"methods": "lccs"}, "methods='lccs' is one word: give a list of names"),
        ({"methods": []}, "there is nothing to compare: name at least one method"),
        ({"methods": ["lccs", LCCS(classifier="evidence")]}, "lccs is named twice with the same settings"),
        ({"methods": ["shot"]}, "shot needs unlabelled target images"),
        ({"select": "luck"}, "select='luck' is no rule: choose 'best', 'clear' or None"),
        ({"validate": None}, "validate=None is neither a way nor a folder: choose 'cv' or 'loo'"),
        ({"validate": "nowhere"}, "validate='nowhere' is neither a way nor a folder"),
        ({"support": None}, "methods are compared by labels: pass a support set"),
        ({"seed": -1}, "seed=-1 is no seed"),
        ({"support": Support(SUPPORT.images, SUPPORT.labels + 1)}, "label 3 .* is out of range"),
        ({"validate": Support(make_support(2, seed=9).images, torch.arange(6) % 3 + 1)}, "label 3 .* is out of range"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.compare(**{"model": make_tiny(), "support": SUPPORT, "methods": ["adabn"]} | arguments)


def test_a_single_scene_leaves_nothing_to_hold_out():
    with pytest.raises(FewshiftError, match="a single image leaves nothing to hold out: label another"):
        fewshift.compare(street(), scenes(1), ["adabn"])


def test_what_was_not_compared_has_no_difference(four):
    with pytest.raises(FewshiftError, match="'flute' was not compared: choose one of source, adabn, l2, lccs"):
        four.difference("lccs", "flute")


# choice


def made(labels: torch.Tensor, select: str | None = None, **logits: torch.Tensor) -> Comparison:
    """A comparison of answers that are given; images are cut into five folds."""
    images = torch.arange(len(labels))
    logits = {name: it.double() for name, it in logits.items()}
    rows = {}
    for name, answers in logits.items():
        held = HeldOut(labels, images, images % 5, logits["source"], answers)
        rows[name] = Row(name, Source(), Evidence(gain_of(held), held), 0.0)
    return Comparison(tuple(rows.values()), rows["source"], select, "cv", "Tiny", None, 0, 0.0)


def chances(count: int, images: int = 40, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Methods that guess."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    names = ["source", *(f"m{number}" for number in range(count - 1))]
    return labels, {name: torch.randn(images, 3, generator=generator) for name in names}


def test_the_best_has_the_least_cross_entropy(four):
    losses = {it.label: float(log_losses(it.evidence.held.adapted, it.evidence.held.labels).mean()) for it in four.rows}
    assert four.selected == min(losses, key=losses.get)
    assert "least cross-entropy on held-out images, each under its best temperature" in four.rule


def test_of_equals_the_earlier_is_taken():
    labels, logits = chances(2)
    logits |= {"twin": logits["m0"].clone()}
    assert made(labels, "best", **logits).selected in ("source", "m0")
    right = F.one_hot(labels, 3) * 2.0
    assert made(labels, "best", source=logits["source"], first=right, second=right.clone()).selected == "first"


@pytest.mark.parametrize("select", ["best", "clear"])
def test_what_selecting_is_worth_is_measured_on_images_that_did_not_select(select):
    labels, logits = chances(6, seed=2)
    logits["m4"] = logits["m4"] + F.one_hot(labels, 3) * 0.6
    found = made(labels, select, **logits)
    right = []
    for fold in range(5):
        mine = torch.arange(len(labels)) % 5 == fold
        losses = {name: float(log_losses(it[~mine], labels[~mine]).mean()) for name, it in logits.items()}
        best = min(losses, key=losses.get)
        if select == "clear":
            gain = made(labels[~mine], source=logits["source"][~mine], it=logits[best][~mine]).rows[1].gain
            best = best if gain.low > 0 else "source"
        right += (logits[best][mine].argmax(1) == labels[mine]).tolist()
    assert found.selected_gain.after == pytest.approx(100 * sum(right) / len(right))
    assert found.selected_gain.before == pytest.approx(found.source.accuracy)


def test_the_winner_of_a_lottery_gains_and_selecting_it_does_not():
    labels, logits = chances(30)
    found = made(labels, "best", **logits)
    winner = next(row for row in found.rows if row.label == found.selected)
    assert winner.gain.point > 10
    assert found.selected_gain.point < winner.gain.point - 10


def test_a_gain_that_is_not_clear_leaves_the_source():
    labels, logits = chances(2)
    slight = logits["source"] + F.one_hot(labels, 3) * 0.05
    clear = logits["source"] + F.one_hot(labels, 3) * 9.0
    assert made(labels, "best", source=logits["source"], other=slight).selected == "other"
    assert made(labels, "clear", source=logits["source"], other=slight).selected == "source"
    assert made(labels, "clear", source=logits["source"], other=clear).selected == "other"


def test_selecting_by_labelled_images_has_an_honest_gain_too():
    labels, logits = chances(4)
    found = made(labels, "best", **logits)
    together = [
        replace(row, evidence=replace(row.evidence, held=replace(row.evidence.held, folds=labels * 0)))
        for row in found.rows
    ]
    whole = replace(found, rows=tuple(together), source=together[0], validate="labelled images")
    assert whole.selected_gain == found.selected_gain


def test_without_a_rule_nothing_is_selected(four):
    plain = replace(four, select=None)
    assert (plain.selected, plain.rule, plain.selected_gain) == (None, None, None)


# words and pictures


def answered(labels: torch.Tensor, right: int) -> torch.Tensor:
    """The first ones right, the others wrong."""
    wanted = torch.where(torch.arange(len(labels)) < right, labels, (labels + 1) % 3)
    return F.one_hot(wanted, 3) * 5.0


def test_the_sentence_tells_who_leads_and_how_clearly():
    labels = torch.arange(40) % 3
    found = made(labels, source=answered(labels, 10), good=answered(labels, 31), better=answered(labels, 32))
    assert found.words.startswith("better leads with 80.0 % of 40 held-out images right: clearly ahead of the source (")
    assert "; not clearly ahead of good, the next (+2.5 points, 90 % interval -" in found.words
    alone = made(labels, source=answered(labels, 20), good=answered(labels, 10))
    assert alone.words.startswith(
        "source leads with 50.0 % of 40 held-out images right: clearly ahead of good, the next"
    )
    two = made(labels, source=answered(labels, 20), good=answered(labels, 21))
    assert "right: not clearly ahead of the source, the next (+2.5 points" in two.words
    hidden = replace(alone, rows=alone.rows[1:])
    assert "good leads with 25.0 % of 40 held-out images right: behind the source (-25.0 points" in hidden.words


def test_the_table_has_a_row_for_each_method(four):
    table = four.table()
    assert [row["method"] for row in table] == ["source", "adabn", "l2", "lccs"]
    assert table[0]["gain"] == "-"
    gain = four.rows[2].gain
    assert table[2]["right, %"] == f"{gain.after:.1f}"
    assert table[2]["90 % interval"] == f"{gain.low:+.1f} to {gain.high:+.1f}"
    assert (table[2]["became right"], table[2]["became wrong"]) == (str(gain.wins), str(gain.losses))


def test_the_picture_says_what_it_shows(four):
    svg = four.picture()
    assert svg.startswith('<svg role="img" aria-label="Gain over the source network')
    for row in four.rows[1:]:
        assert f"{row.label}: {row.gain.point:+.1f}, 90 % interval {row.gain.low:+.1f}" in svg
    assert [name for name in ("source", "adabn", "l2", "lccs") if f">{name}</text>" in svg] == list(four.differences)


def test_the_page_has_table_picture_and_every_difference(four, tmp_path):
    evil = Row("flute", METHODS["flute"](), Evidence(None, words="<b>never</b> seen"), 0.0)
    page = Page(replace(four, rows=(*four.rows, evil)).report(tmp_path / "page.html"))
    assert page.mismatched == page.open == []
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe"}
    assert len(page.all("svg")) == len(page.all("figcaption")) == 1
    assert len(page.all("table")) == 3
    assert "flute has no numbers: <b>never</b> seen" in page.words
    assert four.words in page.words
    assert four.rule in page.words
    assert four.selected_gain.words in page.words
    for row in four.differences.values():
        for gain in row.values():
            assert f"{gain.point:+.1f} {gain.low:+.1f} to {gain.high:+.1f} {gain.wins} : {gain.losses}" in page.words


def test_json_is_json_and_has_the_numbers(four):
    facts = json.loads(json.dumps(four.to_json(), allow_nan=False))
    assert [row["label"] for row in facts["rows"]] == ["source", "adabn", "l2", "lccs"]
    assert facts["rows"][2]["settings"] == L2(epochs=2).settings()
    assert facts["differences"]["l2"]["adabn"]["wins"] == four.difference("l2", "adabn").wins
    assert (facts["selected"], facts["words"]) == (four.selected, four.words)


# the command


def options(place, *words: object) -> list[object]:
    return ["compare", *network_options(place), "--support", place / "photos", *words]


def test_the_command_prints_the_table_and_then_the_sentence(run, place):
    page = place / "page.html"
    done = run(*options(place, "--methods", "source, adabn,finetune-head", "--select", "clear", "--report", page))
    assert done.code == 0, done.stderr
    steps = fewshift.Preprocess(None, 16, (0.5,) * 3, (0.25,) * 3)
    methods = ["source", "adabn", "finetune-head"]
    expected = fewshift.compare(small_network(), place / "photos", methods, preprocess=steps, select="clear")
    lines = done.stdout.splitlines()
    cells = [line.split() for line in lines]
    for row in expected.table():
        words = [word for cell in list(row.values())[:-1] for word in cell.split()]  # all but the seconds
        assert words in [line[: len(words)] for line in cells]
    assert lines[-5] == expected.words
    assert lines[-4] == f"rule: {expected.rule}"
    assert lines[-3] == f"selected: {expected.selected}"
    assert lines[-2].endswith(expected.selected_gain.words)
    assert lines[-1].startswith(f"report: {page}")
    assert "<html" in page.read_text()


def test_the_command_has_the_functions_json(run, place):
    done = run(*options(place, "--methods", "adabn", "--shots", 3, "--json"))
    assert done.code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["rows"][0]["gain"]["images"] == 9
    assert (facts["select"], facts["report"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--methods", "adabn,nonsense"], "error: there is no method 'nonsense': choose one of "),
        (["--methods", "tent"], "error: tent adapts to a stream of batches"),
        (["--methods", ","], "error: there is nothing to compare: name at least one method"),
        (["--select", "luck"], "error: select='luck' is no rule"),
        (["--validate", "none"], "error: validate='none' is neither a way nor a folder: choose 'cv' or 'loo'"),
        (["--report", "nowhere/page.html"], "error: cannot write nowhere/page.html"),
    ],
)
def test_a_mistake_of_the_command_is_one_sentence(run, place, words, sentence):
    done = run(*options(place, *words))
    assert done.code == 1
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""

"""Comparisons and learning curves as people read them: sentences, tables, pictures, pages, JSON."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fewshift
from fewshift import METHODS, Comparison, LearningCurve, Source
from fewshift.methods.finetune import L2
from fewshift.report import prose
from fewshift.trust.comparison import Row
from fewshift.trust.evidence import Evidence
from fewshift.trust.held_out import ImageAnswers
from fewshift.trust.learning_curve import Measured
from tests.helpers.networks import make_support, make_tiny, scenes, street
from tests.helpers.pages import Page

FAST = L2(epochs=1)
SUPPORT = make_support(5)


def comparison(labels: Tensor, select: str | None = None, **right: int) -> Comparison:
    """Methods that have so many of the images right, the first ones."""
    images, rows = torch.arange(len(labels)), {}
    answers = {
        name: F.one_hot(torch.where(images < count, labels, (labels + 1) % 3), 3) * 5.0 for name, count in right.items()
    }
    for name, logits in answers.items():
        held = ImageAnswers(images, images % 5, labels, answers["source"].double(), logits.double())
        rows[name] = Row(name, Source(), Evidence(held.gain(), held), 0.0)
    return Comparison(tuple(rows.values()), rows["source"], select, "cv", "Tiny", None, 0, 0.0)


LABELS = torch.arange(40) % 2  # as many of each class


# comparisons


@pytest.fixture(scope="module")
def three() -> Comparison:
    return fewshift.compare(make_tiny(), SUPPORT, ["source", "adabn", FAST], select="best")


@pytest.mark.parametrize(
    ("right", "facts"),
    [
        (
            {"source": 10, "good": 31, "better": 32},
            [
                "better leads",
                "80.0 %",
                "40 held-out",
                "clearly ahead of the source",
                "not clearly ahead of good",
                "+2.5",
            ],
        ),
        ({"source": 20, "good": 10}, ["source leads", "50.0 %", "clearly ahead of good", "+25.0"]),
        ({"source": 20, "good": 21}, ["good leads", "not clearly ahead of the source", "+2.5"]),
    ],
)
def test_a_comparison_says_who_leads_and_how_clearly(right, facts):
    words = comparison(LABELS, **right).words
    assert all(fact in words for fact in facts)


def test_a_source_that_was_not_named_may_still_be_ahead():
    both = comparison(LABELS, source=20, good=10)
    alone = Comparison(both.rows[1:], both.source, None, "labelled images", "Tiny", None, 0, 0.0)
    assert all(fact in alone.words for fact in ("good leads", "40 labelled images", "behind the source", "-25.0"))


def test_the_table_has_a_row_for_each_method(three):
    table = three.table()
    assert [row["method"] for row in table] == ["source", "adabn", "l2"]
    assert table[0]["gain"] == "-"
    gain = three.rows[2].gain
    assert table[2]["right, %"] == f"{gain.after:.1f}"
    assert table[2]["90 % interval"] == f"{gain.low:+.1f} to {gain.high:+.1f}"
    assert (table[2]["became right"], table[2]["became wrong"]) == (str(gain.wins), str(gain.losses))


def test_the_picture_of_gains_has_every_method_and_says_its_numbers(three):
    picture = ET.fromstring(three.picture().replace("xlink:href", "href"))
    assert picture.attrib["role"] == "img"
    for row in three.rows[1:]:
        assert f"{row.label}: {row.gain.point:+.1f}" in picture.attrib["aria-label"]
        assert f">{row.label}</text>" in three.picture()


def test_the_page_of_a_comparison_has_every_difference_and_escapes_reasons(three, tmp_path):
    failed = Row("flute", METHODS["flute"](), Evidence(None, error="<b>never</b> seen"), 0.0)
    rows = (*three.rows, failed)
    result = Comparison(rows, three.source, "best", "cv", "Tiny", SUPPORT, 0, 0.0)
    page = Page(result.report(tmp_path / "page.html"))
    assert (page.open, page.mismatched) == ([], [])
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.elements}
    assert "<b>never</b> seen" in page.words
    assert result.words in page.words
    assert result.rule in page.words
    assert prose.gain(result.selected_gain) in page.words
    for row in result.differences.values():
        for gain in row.values():
            assert f"{gain.low:+.1f} to {gain.high:+.1f}" in page.words


def test_the_page_of_pixels_speaks_of_pixels(tmp_path):
    result = fewshift.compare(street(), scenes(3), ["adabn"], select="best")
    words = Page(result.report(tmp_path / "page.html")).words
    assert "pixels" in result.words
    assert "pixels" in words
    assert "temperature" not in words


def test_without_numbers_a_comparison_has_reasons_and_no_picture():
    failed = Row("source", Source(), Evidence(None, error="no BatchNorm"), 0.0)
    result = Comparison((failed,), failed, None, "cv", "Tiny", None, 0, 0.0)
    assert "no BatchNorm" in result.words
    assert result.picture() == ""


def test_the_json_of_a_comparison_has_the_numbers(three):
    facts = json.loads(json.dumps(three.to_json(), allow_nan=False))
    assert [row["label"] for row in facts["rows"]] == ["source", "adabn", "l2"]
    assert facts["rows"][2]["settings"] == FAST.settings()
    assert facts["differences"]["l2"]["adabn"]["wins"] == three.difference("l2", "adabn").wins
    assert (facts["selected"], facts["words"]) == (three.selected, three.words)


# learning curves


def curve(gains: dict[int, list[float]], images: int = 400) -> LearningCurve:
    """Draws with these gains in percent, each judged by its own images."""
    draws = len(next(iter(gains.values())))
    before = torch.zeros(draws, images, dtype=torch.float64)
    after = {}
    for k, by_draw in gains.items():
        counts = (torch.tensor(by_draw).abs() * images / 100).round()
        signs = torch.tensor(by_draw).sign().double()
        after[k] = (torch.arange(images) < counts[:, None]).double() * signs[:, None]
    measured = Measured(torch.arange(draws * images).view(draws, images), before, after, dict.fromkeys(gains, draws))
    flat_from, step = measured.verdict()
    method = METHODS["lccs"]()
    return LearningCurve(
        50.0, measured.points, flat_from, step, draws, draws * images, False, method, "Tiny", SUPPORT, 0, 1.0
    )


RISING = {1: [4, 5, 6, 5], 2: [8, 9, 8, 9], 5: [14, 15, 13, 14], 10: [20, 21, 19, 20]}
FLAT = {1: [2, 4, 3, 3], 2: [7, 6, 8, 7], 5: [10, 9, 11, 10], 10: [10.25, 9.5, 11, 10.25]}
ALWAYS = {1: [10, 9, 11, 10], 5: [10, 9.5, 10.5, 10]}
NOISE = {1: [2, 12, 4, 10], 2: [12, 2, 11, 3], 5: [3, 14, 3, 16]}


@pytest.mark.parametrize(
    ("gains", "facts"),
    [
        (RISING, ["still rises at k = 10", "+14.0 points at k = 5", "+20.0 at k = 10", "label more"]),
        (FLAT, ["is flat from k = 5 on", "+10.0 points there", "+10.2 at k = 10"]),
        (NOISE, ["not clear", "+7.0 points at k = 1", "+9.0 at k = 5"]),
        ({1: [10, 11, 9, 10], 5: [2, 3, 1, 2]}, ["no larger k is better than k = 1", "+2.0 at k = 5"]),
        ({1: [-5, -6, -5, -5], 5: [-5, -6, -5, -5]}, ["do not help lccs", "-5.2 points at k = 1"]),
        ({1: [5], 5: [9]}, ["one draw", "+5.0 points at k = 1", "+9.0 at k = 5"]),
        ({3: [5, 5, 6]}, ["single k", "+5.3 points at k = 3"]),
        ({3: [5, 5], 4: [5, 5]}, ["too close together", "+5.0 points at k = 3"]),
    ],
)
def test_a_curve_says_its_verdict_with_the_numbers_that_decided(gains, facts):
    words = curve(gains).words
    assert all(fact in words for fact in facts)


def test_few_images_make_a_flat_curve_look_flat_and_no_more():
    few = curve(ALWAYS, images=5)
    assert f"up to {few.step.high:.1f} points" in few.words
    assert "looks flat" in few.words
    assert "looks" not in curve(ALWAYS).words


def test_whether_the_labelled_images_matter_is_said_with_spread_and_chance():
    apart, alike = curve({1: [20, 80, 50, 30]}), curve({1: [50, 50, 50, 50]})
    assert "matters at k = 1" in apart.luck
    assert f"{apart.points[0].spread:.1f} points" in apart.luck
    assert "no measurable difference" in alike.luck
    assert f"{alike.points[0].chance:.1f}" in alike.luck
    assert "not known" in curve({1: [5]}).luck


@pytest.fixture(scope="module")
def small() -> LearningCurve:
    return fewshift.learning_curve(make_tiny(), SUPPORT, method=FAST, shots=(1, 3), draws=2)


def test_the_json_of_a_curve_has_every_draw(small):
    facts = json.loads(json.dumps(small.to_json(), allow_nan=False))
    assert [point["gains"] for point in facts["points"]] == [list(point.gains) for point in small.points]
    assert facts["points"][0]["mean"] == small.points[0].mean
    assert (facts["settings"], facts["words"]) == (FAST.settings(), small.words)


def test_the_picture_of_a_curve_says_its_numbers_and_where_it_is_flat(small):
    picture = ET.fromstring(small.picture().replace("xlink:href", "href"))
    assert picture.attrib["role"] == "img"
    assert f"{small.at(3).mean:+.1f} at k = 3" in picture.attrib["aria-label"]
    assert "flat from k = 5" in curve(FLAT).picture()
    assert "flat from" not in curve(RISING).picture()


@pytest.mark.parametrize(
    ("gains", "images", "both"),
    [
        (ALWAYS, 400, "flat from k = 1"),
        (ALWAYS, 5, "looks flat"),
        ({1: [-5, -6, -5, -5], 5: [-5, -6, -5, -5]}, 400, "labels do not help"),
    ],
)
def test_the_picture_of_a_curve_says_what_its_sentence_says(gains, images, both):
    result = curve(gains, images)
    assert both in result.words
    assert both in result.picture()


def test_a_curve_that_falls_is_not_called_flat():
    assert "flat" not in curve({1: [10, 11, 9, 10], 5: [2, 3, 1, 2]}).picture()


def test_the_spread_that_matters_is_the_one_with_numbers():
    apart = curve({1: [50, 50, 50, 50], 2: [20, 80, 50, 30]})
    assert "matters at k = 2: " in apart.luck
    assert f"{apart.at(2).spread:.1f} points at k = 2" in apart.luck


@pytest.mark.parametrize("kind", ["own images", "others", "pixels", "single k"])
def test_the_page_of_a_curve_is_whole_and_has_the_verdict(kind, small, tmp_path):
    result = {
        "own images": lambda: small,
        "others": lambda: fewshift.learning_curve(
            make_tiny(), SUPPORT, method="adabn", labelled=make_support(3, seed=9), draws=2
        ),
        "pixels": lambda: fewshift.learning_curve(street(), scenes(3), method="adabn", draws=2),
        "single k": lambda: fewshift.learning_curve(make_tiny(), SUPPORT, method="source", shots=(1,), draws=1),
    }[kind]()
    page = Page(result.report(tmp_path / "curve.html"))
    assert (page.open, page.mismatched) == ([], [])
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.elements}
    assert result.words[1:] in page.words
    assert result.luck[1:] in page.words
    for row in result.table():
        assert row["90 % interval"] in page.words
    assert ("outside the support" in page.words) is result.outside

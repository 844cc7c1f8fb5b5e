"""What trials amount to: goals, listings and pictures."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from fewshift.lab.bench.trust import Trial, goals, summed
from fewshift.lab.bench.trust_pictures import estimates, trade_off, trust_pictures
from fewshift.lab.bench.trust_tables import comma_separated, listing, plain
from fewshift.report import run_figures as figures
from fewshift.report.tables import Listing, listing_latex, listing_markdown


def trial(gain: float, estimate: float | None = 0.0, half: float = 5.0, **other: Any) -> Trial:
    """A source network with 50 %, a gain of so many points, and an interval of ± `half` around the estimate."""
    accepted = other.pop("accepted", True)
    ends = {} if estimate is None else {"low": estimate - half, "high": estimate + half}
    facts = {"condition": "shift", "shots": 5, "target": "north", "seed": 0, **other}
    return Trial(
        **facts,
        source=50,
        candidate=50 + gain,
        returned=50 + gain * accepted,
        accepted=accepted,
        estimate=estimate,
        **ends,
    )


TRIALS = [
    trial(20, 18),  # kept, covered
    trial(10, 2, accepted=False),  # a gain refused, not covered
    trial(-4, -6, accepted=False, condition="no shift"),  # a harm refused, covered
    trial(-3, 1, accepted=True, condition="no shift"),  # a harm let through, covered
    trial(-1, None, accepted=True, condition="no shift"),  # one point is not more than one point
]


def test_numbers_of_known_trials_are_known():
    summary = summed(TRIALS)
    assert (summary.runs, summary.accepted, summary.harmful, summary.let_through) == (5, 3, 2, 1)
    assert summary.let_through_share == pytest.approx(20)
    assert summary.attainable == pytest.approx(30)
    assert summary.kept_share == pytest.approx(100 * (20 - 3 - 1) / 30)
    assert (summary.covered, summary.intervals, summary.coverage) == (3, 4, 75)
    assert summary.estimates == (18, 2, -6, 1)


def test_a_point_is_a_point_whatever_floating_point_makes_of_it():
    lost = replace(trial(0), source=100 * (11 / 700), candidate=100 * (4 / 700))  # seven of 700
    assert lost.candidate - lost.source < -1  # it makes more of it
    assert not lost.harmful
    assert replace(lost, candidate=100 * (3 / 700)).harmful
    assert replace(lost, low=-1.0, high=0.0).covered


def test_a_perfect_guard_keeps_everything_and_no_guard_keeps_the_harm_too():
    gains = [5, -2, 0, 7.5, -8]
    perfect = summed([trial(gain, accepted=gain > 0) for gain in gains])
    careless = summed([trial(gain) for gain in gains])
    assert (perfect.kept_share, perfect.let_through) == (100, 0)
    assert (careless.kept_share, careless.let_through) == (pytest.approx(100 * 2.5 / 12.5), 2)


def test_goals_are_met_missed_or_open():
    assert [goal.met for goal in goals(TRIALS)] == [False, False, None, False]
    good = [trial(4, 4, home=60)] * 90 + [trial(4, 40, home=60)] * 10
    assert [goal.met for goal in goals(good)] == [True, True, True, True]
    too_wide = [trial(4, 4, home=60)] * 10
    assert [goal.met for goal in goals(too_wide)] == [True, True, True, False]
    assert [goal.met for goal in goals([trial(-0.5, None)])] == [True, None, None, None]
    passed, kept, mild, coverage = (goal.sentence for goal in goals(TRIALS))
    assert passed.startswith("Missed: harmful adaptations were let through in 1 of 5 runs (20.0 %), at most 2 %")
    assert kept.startswith("Missed: 53.3 % of the attainable gain was kept, at least 92 %")
    assert mild.startswith("Open: no network was tested on its own source")
    assert coverage == "Missed: the 90 % intervals held the true gain in 3 of 4 runs (75.0 %), 87 to 95 % are wanted."


def test_a_shift_is_mild_up_to_ten_points_below_home():
    assert [trial(1, home=home).mild for home in (None, 45, 50, 60, 60.1)] == [None, True, True, True, False]
    assert trial(1, home=100 * (0.5 + 0.1)).mild  # a floating-point number a little above ten
    judged = [trial(10, home=60), trial(2, home=55, accepted=False), trial(30, home=80, accepted=False)]
    mild = goals(judged)[2]
    assert (mild.met, mild.words.split(",")[0]) == (True, "on mild shifts 83.3 % of the attainable gain was kept")
    assert not goals([*judged, trial(10, home=60, accepted=False)])[2].met


def test_goals_are_about_the_half_that_was_not_tuned_on():
    tuned = [replace(one, tuned=True) for one in TRIALS]
    checked = [trial(4, 4, home=55)] * 9 + [trial(4, 40, home=55)]
    assert [goal.met for goal in goals([*tuned, *checked])] == [True] * 4
    assert all("in the checked half" in goal.words for goal in goals([*tuned, *checked]))
    assert not any("half" in goal.words for goal in goals(TRIALS))
    assert [goal.met for goal in goals(tuned)] == [None] * 4


def test_the_two_per_cent_are_of_all_runs_and_include_two_per_cent():
    runs = [trial(4, 4)] * 49
    assert goals([*runs, trial(-2)])[0].met
    assert not goals([*runs[1:], trial(-2)])[0].met


def test_a_listing_has_a_line_for_each_condition_and_k_and_one_for_all():
    table = listing("Toy", [*TRIALS, trial(2, 2, shots=1)])
    assert [line[:3] for line in table.lines] == [
        ("shift", "5", "2"),
        ("no shift", "5", "3"),
        ("shift", "1", "1"),
        ("all", "1", "1"),
        ("all", "5", "5"),
        ("all", "", "6"),
    ]
    line = dict(zip(table.columns, table.lines[0], strict=True))
    assert (line["source accuracy"], line["true gain, candidate"]) == ("50.0 ± 0.0", "+15.0 ± 5.0")
    assert (line["true gain, returned"], line["estimated gain"]) == ("+10.0 ± 10.0", "+10.0 ± 8.0")
    assert (line["accepted"], line["harmful candidates"], line["harmful let through"]) == ("50.0 %", "0", "0 (0.0 %)")
    assert (line["gain kept"], line["coverage"]) == ("66.7 %", "50.0 %")
    assert dict(zip(table.columns, table.lines[1], strict=True))["gain kept"] == "-"  # there was none
    assert len(table.sentences) == 4


def test_a_listing_has_a_line_for_mild_shifts_where_they_are_known():
    table = listing("Toy", [trial(10, home=55), trial(5, home=55, accepted=False), trial(1, home=80, condition="far")])
    line = next(line for line in table.lines if line[0] == "mild shifts")
    assert (line[2], dict(zip(table.columns, line, strict=True))["gain kept"]) == ("2", "66.7 %")
    assert "at most 10 points below" in table.header
    assert "Mild" not in listing("Toy", TRIALS).header


def test_a_listing_shows_the_halves_apart():
    tuned = [replace(one, tuned=True) for one in TRIALS]
    table = listing("Toy", [trial(7, 6), *tuned, trial(3, 3, condition="blur")])
    assert table.columns[:3] == ("half", "condition", "k")
    assert [line[:4] for line in table.lines] == [
        ("tuned on", "shift", "5", "2"),
        ("tuned on", "no shift", "5", "3"),
        ("tuned on", "all", "", "5"),
        ("checked", "shift", "5", "1"),
        ("checked", "blur", "5", "1"),
        ("checked", "all", "", "2"),
    ]
    assert "looked at while thresholds were chosen" in table.header


def test_a_listing_is_a_table_in_markdown_and_latex_whatever_its_words_are():
    odd = Listing("T|t", "Numbers in %.", ("a|b", "n"), (("x & y", "1.0 ± 0.5"),), ("Met: 50 % of 2.",))
    text = listing_markdown(odd)
    assert text.startswith("### T\\|t\n\nNumbers in %.\n\n| a\\|b | n |\n|---|---|\n| x &amp; y | 1.0 ± 0.5 |\n")
    assert text.endswith("\n- Met: 50 % of 2.\n")
    body = listing_latex(odd)
    assert r"x \& y & 1.0 $\pm$ 0.5 \\" in body
    assert body.startswith("% Numbers in %.\n% Met: 50 % of 2.\n\\begin{tabular}{lc}\n")


def test_every_trial_is_in_the_csv_with_all_its_numbers():
    rows = list(csv.DictReader(comma_separated(TRIALS).splitlines()))
    assert len(rows) == 5
    assert rows[1] | {} == {
        "condition": "shift",
        "k": "5",
        "target": "north",
        "seed": "0",
        "source": "50",
        "candidate": "60",
        "returned": "50",
        "accepted": "False",
        "estimate": "2",
        "low": "-3.0000",
        "high": "7.0000",
        "corruption": "",
        "tuned": "False",
        "home": "",
        "strength": "",
    }
    assert rows[4]["estimate"] == ""


def test_json_has_the_numbers_behind_the_words():
    numbers = json.loads(json.dumps(plain(TRIALS), allow_nan=False))
    assert [line["condition"] for line in numbers["lines"]] == ["shift", "no shift"]
    assert numbers["all"]["candidate_gain"] == {
        "mean": pytest.approx(4.4),
        "spread": pytest.approx(9.26, abs=0.01),
        "n": 5,
    }
    assert numbers["lines"][1]["kept_share"] is None
    assert [goal["met"] for goal in numbers["goals"]] == [False, False, None, False]
    assert [(group["k"], group["runs"]) for group in numbers["by_k"]] == [(5, 5)]
    assert numbers["mild_shifts"] is None
    assert "halves" not in numbers


def test_json_has_the_numbers_of_both_halves():
    numbers = plain([replace(TRIALS[0], tuned=True), *TRIALS[1:], trial(1, home=51)])
    assert {half: part["all"]["runs"] for half, part in numbers["halves"].items()} == {"tuned on": 1, "checked": 5}
    assert numbers["halves"]["checked"]["mild_shifts"]["runs"] == 1
    assert [(line["half"], line["condition"], line["runs"]) for line in numbers["lines"]] == [
        ("tuned on", "shift", 1),
        ("checked", "shift", 2),
        ("checked", "no shift", 3),
    ]


def test_the_picture_shows_every_estimate_beside_the_truth():
    [picture] = estimates(TRIALS, "key-")
    assert "shift: 2 runs, true +15.0 ± 5.0, estimated +10.0 ± 8.0; no shift: 2 runs" in picture.svg
    assert "3 of 4 intervals (75.0 %) hold the true gain" in picture.caption
    assert "true gain, points" in picture.svg
    assert estimates([trial(1, None)], "key-") == []
    assert estimates(TRIALS, "key-") == [picture]


GUARDED = [
    trial(10, strength=3.0),
    trial(-5, strength=1.0, accepted=False),
    trial(30, strength=2.0),
    trial(-0.5, strength=-4.0, accepted=False),
    trial(-8, strength=-math.inf, accepted=False),  # no evidence: no threshold lets it through
]


def test_a_trade_off_is_what_a_guard_of_each_threshold_keeps_and_lets_through():
    def at(threshold: float) -> tuple[float, float]:
        accepted = [one for one in GUARDED if one.strength > threshold]
        return 100 * sum(one.gain for one in accepted) / 40, 100 * sum(one.gain < -1 for one in accepted) / 5

    assert trade_off(GUARDED) == [pytest.approx(at(threshold)) for threshold in (9, 2.5, 1.5, 0, -9)]


def test_the_trade_off_is_drawn_for_each_half_and_k_with_a_mark_at_the_default():
    few = [replace(one, shots=1) for one in GUARDED]
    [_, picture] = trust_pictures([*GUARDED, *few], "key-")
    assert ">k = 1</text>" in picture.svg
    assert "k = 5: 100.0 % of the gain kept and 0.0 % of runs harmed, at the lowest threshold 86.2 %" in picture.svg
    assert "at most 2 % harmful and at least 92 % kept" in picture.caption
    captions = [one.caption for one in trust_pictures([*GUARDED, *(replace(one, tuned=True) for one in few)], "key-")]
    assert [caption.partition("strict, ")[2].partition(":")[0] for caption in captions[1:]] == ["tuned on", "checked"]


def test_records_without_a_strength_have_no_trade_off():
    assert len(trust_pictures(TRIALS, "key-")) == 1
    nothing_to_gain = [trial(-3, strength=1.0)]
    assert len(trust_pictures(nothing_to_gain, "key-")) == 1
    [_, picture] = trust_pictures([*TRIALS, *GUARDED], "key-")
    assert picture == trust_pictures(GUARDED, "key-")[1]


def test_estimates_are_drawn_on_one_scale_up_and_across():
    one = figures.estimates(
        {"a": [figures.Estimate(0, 10, -100, 100)]},
        across="x",
        label="y",
        key="k",
        alt="an estimate of ten for nothing",
    )
    assert "\N{MINUS SIGN}2" in one or "0.0" in one  # 0 to 10 with a margin: the interval does not set the scale
    assert "100" not in re.findall(r">([^<]+)</text>", one)

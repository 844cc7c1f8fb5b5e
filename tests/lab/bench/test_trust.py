"""Judged cells: supports spoilt on purpose, networks at home, the guard's verdict beside the truth, and the report."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fewshift import Auto, FewshiftError, adapt
from fewshift.core.support import Support, draw_support
from fewshift.images.preprocess import Preprocess
from fewshift.lab.bench import materials, trust
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.damage import DAMAGES, damaged
from fewshift.lab.bench.features import GRIDS
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.results import outcomes, table_of
from fewshift.lab.bench.run import run, split
from fewshift.lab.bench.runs import report_run
from fewshift.lab.bench.trust import Trial, goals, summed
from fewshift.lab.bench.trust_pictures import estimates, trade_off, trust_pictures
from fewshift.lab.bench.trust_tables import comma_separated, listing, plain
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.lab.datasets.copies import load_validation
from fewshift.lab.datasets.corruptions import CORRUPTIONS
from fewshift.models.cards import Card, read_card, with_card
from fewshift.report import run_figures as figures
from fewshift.report.tables import Listing, listing_latex, listing_markdown, with_average
from fewshift.trust.guard import Rule, Verdict
from tests.helpers.bench import DOMAIN, tiny_materials
from tests.helpers.networks import make_tiny
from tests.helpers.pages import Page
from tests.helpers.runs import fill, invented, undrawn

# --- damages

LABELS = torch.arange(7).repeat(40)
DRAWN = draw_support(LABELS, 5, 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_depends_on_its_seed_alone(damage):
    def left(seed: int) -> list[list[int]]:
        return [part.tolist() for part in damaged(DRAWN, LABELS[DRAWN], damage, 7, seed)]

    assert left(0) == left(0)
    assert any(left(seed) != left(0) for seed in range(1, 6))


@pytest.mark.parametrize(("damage", "left"), [("class missing", 6), ("two classes", 2)])
def test_the_classes_that_are_left_keep_their_images_and_labels(damage, left):
    drawn, labels = damaged(DRAWN, LABELS[DRAWN], damage, 7, 0)
    assert torch.equal(LABELS[drawn], labels)
    assert sorted(labels.bincount().tolist())[-left:] == [5] * left
    assert len(labels) == 5 * left


def test_wrong_labels_are_two_of_five_and_none_is_right_by_chance():
    drawn, labels = damaged(DRAWN, LABELS[DRAWN], "wrong labels", 7, 0)
    assert torch.equal(drawn, DRAWN)
    assert int((labels != LABELS[DRAWN]).sum()) == 14 == round(0.4 * 35)
    assert set(labels.tolist()) <= set(range(7))


def test_classes_that_were_never_there_are_not_the_ones_that_go_missing():
    there = DRAWN[torch.isin(LABELS[DRAWN], torch.tensor([1, 4, 6]))]
    for seed in range(10):
        assert len(damaged(there, LABELS[there], "class missing", 7, seed)[1].unique()) == 2
        assert len(damaged(there, LABELS[there], "two classes", 7, seed)[1].unique()) == 2


def test_a_damage_that_does_not_exist_is_named():
    with pytest.raises(FewshiftError, match="damage='blur' is unknown: choose one of wrong labels, class missing"):
        damaged(DRAWN, LABELS[DRAWN], "blur", 7, 0)


# --- cells

FAST = {"epochs": 1}
CELL = Cell("toy", "tiny", "place", "auto", FAST, shots=5, largest_support=5, validate="cv")


def accuracy(model: torch.nn.Module, cell: Cell = CELL) -> float:
    test = split(DOMAIN, cell)[1]
    with torch.no_grad():
        return float((model(DOMAIN.pictures[test]).argmax(1) == DOMAIN.labels[test]).double().mean())


@pytest.mark.parametrize("damage", [None, "wrong labels", "two classes"])
def test_a_judged_cell_is_what_adapt_gives_beside_the_truth(damage):
    cell = replace(CELL, damage=damage)
    result = run(cell, tiny_materials())
    drawn = draw_support(DOMAIN.labels, 5, 0)
    labels = DOMAIN.labels[drawn]
    if damage:
        drawn, labels = damaged(drawn, labels, damage, 3, 0)
        assert result["support_labels"] == labels.tolist()
    expected = adapt(make_tiny(), Support(DOMAIN.pictures[drawn], labels), method=Auto(**FAST))
    verdict = result["trust"]
    assert verdict["accuracy"] == pytest.approx(
        {
            "source": accuracy(make_tiny()),
            "candidate": accuracy(expected.candidate),
            "returned": accuracy(expected.model),
        }
    )
    assert result["accuracy"] == pytest.approx(verdict["accuracy"]["returned"])
    assert (verdict["accepted"], verdict["reason"]) == (expected.accepted, expected.reason)
    assert verdict["gain"]["point"] == pytest.approx(expected.gain.point)
    assert verdict["gain"]["low"] == pytest.approx(expected.gain.low)
    assert (verdict["gain"]["images"], verdict["gain"]["wins"]) == (len(drawn), expected.gain.wins)
    assert verdict["chosen"] == expected.choice.chosen
    assert result["support"] == drawn.tolist()
    assert not set(result["support"]) & set(split(DOMAIN, cell)[1].tolist())
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_picture_that_a_data_set_has_twice_is_judged_once():
    drawn = draw_support(DOMAIN.labels, 5, 0)
    same = (drawn[DOMAIN.labels[drawn] == 0][:2]).tolist()
    pictures = DOMAIN.pictures.clone()
    pictures[same[1]] = pictures[same[0]]
    result = run(CELL, Materials(lambda _: make_tiny(), lambda _: replace(DOMAIN, pictures=pictures)))
    assert result["trust"]["gain"]["images"] == len(drawn) - 1


def test_what_the_guard_refuses_is_answered_by_the_source_network(monkeypatch):
    monkeypatch.setattr("fewshift.api.decide", lambda *_, **__: Verdict(False, Rule.CALLABLE))
    result = run(CELL, tiny_materials())
    source = run(replace(CELL, method="source", settings={}, shots=None, validate=None), tiny_materials())
    for score in ("accuracy", "macro_f1", "macro_f1_with_support", "tally"):
        assert result[score] == source[score]
    accuracy = result["trust"]["accuracy"]
    assert accuracy["returned"] == accuracy["source"] == source["accuracy"] != accuracy["candidate"]
    assert result["trust"]["accepted"] is False


def test_accuracies_are_those_of_the_images_that_the_scores_are_of():
    cell = replace(CELL, condition=Condition("sequential", 10, 8))
    result = run(cell, tiny_materials())
    assert sum(result["realised_counts"]) < len(split(DOMAIN, cell)[1])  # a long tail leaves images out
    assert result["trust"]["accuracy"]["returned"] == pytest.approx(result["accuracy"])


def test_the_source_network_is_asked_about_an_image_once():
    asked: list[list[int]] = []

    def ask(indices: torch.Tensor) -> torch.Tensor:
        asked.append(indices.tolist())
        return torch.stack([indices, indices + 1], 1).double()

    shop = tiny_materials()
    for wanted in ([3, 1, 2], [2, 4, 3]):
        answers = shop.source_answers(CELL, torch.tensor(wanted), ask)
        assert answers.tolist() == [[index, index + 1] for index in wanted]
    assert asked == [[3, 1, 2], [4]]
    shop.source_answers(replace(CELL, target="elsewhere"), torch.tensor([1]), ask)
    assert asked[-1] == [1]


def test_answers_that_are_kept_change_no_result():
    shop = tiny_materials()
    run(replace(CELL, shots=1), shop)
    together, alone = run(replace(CELL, seed=1), shop), run(replace(CELL, seed=1), tiny_materials())
    assert together["trust"] == alone["trust"]
    assert together["tally"] == alone["tally"]


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (replace(CELL, method="adabn", settings={}, shots=None), "no support to damage"),
        (replace(CELL, damage="blur"), "damage='blur' is unknown"),
    ],
)
def test_a_cell_that_cannot_be_judged_says_why(cell, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        run(cell, tiny_materials())


def test_pixels_are_not_judged_here():
    shop = Materials(lambda _: make_tiny(), lambda _: DOMAIN, lambda _: object())
    with pytest.raises(FewshiftError, match="labels for pixels"):
        run(CELL, shop)


# --- a network at home

PACS = COLLECTIONS["pacs"]
SMALL = Preprocess(6, 6, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Two domains of PACS with a list each, whose labels are from 1 and whose images have another ending by now."""
    (tmp_path / "pacs_splits").mkdir()
    for shade, domain in enumerate(("cartoon", "sketch")):
        lines = []
        for number, label in enumerate((7, 1, 2)):
            file = tmp_path / "pacs" / domain / PACS.classes[label - 1] / f"{number}.jpg"
            file.parent.mkdir(parents=True)
            Image.new("RGB", (6, 6), (40 * label, 100 * shade, 0)).save(file)
            lines.append(f"{domain}/{PACS.classes[label - 1]}/{number}.png {label}\n")
        (tmp_path / "pacs_splits" / f"{domain}_crossval_kfold.txt").write_text("".join(lines))
    return tmp_path


def test_a_published_list_tells_which_images_were_not_trained_on(copy):
    validation = load_validation("pacs", "sketch", copy, SMALL)
    assert validation.labels.tolist() == [6, 0, 1]
    assert [file.name for file in validation.source] == ["0.jpg", "1.jpg", "2.jpg"]
    assert load_validation("pacs", "sketch", copy / "pacs", SMALL).source == validation.source  # its own folder, given
    (copy / "pacs_splits" / "sketch_crossval_kfold.txt").unlink()
    with pytest.raises(FewshiftError, match=r"sketch_crossval_kfold.txt is not in .*pacs_splits: put it there"):
        load_validation("pacs", "sketch", copy, SMALL)
    with pytest.raises(FewshiftError, match=r"'photo' of PACS .* is not in"):
        load_validation("pacs", "photo", copy, SMALL)
    with pytest.raises(FewshiftError, match="Office-31 has no published validation lists"):
        load_validation("office31", "dslr", copy, SMALL)


def test_a_card_tells_which_domains_are_a_networks_own(tmp_path):
    card = tmp_path / "net.json"
    card.write_text(json.dumps({"sources": ["sketch", "photo"], "recipe": {"held_out": 0.1}}))
    assert (read_card(card).sources, read_card(card).held_out) == (("sketch", "photo"), 0.1)
    card.write_text(json.dumps({"sources": "all of them", "recipe": "mine"}))  # a note
    assert (read_card(card).sources, read_card(card).held_out) == ((), None)


def test_at_home_a_network_has_the_lists_of_its_own_domains_one_after_the_other(copy, monkeypatch):
    (copy / "net.json").write_text(json.dumps({"sources": ["sketch", "cartoon"]}))
    monkeypatch.setattr(materials.models, "load", lambda *_: with_card(make_tiny(7), Card("net", PACS.classes, SMALL)))
    shop = materials.open_materials(str(copy), str(copy))
    domain = shop.domain(Cell("pacs", "net", OWN_SOURCE, "source"))
    assert domain.labels.tolist() == [6, 0, 1] * 2
    expected = [load_validation("pacs", name, copy, SMALL) for name in ("cartoon", "sketch")]
    every = torch.arange(3)
    assert torch.equal(domain.images(torch.arange(6)), torch.cat([part.images(every) for part in expected]))


def test_a_list_that_the_card_names_comes_before_published_ones(copy, monkeypatch):
    (copy / "seen-by-nobody.txt").write_text("sketch/person/0.jpg 6\ncartoon/elephant/2.jpg 1\n")
    (copy / "net.json").write_text(json.dumps({"sources": ["sketch"], "validation": "seen-by-nobody.txt"}))
    monkeypatch.setattr(materials.models, "load", lambda *_: with_card(make_tiny(7), Card("net", PACS.classes, SMALL)))
    domain = materials.open_materials(str(copy), str(copy)).domain(Cell("pacs", "net", OWN_SOURCE, "source"))
    assert domain.labels.tolist() == [6, 1]


def test_what_training_set_aside_is_at_home():
    domain = materials.held_out("digits", Card(sources=("uci",), held_out=0.2), None, None)
    assert torch.equal(domain.labels, digits.split("uci")[1][1])


@pytest.mark.parametrize("place", ["mnist", "uci"])
def test_digits_at_home_are_those_the_network_never_saw(place):
    domain = materials.open_materials(None, None).domain(Cell("digits", place, OWN_SOURCE, "source"))
    images, labels = digits.split(place)[1]
    assert torch.equal(domain.labels, labels)
    torch.testing.assert_close(domain.images(torch.arange(9)), digits.normalise(images[:9]))


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        (Card(), "domains of PACS .*card"),
        (Card(path=Path("net.json"), sources=("north",)), "add them to net.json, such as"),
        (Card(path=Path("net.json"), sources=("photo",), held_out=0.0), "every source image was trained on"),
    ],
)
def test_a_network_that_cannot_be_at_home_says_why(card, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        materials.held_out("pacs", card, None, None)


# --- grids

GRID = """title = "Toy"
dataset = "toy"
source = "net-{target}"
targets = ["north", "south"]
seeds = [0, 1]
validate = "cv"
"""
SHIFT = '\n[[rows]]\nmethod = "lccs"\nlabel = "shift"\nshots = [1, 5]\n'
AT_HOME = '\n[[rows]]\nmethod = "lccs"\nlabel = "no shift"\nshots = [5]\ntarget = "its own source"\n'
SPOILT = '\n[[rows]]\nmethod = "lccs"\nlabel = "wrong"\nshots = [5]\ndamage = "wrong labels"\n'
SOURCE = '\n[[rows]]\nmethod = "source"\nlabel = "source"\n'
TRUST = GRID + SHIFT + AT_HOME + SPOILT + SOURCE


def load(folder: Path, text: str) -> Grid:
    (folder / "g.toml").write_text(text)
    return Grid.load(folder / "g.toml")


def test_rows_say_how_they_are_spoilt_and_judged_and_where_their_network_is_used(tmp_path):
    grid = load(tmp_path, TRUST)
    shift, home, wrong, source = (grid.cells_of(row) for row in grid.rows)
    assert {(cell.source, cell.target) for cell in shift} == {("net-north", "north"), ("net-south", "south")}
    assert {(cell.source, cell.target) for cell in home} == {("net-north", OWN_SOURCE), ("net-south", OWN_SOURCE)}
    assert {cell.damage for cell in wrong} == {"wrong labels"}
    assert {cell.damage for cell in shift + home + source} == {None}
    assert {cell.validate for cell in shift + home + wrong} == {"cv"}
    assert {cell.validate for cell in source} == {None}  # there is nothing to judge
    assert {cell.validate for cell in load(tmp_path, TRUST.replace('validate = "cv"\n', "")).cells()} == {None}
    alone = load(tmp_path, TRUST.replace('validate = "cv"\n', "").replace('label = "shift"', 'validate = "cv"'))
    assert [{cell.validate for cell in alone.cells_of(row)} for row in alone.rows] == [{"cv"}, {None}, {None}, {None}]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('damage = "wrong labels"', 'damage = "blur"', "damage = 'blur': give 'wrong labels' or 'class missing'"),
        ('damage = "wrong labels"', "damage = []", "give 'wrong labels' or"),
        ('target = "its own source"', 'target = "south"', "target = 'south': give 'its own source'"),
        ('validate = "cv"', 'validate = "twice"', "validate = 'twice': give 'cv'"),
        ('method = "source"', 'method = "source"\nvalidate = "cv"', "with validate and without shots"),
        ('method = "source"', 'method = "source"\ndamage = "two classes"', "with damage and without shots"),
        ('dataset = "toy"', 'dataset = "camvid"', "validate.*camvid has pixel labels"),
        ("seeds =", 'tuned_on = ["west"]\nseeds =', "'west' in tuned_on, which is no target.*north, south"),
        ("seeds =", "tuned_on = 'north'\nseeds =", "tuned_on = 'north': give a list"),
        ('label = "wrong"', 'label = "wrong"\ntargets = ["west"]', "'west' in the row 'wrong'.*north, south"),
        ('label = "wrong"', 'label = "wrong"\ntargets = []', "targets = .*: give a list"),
        ('label = "wrong"', 'label = "wrong"\ncorruptions = ["fog 1"]', "corruption 'fog 1': choose one of noise 1"),
    ],
)
def test_a_mistake_in_a_grid_is_named(tmp_path, old, new, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        load(tmp_path, TRUST.replace(old, new, 1))


def test_rows_with_other_test_images_or_spoilt_supports_are_not_ranked_together(tmp_path):
    shift, _, home, wrong, _ = table_of(load(tmp_path, TRUST), {}).lines
    assert len({shift.among, home.among, wrong.among}) == 3


def test_a_row_has_cells_on_its_own_targets_alone_and_one_for_each_corruption(tmp_path):
    rows = SHIFT + 'targets = ["south"]\ncorruptions = ["noise 1", "blur 3"]\n' + SOURCE
    grid = load(tmp_path, GRID + rows)
    cells = grid.cells_of(grid.rows[0])
    assert sorted((cell.target, cell.corruption, cell.shots, cell.seed) for cell in cells) == [
        ("south", corruption, shots, seed)
        for corruption in ("blur 3", "noise 1")
        for shots in (1, 5)
        for seed in (0, 1)
    ]
    assert len(grid.cells_of(grid.rows[1])) == 2 * 2


def test_a_table_has_the_mean_over_corruptions_and_no_entry_where_a_row_has_no_cells(tmp_path):
    text = (
        GRID.replace('validate = "cv"\n', "") + AT_HOME + 'targets = ["south"]\ncorruptions = ["noise 1", "blur 3"]\n'
    )
    grid = load(tmp_path, text)
    accuracy = {("noise 1", 0): 0.5, ("blur 3", 0): 0.7, ("noise 1", 1): 0.9}  # a cell of seed 1 was not run
    records = {
        cell.key: {"result": {"accuracy": accuracy[cell.corruption, cell.seed]}}
        for cell in grid.cells()
        if (cell.corruption, cell.seed) in accuracy
    }
    [line] = with_average(table_of(grid, records)).lines
    north, south, average = line.entries
    assert (north.values, average.values) == ({}, {})
    assert south.values == pytest.approx({0: 60.0})


CHECKING_CORRUPTIONS = {"haze", "vignette", "grain", "sharpening", "zoom", "tint"}


def corruptions_of(grid: Grid, tuned: bool) -> set[str]:
    """The kinds of corruption that rows of one half have."""
    return {
        row.label
        for row in grid.rows
        if row.corruptions and all((target in grid.tuned_on) == tuned for target in row.targets)
    }


@pytest.mark.parametrize("name", ["trust_pacs", "trust_pacs_tuned", "trust_digits", "trust_office31"])
def test_every_run_of_the_trust_grids_adapts_and_judges_as_a_user_would(name):
    grid = Grid.load(GRIDS / f"{name}.toml")
    assert all((cell.validate, cell.build()) == ("cv", Auto()) for cell in grid.cells())
    assert {"shift", "no shift", "wrong labels", "class missing"} <= {row.label for row in grid.rows}
    assert all(len(row.corruptions) == 3 and row.target == OWN_SOURCE for row in grid.rows if row.corruptions)
    assert {row.damage for row in grid.rows} - {""} <= set(DAMAGES)


def test_the_halves_share_neither_networks_nor_corruptions():
    digits, pacs, office = (
        Grid.load(GRIDS / f"{name}.toml") for name in ("trust_digits", "trust_pacs", "trust_office31")
    )
    tuned = Grid.load(GRIDS / "trust_pacs_tuned.toml")
    assert set(tuned.tuned_on) == set(tuned.targets)
    assert not set(tuned.targets) & set(pacs.targets)
    assert not pacs.tuned_on
    assert not office.tuned_on
    assert digits.tuned_on == ("mnist -> uci",)
    kinds = {corruption.split()[0] for corruption in CORRUPTIONS}
    assert corruptions_of(tuned, tuned=True) == kinds - CHECKING_CORRUPTIONS
    assert corruptions_of(digits, tuned=True) == kinds - CHECKING_CORRUPTIONS - {"colour"}  # digits are grey
    for checked in (pacs, office, digits):
        assert corruptions_of(checked, tuned=False) == CHECKING_CORRUPTIONS


# --- what trials amount to


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


# --- the report


def judged(cell: Cell) -> dict[str, Any]:
    """A result as a run would write it: at home 4 points are lost and seed 1 lets them be, elsewhere 12 are gained."""
    result = invented(cell)
    if cell.validate is None:
        return result
    home = cell.target == OWN_SOURCE
    gain = -0.04 if home else 0.12
    accepted = not home or cell.seed == 1
    right = {"source": 0.5, "candidate": 0.5 + gain, "returned": 0.5 + gain * accepted}
    estimate = {"point": 10.0, "low": -5.0, "high": 15.0, "images": 15, "weak": False}
    verdict = {"accuracy": right, "accepted": accepted, "reason": "so", "gain": None if cell.damage else estimate}
    return result | {"trust": verdict, "accuracy": right["returned"]}


@pytest.fixture
def quick() -> Iterator[None]:
    with undrawn():
        yield


@pytest.fixture
def folder(tmp_path: Path, quick: None) -> Path:
    return fill(tmp_path / "run", "toy", TRUST, result=judged)


def test_trials_are_read_from_records_and_a_cell_in_two_columns_counts_once(tmp_path):
    one_network = TRUST.replace("net-{target}", "net")
    grid = load(tmp_path, one_network)
    records = {cell.key: {"result": judged(cell)} for cell in grid.cells()}
    trials = trust.trials(outcomes(grid, records), {})
    assert len([one for one in trials if one.condition == "no shift"]) == 2  # seeds
    assert len(trials) == 2 + 2 * 2 * 3
    first = trials[0]
    assert (first.source, first.gain, first.kept, first.estimate, first.high) == (50, 12, 12, 10, 15)


def test_a_network_is_at_home_on_clean_images_of_its_own_source(tmp_path):
    text = (
        TRUST
        + AT_HOME.replace("no shift", "noise")
        + 'corruptions = ["noise 3"]\n'
        + SPOILT
        + 'target = "its own source"\n'
    )
    grid = load(tmp_path, text.replace('label = "wrong"', 'label = "wrong at home"', 2))

    def result(cell: Cell) -> dict[str, Any]:
        facts = judged(cell)
        if "trust" in facts:
            clean = cell.target == OWN_SOURCE and not cell.corruption and not cell.damage
            facts["trust"]["accuracy"]["source"] = (0.9 if cell.seed else 0.8) if clean else 0.5
        return facts

    finished = outcomes(grid, {cell.key: {"result": result(cell)} for cell in grid.cells()})
    homes = trust.home_accuracies(finished)
    assert homes == pytest.approx({("toy", "net-north"): 85.0, ("toy", "net-south"): 85.0})
    trials = trust.trials(finished, homes)
    assert [one.home for one in trials] == pytest.approx([85.0] * len(trials))
    assert {one.condition for one in trials if one.mild} == {"no shift"}
    assert {one.corruption for one in trials if one.condition == "noise"} == {"noise 3"}


def test_trials_of_targets_that_were_tuned_on_are_marked_and_their_strength_is_read(tmp_path):
    grid = load(tmp_path, TRUST.replace("seeds =", 'tuned_on = ["north"]\nseeds ='))

    def result(cell: Cell) -> dict[str, Any]:
        facts = judged(cell)
        if "trust" in facts and cell.seed == 0:
            facts["trust"]["strength"] = None if cell.damage else 1.5
        return facts

    trials = trust.trials(outcomes(grid, {cell.key: {"result": result(cell)} for cell in grid.cells()}), {})
    assert {one.target for one in trials if one.tuned} == {"north"}
    assert {one.target for one in trials if not one.tuned} == {"south"}
    assert {one.strength for one in trials if one.seed == 0} == {1.5, -math.inf}
    assert {one.strength for one in trials if one.seed == 1} == {None}


def test_the_page_tells_the_goals_and_shows_the_estimates(folder):
    page = Page(report_run(folder).page)
    assert (page.mismatched, page.open) == ([], [])
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert (
        "Missed: harmful adaptations were let through in 2 of 16 runs (12.5 %), at most 2 % are wanted." in page.words
    )
    assert "Met: 94.4 % of the attainable gain was kept" in page.words  # (12 * 12 - 2 * 4) / (12 * 12)
    assert "Adaptations judged" in page.words
    assert "All grids" not in page.words
    [alt] = [str(svg["aria-label"]) for svg in page.all("svg") if "Estimated against" in str(svg["aria-label"])]
    assert "no shift: 4 runs, true -4.0 ± 0.0, estimated +10.0 ± 0.0" in alt
    assert "source on north: for each true class" in page.words
    assert not re.search(r"shift, k = \d on", page.words)  # at home it would be another place's matrix


def test_the_report_command_prints_and_writes_what_was_found(command, folder):
    report = command("report", folder)
    assert report.code == 0
    assert "### Toy: adaptations judged" in report.stdout
    line = next(row for row in report.stdout.splitlines() if row.startswith("| no shift | 5 | 4 |"))
    assert line.split(" | ")[3:] == [
        "50.0 ± 0.0", "-4.0 ± 0.0", "-2.0 ± 2.0", "+10.0 ± 0.0", "50.0 %", "4", "2 (50.0 %)", "-", "100.0 % |",
    ]  # fmt: skip
    assert "- Missed: harmful adaptations were let through in 2 of 16 runs" in report.stdout
    names = sorted(file.name for file in (folder / "tables").iterdir())
    assert names == ["toy-judged.csv", "toy-judged.md", "toy-judged.tex", "toy.csv", "toy.md", "toy.tex"]
    assert len((folder / "tables" / "toy-judged.csv").read_text().splitlines()) == 1 + 16
    assert not (folder / "judged.md").exists()
    report = json.loads(command("report", folder, "--json").stdout)
    assert report["judged"]["toy"]["all"]["runs"] == 16
    assert "judged_together" not in report


def test_several_grids_are_told_together_too(command, folder):
    fill(folder, "other", TRUST.replace("net-{target}", "other-{target}"), result=judged)
    report = command("report", folder)
    assert "### All grids: adaptations judged" in report.stdout
    assert "let through in 4 of 32 runs (12.5 %)" in report.stdout
    assert "4 of 32 runs" in (folder / "judged.md").read_text()
    assert "4 of 32 runs" in Page(folder / "report.html").words
    assert json.loads(command("report", folder, "--json").stdout)["judged_together"]["all"]["runs"] == 32


def test_grids_without_judged_cells_are_reported_as_ever(command, tmp_path, quick):
    run_folder = fill(tmp_path / "run", "plain", GRID.replace('validate = "cv"\n', "") + SHIFT)
    assert "adaptations judged" not in command("report", run_folder).stdout
    assert "judged" not in json.loads(command("report", run_folder, "--json").stdout)
    assert "Adaptations judged" not in Page(run_folder / "report.html").words

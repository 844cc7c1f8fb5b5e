"""Grids of judged cells, and what a report makes of their records."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fewshift import Auto, FewshiftError
from fewshift.lab.bench import trust
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.damage import DAMAGES
from fewshift.lab.bench.features import GRIDS
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.results import outcomes, table_of
from fewshift.lab.bench.runs import report_run
from fewshift.lab.datasets.corruptions import CORRUPTIONS
from fewshift.report.tables import with_average
from tests.helpers.pages import Page
from tests.helpers.runs import fill, invented, undrawn

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

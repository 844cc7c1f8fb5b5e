"""Cells with a corruption: other experiments than those without, on other images, from grid to report."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import replace

import pytest
import torch

from fewshift import FewshiftError
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.materials import open_materials
from fewshift.lab.bench.run import run
from fewshift.lab.datasets.corruptions import corrupted

CELL = Cell("digits", "mnist", OWN_SOURCE, "source", max_test=200)


def test_a_corruption_makes_another_experiment_and_without_one_the_key_is_what_it_was():
    named = {"dataset": "digits", "source": "mnist", "target": OWN_SOURCE, "method": "source", "max_test": 200}
    hashed = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
    assert CELL.key == hashed
    keys = {replace(CELL, corruption=corruption).key for corruption in (None, "blur 1", "blur 2")}
    assert len(keys) == 3


def test_a_record_from_before_there_were_corruptions_has_the_key_it_had():
    stored = {name: value for name, value in CELL.to_json().items() if name != "corruption"}
    assert Cell.from_json(stored) == Cell.from_json(CELL.to_json())
    assert Cell.from_json(stored).key == CELL.key


def test_a_cell_sees_corrupted_images_with_the_labels_they_had():
    materials = open_materials(None, None)
    clean = materials.domain(CELL)
    for corruption in ("inversion 3", "blur 3", "inversion 3"):
        domain = materials.domain(replace(CELL, corruption=corruption))
        assert torch.equal(domain.source, corrupted(clean, corruption).source)
        assert torch.equal(domain.labels, clean.labels)
    assert materials.domain(CELL) is clean


def test_the_source_network_is_asked_again_about_a_corrupted_image():
    materials = open_materials(None, None)
    answers = [
        materials.source_answers(replace(CELL, corruption=corruption), torch.tensor([3]), lambda _, row=row: row)
        for corruption, row in ((None, torch.zeros(1, 2)), ("blur 1", torch.ones(1, 2)), (None, torch.ones(1, 2)))
    ]
    assert [answer.tolist() for answer in answers] == [[[0, 0]], [[1, 1]], [[0, 0]]]


def test_a_stronger_corruption_costs_the_source_network_more():
    materials = open_materials(None, None)
    accuracies = [
        run(replace(CELL, corruption=corruption), materials)["accuracy"] for corruption in (None, "noise 1", "noise 3")
    ]
    assert accuracies[0] >= accuracies[1] > accuracies[2]


def test_a_cell_with_an_unknown_corruption_says_which_there_are():
    with pytest.raises(FewshiftError, match="'fog 1' is unknown: choose one of noise 1"):
        run(replace(CELL, corruption="fog 1"), open_materials(None, None))


GRID = """title = "Corrupted digits"
dataset = "digits"
source = "{origin}"
targets = ["mnist -> uci", "uci -> mnist"]
tuned_on = ["mnist -> uci"]
seeds = [0]
validate = "cv"
max_test = 100
largest_support = 2

[[rows]]
method = "adabn"
label = "no shift"
target = "its own source"
shots = [2]

[[rows]]
method = "adabn"
label = "blur"
target = "its own source"
targets = ["uci -> mnist"]
corruptions = ["blur 1", "blur 3"]
shots = [2]
"""


def test_a_grid_with_corruptions_and_halves_runs_and_is_reported(command, tmp_path):
    (tmp_path / "corrupted.toml").write_text(GRID)
    assert json.loads(command("list", "grids", "--folder", tmp_path, "--json").stdout)["grids"][0]["cells"] == 4
    bench = command("bench", tmp_path / "corrupted.toml", "--out", tmp_path / "run")
    assert (bench.code, "4 of 4 cells have a result" in bench.stdout) == (0, True)
    report = command("report", tmp_path / "run").stdout
    assert "| checked | blur | 2 | 2 |" in report
    assert "| tuned on | no shift | 2 | 1 |" in report
    assert "| blur | 2 | - |" in report  # no entry for the network that the row leaves out
    assert "in the checked half harmful adaptations were let through in" in report
    with (tmp_path / "run" / "tables" / "corrupted-judged.csv").open() as file:
        trials = list(csv.DictReader(file))
    assert [(trial["corruption"], trial["tuned"]) for trial in trials] == [
        ("", "True"),
        ("", "False"),
        ("blur 1", "False"),
        ("blur 3", "False"),
    ]
    assert [trial["home"] == trial["source"] for trial in trials[:2]] == [True, True]
    assert {trial["home"] for trial in trials[1:]} == {trials[1]["source"]}

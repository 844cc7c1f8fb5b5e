"""Grids, runs and sweeps on tiny networks."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fewshift import FewshiftError
from fewshift.core.draws import draw_support
from fewshift.core.metrics import calibration_error
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.lab.bench.cell import PRECISIONS
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.run import run, split
from fewshift.lab.bench.scenes import in_precision
from fewshift.lab.bench.sweep import missing, sweep
from fewshift.methods.adabn import AdaBN
from fewshift.methods.blend import Blend
from fewshift.methods.lccs import LCCS
from fewshift.methods.tent import Tent
from tests.helpers.bench import (
    CELL,
    CELLS,
    DEADLY,
    DOMAIN,
    TRAP,
    Trapped,
    all_gone,
    forked,
    kill_the_first,
    lines_of,
    no_materials,
    set_trap,
    sweeping,
    tiny_materials,
    trapped_driver,
    wait_for,
    with_batches_of,
)
from tests.helpers.networks import make_tiny


def test_a_result_is_what_doing_it_by_hand_gives():
    result = run(CELL, tiny_materials())
    drawn = draw_support(DOMAIN.labels, 5, 0)
    support = Support(DOMAIN.pictures[drawn], DOMAIN.labels[drawn])
    predictor = LCCS(epochs=2, grid=3).adapt(make_tiny(), Target(support), 0)
    test = split(DOMAIN, CELL)[1]
    expected = (predictor(DOMAIN.pictures[test]).argmax(1) == DOMAIN.labels[test]).double().mean()
    assert result["accuracy"] == pytest.approx(float(expected))
    assert sorted(result["support"]) == sorted(drawn.tolist())
    assert not set(result["support"]) & set(test.tolist())
    assert sum(map(sum, result["tally"])) == len(test) == 90 - 15
    assert json.loads(json.dumps(result)) == result


def test_all_rows_share_one_test_set_and_a_cap_is_the_same_for_every_method():
    cells = [
        replace(CELL, shots=shots, method=method, settings={})
        for shots, method in ((1, "adabn"), (5, "lccs"), (None, "source"))
    ]
    assert len({tuple(split(DOMAIN, cell)[1].tolist()) for cell in cells}) == 1
    capped = split(DOMAIN, replace(CELL, max_test=40))[1]
    assert len(capped) == 40
    assert set(capped.tolist()) <= set(split(DOMAIN, CELL)[1].tolist())


def test_a_network_is_fitted_and_tested_in_bfloat16():
    cell = replace(CELL, method="adabn", settings={})
    drawn, test = draw_support(DOMAIN.labels, 5, 0), split(DOMAIN, cell)[1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fitted = AdaBN().adapt(make_tiny(), Target(Support(DOMAIN.pictures[drawn], DOMAIN.labels[drawn])), 0)
        logits = torch.cat([fitted(DOMAIN.pictures[part]) for part in test.split(16)])
    assert logits.dtype is torch.bfloat16
    expected = calibration_error(logits.double().softmax(1), DOMAIN.labels[test])
    whole, half = (run(replace(cell, precision=name), tiny_materials())["calibration_error"] for name in PRECISIONS)
    assert half == pytest.approx(expected, abs=1e-12)
    assert half != whole


def test_a_network_goes_on_changing_in_bfloat16():
    cell = replace(CELL, method="tent", settings={"lr": 0.1}, shots=None, condition=Condition(batch_size=16))
    test = split(DOMAIN, cell)[1]
    test = test[cell.condition.indices(DOMAIN.labels[test], cell.seed, len(DOMAIN.classes))]
    streaming = Tent(lr=0.1).adapt(make_tiny(), Target(unlabelled=Unlabelled(DOMAIN.pictures[test])), cell.seed)
    answers = []
    for part in test.split(16):  # the rounded weights of one batch are gone with its context
        with torch.autocast("cpu", torch.bfloat16):
            answers.append(streaming(DOMAIN.pictures[part]).double().softmax(1))
    expected = calibration_error(torch.cat(answers), DOMAIN.labels[test])
    whole, half = (run(replace(cell, precision=name), tiny_materials())["calibration_error"] for name in PRECISIONS)
    assert half == pytest.approx(expected, abs=1e-12)
    assert half != whole


def test_weights_are_rounded_anew_after_every_step():
    layer, images = torch.nn.Linear(3, 2, bias=False), torch.eye(3)
    with in_precision("bfloat16", changing=True):
        layer(images)
        with torch.no_grad():
            layer.weight.add_(1)
        assert torch.equal(layer(images), layer.weight.T.bfloat16())


@pytest.mark.parametrize("method", ["source", "tent", "testtime-bn", "adabn", "late-fusion", "shot"])
def test_every_kind_of_method_runs_in_a_cell(method):
    settings = {"epochs": 1} if method in ("shot", "late-fusion") else {}
    shots = 1 if method == "late-fusion" else None
    cell = replace(CELL, method=method, settings=settings, shots=shots, condition=Condition("sequential", 10, 8))
    result = run(cell, tiny_materials())
    assert 0 <= result["accuracy"] <= 1
    assert result["realised_counts"][0] > result["realised_counts"][2]


def grid_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "g.toml"
    path.write_text(text)
    return path


GRID = """
title = "Toy"
dataset = "toy"
source = "net-{target}"
targets = ["a", "b"]
seeds = [0, 1, 2]
max_test = 50

[[rows]]
label = "Source model"
method = "source"
paper = { a = 70.0 }

[[rows]]
method = "lccs"
shots = [1, 5]
settings = { epochs = 3 }
conditions = [{ batch_size = 8 }, { order = "sequential", alpha = 10 }]
"""


def test_a_grid_is_every_row_on_every_target_with_every_seed(tmp_path):
    grid = Grid.load(grid_file(tmp_path, GRID))
    cells = grid.cells()
    assert len(cells) == 2 * 3 + 2 * 2 * 2 * 3
    assert len({cell.key for cell in cells}) == len(cells)
    assert cells[0].source == "net-a"
    assert {cell.condition for cell in grid.cells_of(grid.rows[1])} == {
        Condition(batch_size=8),
        Condition("sequential", 10),
    }


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('method = "source"', 'method = "magic"', "method 'magic'"),
        ("max_test = 50", "max_tests = 50", "'max_tests' in the grid"),
        ("shots = [1, 5]", "shot = [1, 5]", "'shot' in a row"),
        ("batch_size = 8", "size = 8", "'size' in a condition"),
        ('title = "Toy"', "title = Toy", "is no TOML file"),
        ("seeds = [0, 1, 2]", "", "lacks seeds"),
        ("seeds = [0, 1, 2]", "seeds = []", "different whole numbers from 0"),
        ("seeds = [0, 1, 2]", 'seeds = "012"', "different whole numbers from 0"),
        ("seeds = [0, 1, 2]", "seeds = [0, true]", "different whole numbers from 0"),
        ("shots = [1, 5]", "shots = [-1]", "different whole numbers from 1"),
        ("shots = [1, 5]", "shots = [5, 5]", "different whole numbers from 1"),
        ("shots = [1, 5]", "shots = 5", "different whole numbers from 1"),
        ("max_test = 50", "max_test = -5", "a whole number from 1"),
        ("max_test = 50", 'max_test = "50"', "a whole number from 1"),
        ("max_test = 50", 'precision = "float16"', "'float32' or 'bfloat16'"),
        ('targets = ["a", "b"]', 'targets = "ab"', "a list of different domains"),
        ('targets = ["a", "b"]', "targets = []", "a list of different domains"),
        ("batch_size = 8", 'batch_size = "8"', "a whole number from 1"),
        ("alpha = 10", "alpha = inf", "a number from 1"),
        ("alpha = 10", "alpha = 0.5", "g.toml.*alpha=0.5"),
        ("paper = { a = 70.0 }", 'paper = { a = "x" }', "values by target"),
        ("paper = { a = 70.0 }", "paper = { c = 70.0 }", "'c', which is no target"),
        ('title = "Toy"', "title = 5", "a word"),
        ("shots = [1, 5]", "shots = [1, 50]", "set largest_support = 50"),
    ],
)
def test_a_mistake_in_a_grid_is_named(tmp_path, old, new, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        Grid.load(grid_file(tmp_path, GRID.replace(old, new, 1)))
    with pytest.raises(FewshiftError, match="there is no grid"):
        Grid.load(tmp_path / "none.toml")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sweep_runs_what_is_missing_and_goes_on_when_one_fails(tmp_path, workers):
    heard = []
    cells = [*CELLS, replace(CELL, source="broken")]
    sweep(cells, tmp_path, tiny_materials, (), workers=workers, tell=heard.append)
    records = Records(tmp_path).read()
    assert len(records) == len(heard) == 5
    assert records[cells[-1].key]["error"] == "RuntimeError: no such network"
    assert all("result" in records[cell.key] for cell in CELLS)
    heard.clear()
    sweep(cells, tmp_path, tiny_materials, (), workers=1, tell=heard.append)
    assert [record["key"] for record in heard] == [cells[-1].key]  # only the failed one again


def test_a_worker_that_dies_is_replaced_and_a_cell_in_which_three_die_has_failed(tmp_path):
    trap = set_trap(tmp_path)
    kill_the_first(trap)
    heard = []
    deadly, trapped = with_batches_of(DEADLY), with_batches_of(TRAP)  # of one group, and CELLS[0] is its first
    cells = [*CELLS, deadly, trapped]
    sweep(cells, tmp_path, Trapped, (str(trap),), workers=2, tell=heard.append)
    records = Records(tmp_path).read()
    assert sorted(record["key"] for record in heard) == sorted(cell.key for cell in cells)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 6
    assert records[deadly.key]["error"].startswith("the worker process died three times in this cell")
    assert all("result" in records[cell.key] for cell in cells if cell != deadly)


@pytest.mark.parametrize("workers", [1, 2])
def test_materials_that_cannot_be_opened_ends_the_sweep(tmp_path, workers):
    with pytest.raises(FewshiftError, match="build some"):
        sweep(CELLS, tmp_path, no_materials, (), workers=workers, tell=print)
    assert not Records(tmp_path).read()


def test_an_engine_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FewshiftError, match="choose local or ray"):
        sweep(CELLS, tmp_path, tiny_materials, (), workers=1, tell=print, engine="steam")
    with pytest.raises(FewshiftError, match="choose the engine ray"):
        sweep(CELLS, tmp_path, tiny_materials, (), workers=1, tell=print, address="auto")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_driver(tmp_path, end):
    with trapped_driver(tmp_path) as (driver, pipe):
        os.kill(driver.pid, end)
        driver.join()
        assert all_gone(pipe)
    assert len(Records(tmp_path).read()) == 2


def test_a_cell_named_twice_is_run_once(tmp_path):
    assert len(missing([CELL, CELL], Records(tmp_path))) == 1


def test_a_kill_loses_at_most_the_running_cell(tmp_path):
    process = forked(one_worker, str(tmp_path), 0.1)
    wait_for(lambda: lines_of(tmp_path / "heard") >= 1, process)
    process.kill()
    process.join()
    done = len(Records(tmp_path).read())
    assert 1 <= done < 4
    heard = []
    sweep(CELLS, tmp_path, tiny_materials, (), workers=1, tell=heard.append)
    assert len(heard) == 4 - done
    assert len(Records(tmp_path).read()) == 4


def test_two_processes_on_one_folder_share_the_work(tmp_path):
    processes = [forked(one_worker, str(tmp_path), 0.1) for _ in range(2)]
    for process in processes:
        process.join()
    assert lines_of(tmp_path / "heard") == lines_of(tmp_path / "records.jsonl") == 4


def one_worker(folder: str, pause: float) -> None:
    sweeping(folder, tiny_materials, (pause,), f"{folder}/heard", workers=1)


def test_networks_and_domains_are_loaded_once():
    loads = []
    materials = Materials(
        lambda cell: loads.append("network") or make_tiny(), lambda cell: loads.append("domain") or DOMAIN
    )
    for cell in CELLS:
        run(replace(cell, method="source", settings={}), materials)
    assert sorted(loads) == ["domain", "network"]


def test_unlabelled_images_are_neither_support_nor_test(monkeypatch):
    seen = []
    fit = Blend.fit

    def watched(method, network, target, seed=0):
        seen.append(target.unlabelled.batch(torch.arange(len(target.unlabelled))))
        return fit(method, network, target, seed)

    monkeypatch.setattr(Blend, "fit", watched)
    cell, materials = replace(CELL, method="blend", settings={}, unlabelled=20, max_test=40), tiny_materials()
    run(cell, materials)
    domain = materials.domain(cell)
    known = torch.cat([domain.images(part) for part in split(domain, cell)])
    assert len(seen[0]) == 20
    assert not any(torch.equal(image, other) for image in seen[0] for other in known)


def test_more_unlabelled_images_than_are_left_are_refused():
    cell = replace(CELL, method="blend", settings={}, unlabelled=20)
    with pytest.raises(FewshiftError, match="20 unlabelled images are wanted and 0 are neither"):
        run(cell, tiny_materials())

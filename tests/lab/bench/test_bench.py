"""Grids, runs and sweeps on tiny networks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import pytest
import torch
from torch import Tensor

from fewshift import FewshiftError
from fewshift.core.support import Support, Target, draw_support
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.run import run, split
from fewshift.lab.bench.sweep import missing, sweep
from fewshift.methods.lccs import LCCS
from tests.helpers.networks import make_support, make_tiny


@dataclass
class Held:
    """A domain in memory."""

    pictures: Tensor
    labels: Tensor
    classes: tuple[str, ...] = ("ant", "bee", "cat")

    skip_rare: bool = False

    def images(self, indices: Tensor) -> Tensor:
        return self.pictures[indices]

    def batches(self, batches):
        return (self.images(batch) for batch in batches)


DOMAIN = Held(make_support(30).images, make_support(30).labels)


def tiny_materials(pause: float = 0.0) -> Materials:
    def network(cell: Cell):
        time.sleep(pause)
        if cell.source == "broken":
            raise RuntimeError("no such network")
        return make_tiny()

    return Materials(network, lambda cell: DOMAIN)


class Trapped(Materials):
    """A materials with two perils, which cells meet by their batch size."""

    def __init__(self, trap: str) -> None:
        super().__init__(lambda cell: make_tiny(), lambda cell: DOMAIN)
        self.trap = Path(trap)

    def network(self, cell: Cell):
        if cell.condition.batch_size == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if cell.condition.batch_size == TRAP and self.trap.exists():
            with self.trap.open("w") as pipe:  # open as long as this process lives
                print(os.getpid(), file=pipe, flush=True)
                threading.Event().wait()
        return super().network(cell)


DEADLY, TRAP = 7, 9


def set_trap(folder: Path) -> Path:
    """A named pipe through which a trapped process tells its number."""
    os.mkfifo(folder / "trap")
    return folder / "trap"


def kill_the_first(trap: Path) -> None:
    """Wait for a trapped process in the background and kill it; later ones pass."""

    def kill() -> None:
        with trap.open() as pipe:
            process = int(pipe.readline())
            trap.unlink()
            os.kill(process, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


CELL = Cell("toy", "tiny", "place", "lccs", {"epochs": 2, "grid": 3}, shots=5, largest_support=5)


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


CELLS = [replace(CELL, seed=seed) for seed in range(4)]


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


def with_batches_of(size: int, cell: Cell = CELL) -> Cell:
    return replace(cell, condition=Condition(batch_size=size))


@pytest.mark.slow
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


def no_materials() -> Materials:
    raise FewshiftError("there is no materials: build one")


@pytest.mark.parametrize("workers", [1, 2])
def test_materials_that_cannot_be_opened_ends_the_sweep(tmp_path, workers):
    with pytest.raises(FewshiftError, match="build one"):
        sweep(CELLS, tmp_path, no_materials, (), workers=workers, tell=print)
    assert not Records(tmp_path).read()


def test_an_engine_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FewshiftError, match="choose local or ray"):
        sweep(CELLS, tmp_path, tiny_materials, (), workers=1, tell=print, engine="steam")
    with pytest.raises(FewshiftError, match="choose the engine ray"):
        sweep(CELLS, tmp_path, tiny_materials, (), workers=1, tell=print, address="auto")


TRAPPING = """
import sys
from fewshift.lab.bench.sweep import sweep
from tests.lab.bench.test_bench import CELLS, TRAP, Trapped, with_batches_of

if __name__ == "__main__":
    cells = [*CELLS, *(with_batches_of(TRAP, cell) for cell in CELLS)]
    folder, trap, engine = sys.argv[1:]
    tell = lambda record: print("one", flush=True)
    sweep(cells, folder, Trapped, (trap,), workers=2, tell=tell, engine=engine)
"""


@contextmanager
def trapped_driver(folder: Path, engine: str):
    """A driver whose two workers did a cell each and are trapped in the next, and a pipe they hold while they live."""
    trap = set_trap(folder)
    command = [sys.executable, "-c", TRAPPING, str(folder), str(trap), engine]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, cwd=Path(__file__).parents[3]) as driver:
        try:
            told = [driver.stdout.readline() for _ in range(2)]  # in the middle of their groups
            assert told == ["one\n", "one\n"], driver.stderr.read()
            with trap.open() as pipe:
                assert pipe.readline() != pipe.readline()
                trap.unlink()
                yield driver, pipe
        finally:
            driver.kill()


def all_gone(pipe: TextIO) -> bool:
    """Whether everybody who had the pipe open ends within a minute."""
    return bool(select.select([pipe], [], [], 60)[0]) and not pipe.read()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_driver(tmp_path, end):
    with trapped_driver(tmp_path, "local") as (driver, pipe):
        driver.send_signal(end)
        driver.wait(60)
        assert all_gone(pipe)
    assert len(Records(tmp_path).read()) == 2


def test_a_cell_named_twice_is_run_once(tmp_path):
    assert len(missing([CELL, CELL], Records(tmp_path))) == 1


SWEEPING = """
import sys
from fewshift.lab.bench.sweep import sweep
from tests.lab.bench.test_bench import CELLS, tiny_materials
tell = lambda record: print("one", flush=True)
sweep(CELLS, sys.argv[1], tiny_materials, (float(sys.argv[2]),), workers=1, tell=tell)
"""


def start(folder: Path, pause: float) -> subprocess.Popen:
    command = [sys.executable, "-c", SWEEPING, str(folder), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def test_a_kill_loses_at_most_the_running_cell(tmp_path):
    with start(tmp_path, 0.0) as process:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    done = len(Records(tmp_path).read())
    assert done >= 1
    heard = []
    sweep(CELLS, tmp_path, tiny_materials, (), workers=1, tell=heard.append)
    assert len(heard) == 4 - done
    assert len(Records(tmp_path).read()) == 4


def test_two_processes_on_one_folder_share_the_work(tmp_path):
    with start(tmp_path, 0.2) as first, start(tmp_path, 0.2) as second:
        told = [process.communicate(timeout=120)[0].count("one") for process in (first, second)]
    assert sum(told) == 4
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4


def test_networks_and_domains_are_loaded_once():
    loads = []
    materials = Materials(
        lambda cell: loads.append("network") or make_tiny(), lambda cell: loads.append("domain") or DOMAIN
    )
    for cell in CELLS:
        run(replace(cell, method="source", settings={}), materials)
    assert sorted(loads) == ["domain", "network"]
    assert torch.is_tensor(DOMAIN.labels)

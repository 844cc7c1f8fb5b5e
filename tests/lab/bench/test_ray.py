"""Sweeps on a real Ray of two workers: nothing lost, nothing done twice, whoever dies."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from fewshift import FewshiftError
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.sweep import sweep
from tests.helpers.bench import (
    CELL,
    CELLS,
    TRAP,
    TRAPPED_CELLS,
    Trapped,
    all_gone,
    kill_the_first,
    lines_of,
    no_materials,
    set_trap,
    tiny_materials,
    trapped_driver,
    with_batches_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def on_ray(ray, tmp_path):
    """Sweep into the test's folder, and return the keys that were told."""

    def go(cells, make=tiny_materials, arguments=()):
        heard = []
        sweep(cells, tmp_path, make, arguments, workers=2, tell=heard.append, engine="ray")
        return [record["key"] for record in heard]

    return go


def keys(cells):
    return sorted(cell.key for cell in cells)


def untimed(record):
    result = record["result"]
    notes = {key: value for key, value in result["notes"].items() if "seconds" not in key}
    return {**result, "notes": notes, "seconds": None}


def test_results_are_those_of_the_local_engine_and_a_failing_cell_is_a_record(on_ray, tmp_path):
    broken = replace(CELL, source="broken")
    cells = [broken, *CELLS, with_batches_of(8)]
    assert sorted(on_ray(cells)) == keys(cells)
    here = tmp_path / "local"
    sweep(cells, here, tiny_materials, (), workers=1, tell=lambda record: None)
    there, local = Records(tmp_path).read(), Records(here).read()
    assert there[broken.key]["error"] == local[broken.key]["error"] == "RuntimeError: no such network"
    assert all(untimed(there[cell.key]) == untimed(local[cell.key]) for cell in cells if cell != broken)
    assert on_ray(cells) == [broken.key]  # only the failed one again


def test_a_killed_worker_costs_its_cell_a_second_try(on_ray, tmp_path, capfd):
    trap = set_trap(tmp_path)
    kill_the_first(trap)
    cells = [*CELLS, with_batches_of(TRAP, CELLS[1])]
    assert sorted(on_ray(cells, Trapped, (str(trap),))) == keys(cells)
    assert not trap.exists()  # somebody was killed
    assert lines_of(tmp_path / "records.jsonl") == len(cells)
    assert all("result" in record for record in Records(tmp_path).read().values())
    assert capfd.readouterr() == ("", "")


def test_after_the_kill_of_a_driver_only_what_is_missing_is_run(ray, on_ray, tmp_path):
    address = ray.get_runtime_context().gcs_address
    with trapped_driver(tmp_path, engine="ray", address=address) as (driver, pipe):
        driver.kill()
        assert all_gone(pipe)
    done = Records(tmp_path).read()
    assert len(done) == 2
    left = [cell for cell in TRAPPED_CELLS if cell.key not in done]
    assert sorted(on_ray(TRAPPED_CELLS, Trapped, (str(tmp_path / "trap"),))) == keys(left)
    assert lines_of(tmp_path / "records.jsonl") == len(TRAPPED_CELLS)


def test_cells_that_another_driver_has_are_left_to_it(on_ray, tmp_path):
    with Records(tmp_path).claim(CELLS[0].key):
        assert sorted(on_ray(CELLS)) == keys(CELLS[1:])
    assert on_ray(CELLS) == [CELLS[0].key]


def test_materials_that_cannot_be_opened_ends_the_sweep(on_ray, tmp_path):
    with pytest.raises(FewshiftError, match="build some"):
        on_ray(CELLS, no_materials)
    assert not Records(tmp_path).read()


def test_a_missing_ray_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FewshiftError, match=r'pip install "fewshift\[ray\]"'):
        sweep(CELLS, tmp_path, tiny_materials, (), workers=2, tell=print, engine="ray")

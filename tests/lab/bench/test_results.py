"""From records to tables: a new metric is one row of a table."""

from __future__ import annotations

from fewshift.core.metrics import METRICS, Metric
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.results import table_of
from fewshift.lab.bench.runs import report_run
from fewshift.lab.bench.sweep import sweep
from tests.helpers.bench import tiny_materials
from tests.helpers.pages import Page

GRID = """
title = "Toy"
dataset = "toy"
source = "tiny"
targets = ["here"]
seeds = [0, 1]
metric = "error_rate"
rows = [{method = "source"}, {method = "adabn", shots = [1, 5]}]
"""


def test_a_new_metric_is_one_row_and_reaches_records_tables_and_figures(tmp_path, monkeypatch):
    def error_rate(predicted):
        return 1 - float(predicted.tally.diagonal().sum() / predicted.tally.sum())

    row = Metric("error_rate", "share of images that are wrong", error_rate, "error", higher_is_better=False)
    monkeypatch.setitem(METRICS, row.name, row)
    records = Records(tmp_path)
    (tmp_path / "toy.toml").write_text(GRID)
    records.keep_grid(tmp_path / "toy.toml")
    grid = Grid.load(tmp_path / "toy.toml")
    sweep(grid.cells(), tmp_path, tiny_materials, (), workers=1, tell=lambda _: None)

    results = [record["result"] for record in records.read().values()]
    assert len(results) == 6
    assert all(abs(result["error_rate"] + result["accuracy"] - 1) < 1e-6 for result in results)
    table = table_of(grid, records.read())
    assert table.metric == "share of images that are wrong in %"
    assert not table.ranked  # the largest is not the best
    assert ">error in %</text>" in Page(report_run(tmp_path).page).source

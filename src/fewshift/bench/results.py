"""From records to the table of a grid."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from fewshift.bench.cell import Cell
from fewshift.bench.grid import Grid, Row
from fewshift.bench.record import Record
from fewshift.data.collections import find_collection
from fewshift.report.tables import Entry, Line, Table
from fewshift.streams import Condition

RULE = "Settings are fixed per method; none was chosen on test labels."


def table_of(grid: Grid, records: Mapping[str, Record]) -> Table:
    """Rows by shots and condition, targets as columns; cells without a result are left empty."""
    metric = find_collection(grid.dataset).metric
    cap = f", at most {grid.max_test} test images per domain" if grid.max_test else ""
    lines = [
        Line(
            row.label or row.method,
            shots,
            _words(condition, row),
            tuple(_entry(grid, row, target, shots, condition, records, metric) for target in grid.targets),
        )
        for row in grid.rows
        for shots, condition in product(row.shots or (None,), row.conditions)
    ]
    return Table(grid.title, f"{metric} in %{cap}", RULE, grid.targets, tuple(lines))


def _entry(
    grid: Grid,
    row: Row,
    target: str,
    shots: int | None,
    condition: Condition,
    records: Mapping[str, Record],
    metric: str,
) -> Entry:
    cells = [it for it in grid.cells_of(row) if (it.target, it.shots, it.condition) == (target, shots, condition)]
    values = {it.seed: 100 * _result(records, it)[metric] for it in cells if _result(records, it)}
    paper = (row.paper or {}).get(target)
    if isinstance(paper, Mapping):
        paper = paper.get(str(shots))
    return Entry(values, paper if isinstance(paper, (int, float)) else None)


def _result(records: Mapping[str, Record], cell: Cell) -> Mapping[str, float]:
    found: Mapping[str, float] = records.get(cell.key, {}).get("result", {})
    return found


def _words(condition: Condition, row: Row) -> str:
    if len(row.conditions) == 1 and condition == Condition():
        return ""
    tail = "" if condition.alpha is None else f", alpha {condition.alpha:g}"
    return f"{condition.order}, batch {condition.batch_size}{tail}"

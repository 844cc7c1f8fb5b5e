"""The outcomes of a grid from its records: its table, and groups of those that belong together."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch

from fewshift.core.labels import IMAGES
from fewshift.core.method import Method
from fewshift.core.metrics import METRICS, Metric
from fewshift.files.shapes import is_finite
from fewshift.lab.bench.cell import PRECISIONS, Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.grid import Grid, GridRow, TargetColumn
from fewshift.lab.bench.record import Record
from fewshift.lab.bench.run import sees_stream
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.report.tables import Entry, Line, Table

RULE = "Settings are fixed per method; none was chosen on test labels."


@dataclass(frozen=True)
class Outcome:
    """A finished cell, and where it stands in the table."""

    row: GridRow
    column: TargetColumn
    cell: Cell
    result: Mapping[str, Any]
    value: float  # what the grid measures; scores in percent


T = TypeVar("T")
K = TypeVar("K")
Group = Sequence[Outcome]


def metric_of(grid: Grid) -> Metric:
    """The grid's metric, or that of its data set."""
    known = COLLECTIONS.get(grid.columns[0].dataset)
    return METRICS[grid.metric or (known.metric if known else IMAGES.metric)]


def outcomes(grid: Grid, records: Mapping[str, Record]) -> list[Outcome]:
    """All finished cells, in the order of the table."""
    return [
        outcome
        for row in grid.rows
        for column, shots, condition in product(grid.columns, row.shots or (None,), row.conditions)
        for outcome in _finished(grid, row, column, shots, condition, records)
    ]


@dataclass(frozen=True)
class PlacedLine:
    """A line of a grid's table, and what it is of."""

    row: GridRow
    shots: int | None
    condition: Condition
    line: Line


def placed_lines(grid: Grid, records: Mapping[str, Record]) -> list[PlacedLine]:
    """Rows by shots and condition, with an entry for each target; entries without a result are empty."""
    streams_differ = {condition for row in grid.rows for condition in row.conditions} != {Condition()}
    return [
        PlacedLine(
            row,
            shots,
            condition,
            Line(
                row.name,
                shots,
                _words(condition) if streams_differ else "",
                tuple(
                    Entry(
                        _by_seed(row, _finished(grid, row, column, shots, condition, records)),
                        _printed(row, column.label, shots),
                    )
                    for column in grid.columns
                ),
                _printed(row, "average", shots),
                among=f"{condition.order} {condition.alpha} {row.target} {row.damage} {row.corruptions}",
            ),
        )
        for row in grid.rows
        for shots, condition in product(row.shots or (None,), row.conditions)
    ]


def table_of(grid: Grid, records: Mapping[str, Record]) -> Table:
    """All lines, targets as columns."""
    cap = f", at most {grid.max_test} test images per domain" if grid.max_test else ""
    bits = f", networks compute in {grid.precision}" if grid.precision != PRECISIONS[0] else ""
    return Table(
        grid.title,
        f"{what(grid)}{cap}{bits}",
        RULE,
        tuple(column.label for column in grid.columns),
        tuple(placed.line for placed in placed_lines(grid, records)),
        ranked=grid.measure == "score" and metric_of(grid).higher_is_better,
        digits=1 if grid.measure == "score" else 2,
    )


def what(grid: Grid) -> str:
    """What the numbers are."""
    words = {
        "v": "the chosen blend v",
        "adapt_seconds": "seconds of adaptation",
        "epoch_seconds": "seconds of an epoch",
    }
    return words.get(grid.measure) or f"{metric_of(grid).title} in %"


def _finished(
    grid: Grid,
    row: GridRow,
    column: TargetColumn,
    shots: int | None,
    condition: Condition,
    records: Mapping[str, Record],
) -> list[Outcome]:
    finished = []
    for cell in grid.cells_at(row, column, shots, condition):
        result = records.get(cell.key, {}).get("result", {})
        value = _measured(grid, result) if result else None
        if value is not None:
            finished.append(Outcome(row, column, cell, result, value))
    return finished


def _by_seed(row: GridRow, finished: Group) -> dict[int, float]:
    """One value per seed: the mean over the row's corruptions, for seeds that have all of them."""
    seeds = grouped(finished, lambda outcome: outcome.cell.seed)
    return {
        seed: statistics.fmean(outcome.value for outcome in group)
        for seed, group in seeds.items()
        if len(group) == len(row.corruptions or (None,))
    }


def _measured(grid: Grid, result: Mapping[str, Any]) -> float | None:
    """The number that the grid measures; None where this method has none."""
    if grid.measure == "score":
        score = result.get(metric_of(grid).name)
        return None if score is None else 100 * score
    if grid.measure == "adapt_seconds":
        value = result.get("seconds", {}).get("adapt")
    else:
        value = result.get("notes", {}).get(grid.measure)
    return float(value) if is_finite(value) else None


def _printed(row: GridRow, column: str, shots: int | None) -> float | None:
    paper = (row.paper or {}).get(column)
    if isinstance(paper, Mapping):
        paper = paper.get(str(shots))
    return float(paper) if isinstance(paper, (int, float)) else None


def _words(condition: Condition) -> str:
    tail = "" if condition.alpha is None else f", alpha {condition.alpha:g}"
    return f"{condition.order}, batch {condition.batch_size}{tail}"


# groups


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, both in the order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def identity(outcome: Outcome) -> tuple[Any, ...]:
    """The same for outcomes that differ only in k and condition; the method comes first."""
    settings = json.dumps(outcome.cell.settings, sort_keys=True)
    return outcome.cell.method, outcome.row.name, settings, outcome.row.source


def with_shots(outcome: Outcome) -> tuple[Any, ...]:
    """The same for outcomes that differ only in the condition."""
    return (*identity(outcome), outcome.cell.shots)


def name_of(outcome: Outcome, shots: float | None = None) -> str:
    """The label of the row, and k where there is one."""
    k = outcome.cell.shots if shots is None else shots
    return outcome.row.name if k is None else f"{outcome.row.name}, k = {k:g}"


def streams(outcome: Outcome) -> bool:
    """Whether the result depends on the stream of test images."""
    return is_streamed(outcome.cell.build(), outcome.cell.shots)


def is_streamed(method: Method, shots: int | None) -> bool:
    """Whether the results of a method depend on the stream of test images."""
    return sees_stream(method, torch.empty(shots or 0))


def images_of(result: Mapping[str, Any]) -> int:
    """How many test images it was measured on."""
    if "image_iou" in result:  # the tally is of pixels
        return len(result["image_iou"])
    return sum(map(sum, result.get("tally", ())))


def mix_of(outcome: Outcome) -> str:
    """The order of the stream and its mix of classes, in words."""
    condition = outcome.cell.condition
    return condition.order if condition.alpha is None else f"{condition.order}, alpha {condition.alpha:g}"


def one_per_fit(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The first of the outcomes that differ only in the stream: they share what was learned."""
    return [group[0] for group in grouped(outcomes, lambda outcome: outcome.cell.fit_key).values()]


def best_group(grid: Grid, groups: Iterable[Group]) -> Group:
    """The group on most targets, and among these with the best score; the first if there are several."""
    metric = metric_of(grid)
    sign = 1 if metric.higher_is_better else -1

    def rank(group: Group) -> tuple[int, float]:
        scores = [sign * outcome.result[metric.name] for outcome in group if metric.name in outcome.result]
        return len({outcome.column for outcome in group}), statistics.fmean(scores) if scores else -math.inf

    return max(groups, key=rank, default=[])


def points_of(grid: Grid, outcomes: Group, x: Callable[[Outcome], float]) -> dict[float, list[float]]:
    """For each x, in order, one value per seed: the mean over all targets, for seeds that have all of them."""
    points = {at: _per_seed(grid, group) for at, group in sorted(grouped(outcomes, x).items())}
    return {at: values for at, values in points.items() if values}


def _per_seed(grid: Grid, outcomes: Group) -> list[float]:
    seeds = grouped(outcomes, lambda outcome: outcome.cell.seed)
    by_target = [grouped(group, lambda outcome: outcome.column.label) for _, group in sorted(seeds.items())]
    return [
        statistics.fmean(statistics.fmean(outcome.value for outcome in group) for group in targets.values())
        for targets in by_target
        if len(targets) == len(grid.columns)
    ]


def brief(grid: Grid) -> str:
    """What the numbers are, where space is narrow."""
    return f"{metric_of(grid).brief} in %" if grid.measure == "score" else what(grid)

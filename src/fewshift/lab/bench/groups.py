"""Groups of outcomes: which belong together, what they are called, and their scores."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.results import Outcome, metric_of, what
from fewshift.lab.bench.run import sees_stream

T = TypeVar("T")
K = TypeVar("K")
Group = Sequence[Outcome]


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
    return sees_stream(outcome.cell.build(), torch.empty(outcome.cell.shots or 0))


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
    by_target = [{outcome.column.label: outcome.value for outcome in group} for _, group in sorted(seeds.items())]
    return [statistics.fmean(values.values()) for values in by_target if len(values) == len(grid.columns)]


def brief(grid: Grid) -> str:
    """What the numbers are, where space is narrow."""
    return f"{metric_of(grid).brief} in %" if grid.measure == "score" else what(grid)

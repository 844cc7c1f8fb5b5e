"""Curves: scores against batch size, class imbalance or shots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.results import (
    Group,
    Outcome,
    brief,
    grouped,
    identity,
    mix_of,
    name_of,
    points_of,
    streams,
    what,
    with_shots,
)
from fewshift.report import figures, run_figures
from fewshift.report import prose as words
from fewshift.report.pictures import Picture
from fewshift.report.run_figures import Curve


@dataclass(frozen=True)
class Axis:
    """The horizontal axis: its name, its value for an outcome, and for which outcomes it does not matter."""

    name: str
    of: Callable[[Outcome], float]
    irrelevant: Callable[[Outcome], bool]
    shots_in_name: bool = True


BATCH = Axis("test batch size", lambda outcome: outcome.cell.condition.batch_size, lambda outcome: not streams(outcome))
ALPHA = Axis(
    "alpha, largest to smallest class", lambda outcome: outcome.cell.condition.alpha or 1, lambda outcome: False
)
SHOTS = Axis(
    "k, labelled images of each class",
    lambda outcome: outcome.cell.shots or 0,
    lambda outcome: outcome.cell.shots is None,
    shots_in_name=False,
)


def over_batches(grid: Grid, outcomes: Group, key: str) -> list[Picture]:
    """One picture for each order and mix of classes."""
    return [
        picture
        for number, (mix, group) in enumerate(grouped(outcomes, mix_of).items())
        for picture in _against(BATCH, grid, group, mix, f"{key}batch{number}")
    ]


def over_alphas(grid: Grid, outcomes: Group, key: str) -> list[Picture]:
    """One picture for each order and batch size; methods that predict image by image are in all of them."""
    pictures = []
    for order, group in grouped(outcomes, lambda outcome: outcome.cell.condition.order).items():
        sizes = grouped(filter(streams, group), BATCH.of)
        varied = sorted(size for size, members in sizes.items() if len(set(map(ALPHA.of, members))) > 1)
        for size in varied or [0]:
            joined = [outcome for outcome in group if not streams(outcome) or BATCH.of(outcome) == size]
            where = f"{order}, batches of {size:g}" if size else order
            pictures += _against(
                ALPHA, grid, joined, where, f"{key}alpha-{order}-{size}", " Alpha 1: classes as found."
            )
    return pictures


def over_shots(grid: Grid, outcomes: Group, key: str) -> list[Picture]:
    """One picture for each order and mix of classes; methods that depend on the batch size have the largest."""
    pictures = []
    for number, (mix, group) in enumerate(grouped(outcomes, mix_of).items()):
        largest = max(map(BATCH.of, filter(streams, group)), default=0)
        joined = [outcome for outcome in group if not streams(outcome) or BATCH.of(outcome) == largest]
        note = f" Rows that see a stream: batches of {largest:g}." if largest else ""
        pictures += _against(SHOTS, grid, joined, mix, f"{key}shots{number}", note)
    return pictures


def _against(axis: Axis, grid: Grid, outcomes: Group, where: str, key: str, note: str = "") -> list[Picture]:
    """One line per row, averaged over the targets within a seed; no picture if every line has a single point."""
    lines = _lines(axis, grid, outcomes)
    if all(len(curve.points) < 2 for curve in lines.values()):
        return []
    ticks = sorted({x for curve in lines.values() if not curve.level for x in curve.points})
    least = figures.LEAST_POINTS if grid.measure == "score" else figures.LEAST_SPAN
    targets = words.counted(len(grid.columns), "target")
    dashed = " Dashed: rows that do not depend on it." if any(curve.level for curve in lines.values()) else ""
    pictures = []
    for number, curves in enumerate(_readable(lines)):
        facts = "; ".join(f"{curve.name}: {_described(curve)}" for curve in curves)
        svg = run_figures.curves(
            curves,
            across=axis.name,
            label=brief(grid),
            ticks=ticks,
            span=run_figures.span_of(lines.values(), least),
            key=f"{key}-{number}",
            alt=f"{words.sentence(what(grid))} against {axis.name}; {where}. {facts}.",
        )
        caption = (
            f"{words.sentence(what(grid))} against {axis.name}; {where}. Mean over {targets}, ± standard deviation "
            f"over the seeds.{dashed}{note}"
        )
        pictures.append(Picture(svg, caption))
    return pictures


def _lines(axis: Axis, grid: Grid, outcomes: Group) -> dict[tuple[Any, ...], Curve]:
    """The rows that have a value, by their identity."""
    lines = {}
    row_of = with_shots if axis.shots_in_name else identity
    for line, group in grouped(outcomes, lambda outcome: (*row_of(outcome), axis.irrelevant(outcome))).items():
        if points := points_of(grid, group, axis.of):
            name = name_of(group[0]) if axis.shots_in_name else group[0].row.name
            lines[line] = Curve(name, points, level=len(points) == 1 and axis.irrelevant(group[0]))
    return lines


def _readable(lines: Mapping[tuple[Any, ...], Curve]) -> list[list[Curve]]:
    """As many pictures as the lines need; the source network and LCCS are in each, to compare with."""
    if len(lines) <= run_figures.MOST_LINES:
        return [list(lines.values())]
    common = [next((line for line in lines if line[0] == method), None) for method in ("source", "lccs")]
    repeated = [lines[line] for line in common if line is not None]
    others = [curve for line, curve in lines.items() if line not in common]
    parts = math.ceil(len(others) / (run_figures.MOST_LINES - len(repeated)))
    size = math.ceil(len(others) / parts)
    return [repeated + others[start : start + size] for start in range(0, len(others), size)]


def _described(curve: Curve) -> str:
    if curve.level:
        return f"{words.over_draws(next(iter(curve.points.values())))} throughout"
    return ", ".join(f"{words.over_draws(values)} at {x:g}" for x, values in curve.points.items())

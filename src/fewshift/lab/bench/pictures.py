"""Pictures: the figures that the records of a grid allow, with captions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fewshift.lab.bench.cell import FeatureCell
from fewshift.lab.bench.curves import BATCH, SHOTS, over_alphas, over_batches, over_shots
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.learned import chosen_v, layers, objectives
from fewshift.lab.bench.results import Group, Outcome, grouped, images_of, one_per_fit, streams
from fewshift.report import prose as words
from fewshift.report import run_figures as figures
from fewshift.report.pictures import Picture


def pictures_of(grid: Grid, outcomes: Group, key: str) -> list[Picture]:
    """Every figure of the grid, each kind only where it has data."""
    drawings = (over_batches, over_alphas, over_shots, chosen_v, objectives, layers, _costs)
    return [picture for draw in drawings for picture in draw(grid, outcomes, key)]


def _costs(grid: Grid, outcomes: Group, key: str) -> list[Picture]:
    """Seconds of adaptation, and milliseconds of a prediction, for each row and k."""
    timed = [outcome for outcome in outcomes if "seconds" in outcome.result and images_of(outcome.result)]
    several = len(set(map(BATCH.of, filter(streams, timed)))) > 1

    def name(outcome: Outcome) -> str:
        batched = several and streams(outcome)
        return f"{outcome.row.name}, batch {BATCH.of(outcome):g}" if batched else outcome.row.name

    # a fit is shared by all its streams, and has predicted every image of the largest
    largest_first = sorted(
        (outcome for outcome in timed if not streams(outcome)), key=lambda each: -images_of(each.result)
    )
    once = {id(outcome) for outcome in one_per_fit(largest_first)}
    rows = grouped((outcome for outcome in timed if streams(outcome) or id(outcome) in once), name)
    if not rows:
        return []
    pictures = []
    for label, cost in COSTS.items():
        costs = {
            row: {kind: list(map(cost, members)) for kind, members in sorted(grouped(group, _kind).items(), key=_k)}
            for row, group in rows.items()
        }
        facts = "; ".join(
            f"{row}, {kind}: {statistics.fmean(values):.3g}"
            for row, kinds in costs.items()
            for kind, values in kinds.items()
        )
        svg = figures.costs(costs, label=label, key=f"{key}{label}", alt=f"{words.sentence(label)}, mean. {facts}.")
        caption = (
            f"{words.sentence(label)}: mean over targets and seeds, and the range. It depends on the machine, and on "
            "what else ran there."
        )
        pictures.append(Picture(svg, caption))
    return pictures


COSTS: dict[str, Callable[[Outcome], float]] = {
    "seconds of adaptation": lambda outcome: float(outcome.result["seconds"]["adapt"]),
    "milliseconds for an answer": lambda outcome: (
        1000 * float(outcome.result["seconds"]["predict"]) / images_of(outcome.result)
    ),
}


def _kind(outcome: Outcome) -> str:
    return "no labels" if outcome.cell.shots is None else f"k = {outcome.cell.shots}"


def _k(kind: tuple[str, Group]) -> float:
    return SHOTS.of(kind[1][0])


def clouds(compared: Sequence[tuple[FeatureCell, Mapping[str, Any]]], key: str) -> list[Picture]:
    """Both samples of each comparison that has a result, before and after the layer."""
    pictures = []
    for number, (cell, result) in enumerate(compared):
        for when in ("before", "after"):
            distance = f"gap {result[f'gap_{when}']:.2f}"
            samples = list(zip(result["samples"], result[when], strict=True))
            svg = figures.clouds(
                samples,
                _middles(result[when][0], [result["classes"][label] for label in result["labels"][0]]),
                key=f"{key}cloud{number}-{when}",
                alt=f"{cell.label}: features {when} the layer as points in a plane. "
                f"{' and '.join(result['samples'])}: {distance}.",
            )
            caption = (
                f"{cell.label}: {when} standardisation by layer {result['layer']}, t-SNE. {words.sentence(distance)}: "
                "the mean distance of the samples within a class, in units of its spread."
            )
            pictures.append(Picture(svg, caption))
    return pictures


def _middles(points: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The median position of each class."""
    classes = grouped(zip(points, names, strict=True), lambda pair: pair[1])
    return {
        name: (statistics.median(point[0] for point, _ in pairs), statistics.median(point[1] for point, _ in pairs))
        for name, pairs in sorted(classes.items())
    }

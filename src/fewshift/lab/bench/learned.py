"""What LCCS learned: the blends it chose, the losses it searched, the weights of each layer."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fewshift.lab.bench.curves import SHOTS
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.results import (
    Group,
    Outcome,
    best_group,
    brief,
    grouped,
    identity,
    name_of,
    one_per_fit,
    points_of,
    what,
)
from fewshift.report import figures, run_figures
from fewshift.report import prose as words
from fewshift.report.pictures import Picture
from fewshift.report.run_figures import BlendPanel

FEW_TARGETS = 4  # more lines over a hundred layers cannot be told apart


def chosen_v(grid: Grid, outcomes: Group, key: str) -> list[Picture]:
    """The v that the search chose, over draws and targets; one picture per row that searched, one panel per k."""
    searched = one_per_fit(
        outcome for outcome in outcomes if _searches(outcome) and isinstance(_notes(outcome).get("v"), (int, float))
    )
    pictures = []
    for number, group in enumerate(grouped(searched, identity).values()):
        by_shots = sorted(grouped(group, SHOTS.of).items())
        counts = {f"k = {k:g}": _counted(_notes(outcome)["v"] for outcome in members) for k, members in by_shots}
        facts = "; ".join(f"{k}: {_frequencies(count)}" for k, count in counts.items())
        svg = run_figures.chosen(counts, key=f"{key}chosen{number}", alt=f"How often each v was chosen. {facts}.")
        caption = (
            f"{group[0].row.name}: the v that the search chose, from the source's statistics (0) to the support's (1), "
            f"and how often; every draw on every target counts once."
        )
        pictures.append(Picture(svg, caption))
    return pictures


def objectives(grid: Grid, outcomes: Group, key: str) -> Iterator[Picture]:
    """Test score over fixed v, above the losses that a search by cross-entropy or entropy would follow."""
    lccs = [outcome for outcome in outcomes if outcome.cell.method == "lccs"]
    for number, group in enumerate(grouped(lccs, lambda outcome: (_base(outcome), outcome.cell.shots)).values()):
        fixed = [outcome for outcome in group if isinstance(_setting(outcome, "init"), (int, float))]
        scores = points_of(grid, fixed, lambda outcome: float(_setting(outcome, "init")))
        searched = grouped(
            one_per_fit(outcome for outcome in group if _searches(outcome) and _curve(outcome)),
            lambda outcome: _setting(outcome, "objective"),
        )
        losses = [_loss_panel(objective, members) for objective, members in searched.items()]
        if len(scores) < 2 or not losses:
            continue
        facts = f"On test images the best v is {_best(scores, max)}."
        for panel in losses:
            least, often = _best(panel.points, min), _frequencies(panel.chosen)
            facts += f" {words.sentence(panel.label)} is least at {least}; chosen: {often}."
        svg = run_figures.over_v(
            [BlendPanel(brief(grid), scores, {}), *losses],
            key=f"{key}objective{number}",
            alt=f"Over the blend v, one above the other: {facts}",
        )
        caption = (
            f"{words.sentence(what(grid))} of a fixed v (above), and the losses on the support that a search follows "
            f"(below), k = {group[0].cell.shots}. Large marks: the v it chose, and how often. {facts}"
        )
        yield Picture(svg, caption)


def layers(grid: Grid, outcomes: Group, key: str) -> list[Picture]:
    """The weights that the best LCCS row learned with its largest k: mean over seeds, one line per target."""
    noted = [outcome for outcome in outcomes if outcome.cell.method == "lccs" and _weights(outcome)]
    best = best_group(grid, grouped(noted, identity).values())
    if not best:
        return []
    most = max(map(SHOTS.of, best))
    largest = one_per_fit(outcome for outcome in best if SHOTS.of(outcome) == most)
    columns = grouped(largest, lambda outcome: outcome.column.label)
    pictures = []
    for name, of in (("eta", "mean"), ("rho", "standard deviation")):
        for side, whose in enumerate(("source", "support")):
            lines = {label: _mean_weights(group, name, side) for label, group in columns.items()}
            facts = "; ".join(f"{label}: {min(values):.3f} to {max(values):.3f}" for label, values in lines.items())
            svg = figures.over_layers(
                lines if len(lines) <= FEW_TARGETS else _range_of(lines.values()),
                label=f"weight of the {whose}",
                key=f"{key}{name}-{whose}",
                alt=f"Weight of the {whose}'s {of} in every layer. {facts}.",
            )
            caption = f"{name_of(best[0], most)}: weight of the {whose}'s {of} in each layer, mean over the seeds."
            pictures.append(Picture(svg, caption))
    return pictures


def _loss_panel(objective: str, searched: Group) -> BlendPanel:
    """The loss over v, one value for every draw on every target, and the chosen v."""
    points: dict[float, list[float]] = {}
    for outcome in searched:
        for point in _curve(outcome):
            points.setdefault(point["v"], []).append(point["loss"])
    noted = (_notes(outcome).get("v") for outcome in searched)
    chosen = _counted(v for v in noted if isinstance(v, (int, float)))  # a record need not have one
    return BlendPanel(objective, dict(sorted(points.items())), {v: n for v, n in chosen.items() if v in points})


def _notes(outcome: Outcome) -> Mapping[str, Any]:
    notes: Mapping[str, Any] = outcome.result.get("notes", {})
    return notes


def _curve(outcome: Outcome) -> list[Mapping[str, float]]:
    """The loss at each v of the search, where it is finite."""
    return [point for point in _notes(outcome).get("grid") or () if math.isfinite(point["loss"])]


def _setting(outcome: Outcome, name: str) -> Any:
    return outcome.cell.build().settings()[name]


def _searches(outcome: Outcome) -> bool:
    return outcome.cell.method == "lccs" and _setting(outcome, "init") == "grid"


def _base(outcome: Outcome) -> str:
    """The settings, without LCCS's start and the loss that finds it."""
    settings = outcome.cell.build().settings()
    return json.dumps(
        {name: value for name, value in settings.items() if name not in ("init", "objective")}, sort_keys=True
    )


def _range_of(lines: Collection[Sequence[float]]) -> dict[str, list[float]]:
    """Many lines as three."""
    by_layer = list(zip(*lines, strict=False))
    return {
        f"mean of {len(lines)} targets": list(map(statistics.fmean, by_layer)),
        "highest": list(map(max, by_layer)),
        "lowest": list(map(min, by_layer)),
    }


def _weights(outcome: Outcome) -> list[Mapping[str, Any]]:
    """The layers that have weights of source and support."""
    details = outcome.result.get("layers", {}).values()
    return [layer for layer in details if len(layer.get("eta", ())) > 1 and len(layer.get("rho", ())) > 1]


def _mean_weights(group: Group, name: str, side: int) -> list[float]:
    seeds = [[layer[name][side] for layer in _weights(outcome)] for outcome in group]
    return [statistics.fmean(values) for values in zip(*seeds, strict=False)]


def _counted(values: Iterable[float]) -> dict[float, int]:
    return dict(sorted(Counter(values).items()))


def _frequencies(counts: Mapping[float, int]) -> str:
    return ", ".join(f"v = {v:g} {'once' if count == 1 else f'{count} times'}" for v, count in counts.items())


def _best(points: Mapping[float, Sequence[float]], choose: Callable[..., float]) -> str:
    v = choose(points, key=lambda each: statistics.fmean(points[each]))
    return f"v = {v:g} ({statistics.fmean(points[v]):.4g})"

"""Class by class: where the predictions of the source network and of the best other row go, and scenes to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fewshift.core.labels import IMAGES, PIXELS, Labels
from fewshift.core.metrics import METRICS
from fewshift.errors import FewshiftError
from fewshift.lab.bench.curves import BATCH
from fewshift.lab.bench.grid import Grid, TargetColumn
from fewshift.lab.bench.results import Group, best_group, grouped, identity, mix_of, name_of, with_shots
from fewshift.lab.bench.scenes import extremes
from fewshift.report import figures
from fewshift.report import prose as words
from fewshift.report.pages import Classes, SceneFigure
from fewshift.report.pictures import Picture
from fewshift.report.scenes import side_by_side

LISTED_CLASSES = 40  # nobody reads a longer table


def before_and_after(grid: Grid, outcomes: Group) -> tuple[Group, Group]:
    """The outcomes of the source network, and of the best other row that was judged on the same images."""
    counted = [outcome for outcome in outcomes if outcome.result.get("tally") and outcome.result.get("classes")]
    source = [outcome for outcome in counted if outcome.cell.method == "source"]
    mix = mix_of((source or counted)[0]) if counted else None
    same = [outcome for outcome in counted if mix_of(outcome) == mix]
    others = [outcome for outcome in same if outcome.cell.method != "source"]
    ours = [outcome for outcome in others if outcome.cell.method == "lccs"] or others
    after = best_group(grid, grouped(ours, lambda outcome: (with_shots(outcome), BATCH.of(outcome))).values())
    sources = [outcome for outcome in same if outcome.cell.method == "source"]
    own = [outcome for outcome in sources if after and outcome.row.source == after[0].row.source]
    return best_group(grid, grouped(own or sources, identity).values()), after


def classes_of(grid: Grid, outcomes: Group, key: str) -> list[Classes]:
    """For every target, the predictions of the source network and of the best other row, summed over seeds."""
    pairs = [(name_of(group[0]), group) for group in before_and_after(grid, outcomes) if group]
    targets = []
    for number, column in enumerate(grid.columns):
        here = {name: [outcome for outcome in group if outcome.column == column] for name, group in pairs}
        tallies = {name: _tally(group) for name, group in here.items() if group}
        if tallies:
            result = next(group[0].result for group in here.values() if group)
            labels = next(kind for kind in (PIXELS, IMAGES) if kind.metric in result)
            targets.append(_of_classes(column, tallies, result["classes"], f"{key}classes{number}", labels))
    if any(target.rows for target in targets) or not targets:
        return targets
    pictures = [picture for target in targets for picture in target.pictures]
    return [Classes(", ".join(target.place for target in targets), targets[0].methods, [], pictures)]


def scenes_of(grid: Grid, outcomes: Group, key: str) -> list[SceneFigure]:
    """The scenes of the first seed that gained most and lost most, from the source network to the best other row."""
    before, after = before_and_after(grid, outcomes)
    drawn = []
    for number, column in enumerate(grid.columns):
        pairs = [
            (old, new)
            for old in before
            for new in after
            if old.column == new.column == column and old.cell.seed == new.cell.seed and old.result.get("pictures")
        ]
        for old, new in pairs[:1]:
            for change, scenes in zip(("gained", "lost"), extremes(old.result, new.result), strict=True):
                if scenes:
                    palette = [(red, green, blue) for red, green, blue in old.result["palette"]]
                    title = f"{column.label}: the images that {change} most under {name_of(new)}, seed {new.cell.seed}"
                    figure = side_by_side(scenes, old.result["classes"], palette, key=f"{key}scenes{number}-{change}")
                    drawn.append(SceneFigure(title, figure))
    return drawn


def _of_classes(
    column: TargetColumn, tallies: Mapping[str, Tensor], names: Sequence[str], key: str, labels: Labels
) -> Classes:
    pictures = [
        _matrix(method, tally, column.label, names, f"{key}-{number}", labels)
        for number, (method, tally) in enumerate(tallies.items())
    ]
    per_class = METRICS[labels.metric].per_class
    assert per_class is not None
    scores = [per_class.of(tally).tolist() for tally in tallies.values()]
    rows = [
        (name, [None if math.isnan(score[index]) else 100 * score[index] for score in scores])
        for index, name in enumerate(names)
    ]
    compared = len(tallies) == 2 and len(rows) <= LISTED_CLASSES
    return Classes(column.label, list(tallies), rows if compared else [], pictures, per_class.title)


def _matrix(method: str, tally: Tensor, target: str, names: Sequence[str], key: str, labels: Labels) -> Picture:
    total = int(tally.sum())
    right = 100 * float(tally.diagonal().sum()) / total
    facts = f"{right:.1f}% of {words.counted(total, labels.unit)} right"
    svg = figures.confusion(
        (tally / tally.sum(1, keepdim=True)).tolist(),
        names,
        key=key,
        alt=f"Confusion matrix of {method} on {target}: {facts}.",
    )
    caption = f"{method} on {target}: for each true class (row), the answers in percent. {words.sentence(facts)}."
    if len(names) > figures.MANY_CLASSES:
        caption += f" The darker the more; below {50 / figures.SHADES:g}% nothing is drawn."
    return Picture(svg, caption)


def _tally(group: Group) -> Tensor:
    sizes = {len(outcome.result["tally"]) for outcome in group}
    if len(sizes) > 1:
        raise FewshiftError(
            f"records of {name_of(group[0])} on {group[0].column.label} have {min(sizes)} classes and {max(sizes)}: "
            "remove those of another data set from records.jsonl"
        )
    return torch.stack([torch.tensor(outcome.result["tally"]) for outcome in group]).sum(0)

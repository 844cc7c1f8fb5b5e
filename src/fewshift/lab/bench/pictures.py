"""Pictures: which figures the records of a grid allow, and what they show in words."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fewshift.core.labels import IMAGES, PIXELS, Labels
from fewshift.core.metrics import METRICS
from fewshift.lab.bench.features import FeatureGrid
from fewshift.lab.bench.grid import Grid, Place
from fewshift.lab.bench.record import Record
from fewshift.lab.bench.results import Outcome, metric_of, what
from fewshift.lab.bench.run import sees_stream
from fewshift.lab.bench.scenes import extremes
from fewshift.report import figures
from fewshift.report import prose as words
from fewshift.report.figures import Curve, Panel
from fewshift.report.pages import Classes, Picture, Scenery
from fewshift.report.scenes import side_by_side

T = TypeVar("T")
K = TypeVar("K")
Group = Sequence[Outcome]

FEW_TARGETS = 4  # more lines over a hundred layers are a thicket
LISTED_CLASSES = 40  # a longer table of classes is no longer read


def pictures_of(grid: Grid, found: Group, key: str) -> list[Picture]:
    """Everything there is to draw, each kind only where there is something to see."""
    drawings = (_over_batches, _over_alphas, _over_shots, _chosen_v, _objectives, _layers, _costs)
    return [picture for draw in drawings for picture in draw(grid, found, key)]


# accuracy against something


@dataclass(frozen=True)
class Axis:
    """What lies across a picture: its name, its value for an outcome, and for which outcomes it does not matter."""

    name: str
    of: Callable[[Outcome], float]
    irrelevant: Callable[[Outcome], bool]
    shots_in_name: bool = True


BATCH = Axis("test batch size", lambda it: it.cell.condition.batch_size, lambda it: not _streams(it))
ALPHA = Axis("alpha, largest to smallest class", lambda it: it.cell.condition.alpha or 1, lambda it: False)
SHOTS = Axis("k, labelled images of each class", lambda it: it.cell.shots or 0, lambda it: it.cell.shots is None, False)


def _over_batches(grid: Grid, found: Group, key: str) -> list[Picture]:
    """One picture for each order and mix of classes."""
    return [
        picture
        for place, (mix, group) in enumerate(grouped(found, _mix).items())
        for picture in _against(BATCH, grid, group, mix, f"{key}batch{place}")
    ]


def _over_alphas(grid: Grid, found: Group, key: str) -> list[Picture]:
    """One picture for each order and batch size; methods that answer image by image are in all of them."""
    pictures = []
    for order, group in grouped(found, lambda it: it.cell.condition.order).items():
        sizes = grouped(filter(_streams, group), BATCH.of)
        varied = sorted(size for size, them in sizes.items() if len(set(map(ALPHA.of, them))) > 1)
        for size in varied or [0]:
            joined = [it for it in group if not _streams(it) or BATCH.of(it) == size]
            where = f"{order}, batches of {size:g}" if size else order
            pictures += _against(
                ALPHA, grid, joined, where, f"{key}alpha-{order}-{size}", " Alpha 1: classes as found."
            )
    return pictures


def _over_shots(grid: Grid, found: Group, key: str) -> list[Picture]:
    """One picture for each order and mix of classes; methods that depend on the batch size have the largest."""
    pictures = []
    for place, (mix, group) in enumerate(grouped(found, _mix).items()):
        largest = max(map(BATCH.of, filter(_streams, group)), default=0)
        joined = [it for it in group if not _streams(it) or BATCH.of(it) == largest]
        note = f" Rows that see a stream: batches of {largest:g}." if largest else ""
        pictures += _against(SHOTS, grid, joined, mix, f"{key}shots{place}", note)
    return pictures


def _against(axis: Axis, grid: Grid, found: Group, where: str, key: str, note: str = "") -> list[Picture]:
    """One line per row, averaged over the targets within a seed; none if no line would have two points."""
    lines = _lines(axis, grid, found)
    if all(len(curve.points) < 2 for curve in lines.values()):
        return []
    ticks = sorted({x for curve in lines.values() if not curve.level for x in curve.points})
    least = figures.LEAST_POINTS if grid.measure == "score" else figures.LEAST_SPAN
    targets = words.counted(len(grid.places), "target")
    dashed = " Dashed: rows that do not depend on it." if any(it.level for it in lines.values()) else ""
    pictures = []
    for place, curves in enumerate(_readable(lines)):
        facts = "; ".join(f"{it.name}: {_told(it)}" for it in curves)
        svg = figures.curves(
            curves,
            across=axis.name,
            label=_brief(grid),
            ticks=ticks,
            span=figures.span_of(lines.values(), least),
            key=f"{key}-{place}",
            alt=f"{words.sentence(what(grid))} against {axis.name}; {where}. {facts}.",
        )
        caption = (
            f"{words.sentence(what(grid))} against {axis.name}; {where}. Mean over {targets}, ± standard deviation "
            f"over the seeds.{dashed}{note}"
        )
        pictures.append(Picture(svg, caption))
    return pictures


def _lines(axis: Axis, grid: Grid, found: Group) -> dict[tuple[Any, ...], Curve]:
    """By method and all that tells rows apart, the rows that have a value."""
    lines = {}
    identity = _with_shots if axis.shots_in_name else _identity
    for line, group in grouped(found, lambda it: (*identity(it), axis.irrelevant(it))).items():
        if points := _points(grid, group, axis.of):
            name = _name(group[0]) if axis.shots_in_name else group[0].row.name
            lines[line] = Curve(name, points, level=len(points) == 1 and axis.irrelevant(group[0]))
    return lines


def _points(grid: Grid, found: Group, x: Callable[[Outcome], float]) -> dict[float, list[float]]:
    """For every x that has them, in order, a value per seed."""
    points = {at: _per_seed(grid, group) for at, group in sorted(grouped(found, x).items())}
    return {at: values for at, values in points.items() if values}


def _readable(lines: Mapping[tuple[Any, ...], Curve]) -> list[list[Curve]]:
    """As many pictures as the lines need; the source network and LCCS are in each, to compare with."""
    if len(lines) <= figures.MOST_LINES:
        return [list(lines.values())]
    common = [next((it for it in lines if it[0] == method), None) for method in ("source", "lccs")]
    repeated = [lines[it] for it in common if it is not None]
    others = [curve for identity, curve in lines.items() if identity not in common]
    parts = math.ceil(len(others) / (figures.MOST_LINES - len(repeated)))
    size = math.ceil(len(others) / parts)
    return [repeated + others[start : start + size] for start in range(0, len(others), size)]


def _told(curve: Curve) -> str:
    if curve.level:
        return f"{words.over_draws(next(iter(curve.points.values())))} throughout"
    return ", ".join(f"{words.over_draws(values)} at {x:g}" for x, values in curve.points.items())


def _per_seed(grid: Grid, found: Group) -> list[float]:
    """The mean over all targets for every seed that has all of them."""
    seeds = grouped(found, lambda it: it.cell.seed)
    whole = [{it.place.label: it.value for it in group} for _, group in sorted(seeds.items())]
    return [statistics.fmean(it.values()) for it in whole if len(it) == len(grid.places)]


# what LCCS learned


def _chosen_v(grid: Grid, found: Group, key: str) -> list[Picture]:
    """Which v the search took, over draws and targets; one picture per row that searched, one panel per k."""
    searched = _fits(it for it in found if _search(it) and isinstance(_notes(it).get("v"), (int, float)))
    pictures = []
    for place, group in enumerate(grouped(searched, _identity).values()):
        by_shots = sorted(grouped(group, SHOTS.of).items())
        counts = {f"k = {k:g}": _counted(_notes(it)["v"] for it in them) for k, them in by_shots}
        facts = "; ".join(f"{k}: {_often(count)}" for k, count in counts.items())
        svg = figures.chosen(counts, key=f"{key}chosen{place}", alt=f"How often each v was chosen. {facts}.")
        caption = (
            f"{group[0].row.name}: the v that the search chose, from the source's statistics (0) to the support's (1), "
            f"and how often; every draw on every target counts once."
        )
        pictures.append(Picture(svg, caption))
    return pictures


def _objectives(grid: Grid, found: Group, key: str) -> list[Picture]:
    """Test score over fixed v, above the losses that a search by cross-entropy or entropy would follow."""
    lccs = [it for it in found if it.cell.method == "lccs"]
    pictures = []
    for place, group in enumerate(grouped(lccs, lambda it: (_base(it), it.cell.shots)).values()):
        fixed = [it for it in group if isinstance(_setting(it, "init"), (int, float))]
        scores = _points(grid, fixed, lambda it: float(_setting(it, "init")))
        searched = grouped(
            _fits(it for it in group if _search(it) and _curve(it)), lambda it: _setting(it, "objective")
        )
        losses = [_loss_panel(objective, them) for objective, them in searched.items()]
        if len(scores) < 2 or not losses:
            continue
        panels = [Panel(_brief(grid), scores, {}), *losses]
        facts = f"On test images the best v is {_best(scores, max)}."
        for panel in losses:
            least, often = _best(panel.points, min), _often(panel.chosen)
            facts += f" {words.sentence(panel.label)} is least at {least}; chosen: {often}."
        svg = figures.over_v(
            panels, key=f"{key}objective{place}", alt=f"Over the blend v, one above the other: {facts}"
        )
        caption = (
            f"{words.sentence(what(grid))} of a fixed v (above), and the losses on the support that a search follows "
            f"(below), k = {group[0].cell.shots}. Large marks: the v it chose, and how often. {facts}"
        )
        pictures.append(Picture(svg, caption))
    return pictures


def _loss_panel(objective: str, searched: Group) -> Panel:
    """The loss over v that was searched, one value for every draw on every target, and what was chosen."""
    points: dict[float, list[float]] = {}
    for it in searched:
        for point in _curve(it):
            points.setdefault(point["v"], []).append(point["loss"])
    chosen = _counted(_notes(it)["v"] for it in searched)
    return Panel(objective, dict(sorted(points.items())), {v: count for v, count in chosen.items() if v in points})


def _notes(it: Outcome) -> Mapping[str, Any]:
    notes: Mapping[str, Any] = it.result.get("notes", {})
    return notes


def _curve(it: Outcome) -> list[Mapping[str, float]]:
    """The loss at each v that was searched, where it is a number."""
    return [point for point in _notes(it).get("grid") or () if math.isfinite(point["loss"])]


def _layers(grid: Grid, found: Group, key: str) -> list[Picture]:
    """What the best LCCS row learned with its largest k: weights per layer, mean over seeds, a line per target."""
    noted = [it for it in found if it.cell.method == "lccs" and _weights(it)]
    best = _best_group(grid, grouped(noted, _identity).values())
    if not best:
        return []
    most = max(map(SHOTS.of, best))
    places = grouped(_fits(it for it in best if SHOTS.of(it) == most), lambda it: it.place)
    pictures = []
    for name, of in (("eta", "mean"), ("rho", "standard deviation")):
        for side, whose in enumerate(("source", "support")):
            lines = {place.label: _mean_weights(group, name, side) for place, group in places.items()}
            facts = "; ".join(f"{it}: {min(values):.3f} to {max(values):.3f}" for it, values in lines.items())
            svg = figures.over_layers(
                lines if len(lines) <= FEW_TARGETS else _range_of(lines.values()),
                label=f"weight of the {whose}",
                key=f"{key}{name}-{whose}",
                alt=f"Weight of the {whose}'s {of} in every layer. {facts}.",
            )
            caption = f"{_name(best[0], most)}: weight of the {whose}'s {of} in each layer, mean over the seeds."
            pictures.append(Picture(svg, caption))
    return pictures


def _range_of(lines: Collection[Sequence[float]]) -> dict[str, list[float]]:
    """Many lines as three."""
    layers = list(zip(*lines, strict=False))
    return {
        f"mean of {len(lines)} targets": list(map(statistics.fmean, layers)),
        "highest": list(map(max, layers)),
        "lowest": list(map(min, layers)),
    }


def _weights(it: Outcome) -> list[Mapping[str, Any]]:
    """Of every layer that has them, the weights of source and support."""
    layers = it.result.get("layers", {}).values()
    return [layer for layer in layers if len(layer.get("eta", ())) > 1 and len(layer.get("rho", ())) > 1]


def _mean_weights(group: Group, name: str, side: int) -> list[float]:
    seeds = [[layer[name][side] for layer in _weights(it)] for it in group]
    return [statistics.fmean(values) for values in zip(*seeds, strict=False)]


# cost


def _costs(grid: Grid, found: Group, key: str) -> list[Picture]:
    """Seconds of adaptation, and milliseconds of an answer, for each row and k."""
    timed = [it for it in found if "seconds" in it.result and _images(it)]
    several = len(set(map(BATCH.of, filter(_streams, timed)))) > 1

    def name(it: Outcome) -> str:
        return f"{it.row.name}, batch {BATCH.of(it):g}" if several and _streams(it) else it.row.name

    # a fit is shared by all its streams, and has answered every image of the largest
    shared = _fits(sorted((it for it in timed if not _streams(it)), key=lambda it: -_images(it)))
    once = {id(it) for it in shared}
    rows = grouped((it for it in timed if _streams(it) or id(it) in once), name)
    if not rows:
        return []
    pictures = []
    for label, cost in COSTS.items():
        costs = {
            row: {kind: list(map(cost, them)) for kind, them in sorted(grouped(group, _kind).items(), key=_by_shots)}
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
    "seconds of adaptation": lambda it: float(it.result["seconds"]["adapt"]),
    "milliseconds for an answer": lambda it: 1000 * float(it.result["seconds"]["predict"]) / _images(it),
}


def _kind(it: Outcome) -> str:
    return "no labels" if it.cell.shots is None else f"k = {it.cell.shots}"


def _by_shots(kind: tuple[str, Group]) -> float:
    return SHOTS.of(kind[1][0])


# classes


def before_and_after(grid: Grid, found: Group) -> tuple[Group, Group]:
    """The outcomes of the source network, and of the best other row that was judged on the same images."""
    counted = [it for it in found if it.result.get("tally") and it.result.get("classes")]
    source = [it for it in counted if it.cell.method == "source"]
    mix = _mix((source or counted)[0]) if counted else None
    same = [it for it in counted if _mix(it) == mix]
    others = [it for it in same if it.cell.method != "source"]
    ours = [it for it in others if it.cell.method == "lccs"] or others
    best = _best_group(grid, grouped(ours, lambda it: (_with_shots(it), BATCH.of(it))).values())
    origin = [it for it in same if it.cell.method == "source" and best and it.row.source == best[0].row.source]
    before = _best_group(grid, grouped(origin or [it for it in source if _mix(it) == mix], _identity).values())
    return before, best


def classes_of(grid: Grid, found: Group, key: str) -> list[Classes]:
    """For every target, where the answers of the source network and of the best other row go, summed over seeds."""
    pairs = [(_name(group[0]), group) for group in before_and_after(grid, found) if group]
    targets = []
    for number, place in enumerate(grid.places):
        tallies = {name: _tally(group, place) for name, group in pairs if any(it.place == place for it in group)}
        results = [it.result for _, group in pairs for it in group if it.place == place]
        if tallies:
            labels = PIXELS if PIXELS.metric in results[0] else IMAGES
            names = results[0]["classes"]
            targets.append(_of_classes(place.label, tallies, names, f"{key}classes{number}", labels))
    if any(it.rows for it in targets) or not targets:
        return targets
    together = [picture for it in targets for picture in it.pictures]
    return [Classes(", ".join(it.place for it in targets), targets[0].methods, [], together)]


def scenes_of(grid: Grid, found: Group, key: str) -> list[Scenery]:
    """The scenes of the first seed that gained most and lost most, from the source network to the best other row."""
    before, after = before_and_after(grid, found)
    figures_ = []
    for number, place in enumerate(grid.places):
        pairs = [
            (old, new)
            for old in before
            for new in after
            if old.place == new.place == place and old.cell.seed == new.cell.seed and old.result.get("pictures")
        ]
        for old, new in pairs[:1]:
            titles = ("gained", "lost")
            for title, scenes in zip(titles, extremes(old.result, new.result), strict=True):
                if scenes:
                    palette = [(red, green, blue) for red, green, blue in old.result["palette"]]
                    name = f"{place.label}: the images that {title} most under {_name(new)}, seed {new.cell.seed}"
                    drawn = side_by_side(scenes, old.result["classes"], palette, key=f"{key}scenes{number}-{title}")
                    figures_.append(Scenery(name, drawn))
    return figures_


def _of_classes(place: str, tallies: Mapping[str, Tensor], names: Sequence[str], key: str, labels: Labels) -> Classes:
    shares = {method: tally / tally.sum(1, keepdim=True) for method, tally in tallies.items()}
    pictures = []
    for number, (method, share) in enumerate(shares.items()):
        images = int(tallies[method].sum())
        right = 100 * float(tallies[method].diagonal().sum()) / images
        facts = f"{right:.1f}% of {words.counted(images, 'pixel' if labels is PIXELS else 'answer')} right"
        svg = figures.confusion(
            share.tolist(), names, key=f"{key}-{number}", alt=f"Confusion matrix of {method} on {place}: {facts}."
        )
        caption = f"{method} on {place}: for each true class (row), the answers in percent. {words.sentence(facts)}."
        if len(names) > figures.MANY_CLASSES:
            caption += f" The darker the more; below {50 / figures.SHADES:g}% nothing is drawn."
        pictures.append(Picture(svg, caption))
    per_class = METRICS[labels.metric].per_class
    assert per_class is not None
    scores = [per_class.of(tally).tolist() for tally in tallies.values()]
    rows = [(name, [None if math.isnan(it[at]) else 100 * it[at] for it in scores]) for at, name in enumerate(names)]
    compared = len(shares) == 2 and len(rows) <= LISTED_CLASSES
    return Classes(place, list(shares), rows if compared else [], pictures, per_class.title)


def _tally(group: Group, place: Place) -> Tensor:
    return torch.stack([torch.tensor(it.result["tally"]) for it in group if it.place == place]).sum(0)


# features


def clouds(grid: FeatureGrid, records: Mapping[str, Record], key: str) -> list[Picture]:
    """Both samples of each comparison, before and after the layer."""
    pictures = []
    for place, cell in enumerate(grid.cells()):
        result = records.get(cell.key, {}).get("result", {})
        for when in ("before", "after") if result else ():
            far = f"gap {result[f'gap_{when}']:.2f}"
            samples = list(zip(result["samples"], result[when], strict=True))
            svg = figures.clouds(
                samples,
                _middles(result[when][0], [result["classes"][it] for it in result["labels"][0]]),
                key=f"{key}cloud{place}-{when}",
                alt=f"{cell.label}: features {when} the layer as points in a plane. "
                f"{' and '.join(result['samples'])}: {far}.",
            )
            caption = (
                f"{cell.label}: {when} standardisation by layer {result['layer']}, t-SNE. {words.sentence(far)}: the "
                "mean distance of the samples within a class, in units of its spread."
            )
            pictures.append(Picture(svg, caption))
    return pictures


def _middles(points: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Where most of a class lies."""
    classes = grouped(zip(points, names, strict=True), lambda it: it[1])
    return {
        name: (statistics.median(point[0] for point, _ in them), statistics.median(point[1] for point, _ in them))
        for name, them in sorted(classes.items())
    }


# helpers


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, both in the order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _identity(it: Outcome) -> tuple[Any, ...]:
    """What makes rows one and the same, whatever k and condition; the method comes first."""
    return it.cell.method, it.row.name, json.dumps(it.cell.settings, sort_keys=True), it.row.source


def _with_shots(it: Outcome) -> tuple[Any, ...]:
    return (*_identity(it), it.cell.shots)


def _name(it: Outcome, shots: float | None = None) -> str:
    k = it.cell.shots if shots is None else shots
    return it.row.name if k is None else f"{it.row.name}, k = {k:g}"


def _streams(it: Outcome) -> bool:
    return sees_stream(it.cell.build(), torch.empty(it.cell.shots or 0))


def _mix(it: Outcome) -> str:
    condition = it.cell.condition
    return condition.order if condition.alpha is None else f"{condition.order}, alpha {condition.alpha:g}"


def _fits(found: Iterable[Outcome]) -> list[Outcome]:
    """The first of the outcomes that differ in nothing but the stream of test images: they share what was learned."""
    return [group[0] for group in grouped(found, lambda it: it.cell.fit_key).values()]


def _setting(it: Outcome, name: str) -> Any:
    return it.cell.build().settings()[name]


def _search(it: Outcome) -> bool:
    return it.cell.method == "lccs" and _setting(it, "init") == "grid"


def _base(it: Outcome) -> str:
    """The settings but for where LCCS starts, and by which loss it finds that."""
    settings = it.cell.build().settings()
    return json.dumps(
        {key: value for key, value in settings.items() if key not in ("init", "objective")}, sort_keys=True
    )


def _best_group(grid: Grid, groups: Iterable[Group]) -> Group:
    """The one on most targets, and among these with the best score; the first if there are several."""

    metric = metric_of(grid)
    sign = 1 if metric.higher_is_better else -1

    def rank(group: Group) -> tuple[int, float]:
        scores = [sign * outcome.result[metric.name] for outcome in group if metric.name in outcome.result]
        return len({it.place for it in group}), statistics.fmean(scores) if scores else -math.inf

    return max(groups, key=rank, default=[])


def _brief(grid: Grid) -> str:
    """What the numbers are, for a narrow place."""
    return f"{metric_of(grid).brief} in %" if grid.measure == "score" else what(grid)


def _counted(values: Iterable[float]) -> dict[float, int]:
    return dict(sorted(Counter(values).items()))


def _often(counts: Mapping[float, int]) -> str:
    return ", ".join(f"v = {v:g} {'once' if count == 1 else f'{count} times'}" for v, count in counts.items())


def _best(points: Mapping[float, Sequence[float]], choose: Callable[..., float]) -> str:
    v = choose(points, key=lambda it: statistics.fmean(points[it]))
    return f"v = {v:g} ({statistics.fmean(points[v]):.4g})"


def _images(it: Outcome) -> int:
    if "image_iou" in it.result:  # the tally is of pixels
        return len(it.result["image_iou"])
    return sum(map(sum, it.result.get("tally", ())))

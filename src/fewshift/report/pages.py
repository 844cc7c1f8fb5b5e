"""Pages: words and figures, rendered into one self-contained HTML file."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from markupsafe import Markup

from fewshift import __version__
from fewshift.core._files import whole
from fewshift.core.method import Needs
from fewshift.core.support import Support
from fewshift.methods.catalog import METHODS
from fewshift.report import cautions, choosing, figures, pictures
from fewshift.report import prose as words
from fewshift.report import suspects as labelling
from fewshift.report.judged import MOST, RIGHT, STILL, WRONG, ClassRow, Judged, judged, pictured_suspects
from fewshift.report.pictures import Picture
from fewshift.report.render import rendered
from fewshift.report.scenes import Scene, change_of, counted_at, side_by_side, support_scenes
from fewshift.report.tables import Listing, Table
from fewshift.trust.evaluation import ImageEvaluation, PixelEvaluation
from fewshift.trust.gain import Gain

if TYPE_CHECKING:
    from fewshift.lab.bench.trust import Trial
    from fewshift.lab.demo import Demo, DemoRow
    from fewshift.report.comparison import Comparison
    from fewshift.report.fleet import Fleet
    from fewshift.report.learning_curve import LearningCurve
    from fewshift.report.results import Adaptation, LayerReport

PICTURED = 6  # scenes of a support set that a page shows
MATRIX = 20  # classes of which a page shows a matrix; of more, a table of what changed most
PAIRS = 12  # lines of that table
ETA, RHO = "\N{GREEK SMALL LETTER ETA}", "\N{GREEK SMALL LETTER RHO}"
PLACE = "place.safetensors"  # a delta that was not saved yet


def adaptation_page(
    result: Adaptation,
    path: str | Path,
    delta: str | Path | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Path:
    """Whether to use an adaptation, what it changed, and how to use, keep or undo it.

    `delta` is the file in which it is kept, for the lines that a reader copies. `origin` is where things come from;
    its "command" made this adaptation, and its "options" name the network on the command line.
    """
    origin = dict(origin or {})
    held = judged(result)
    return _write(
        path,
        "adaptation.html",
        result=result,
        changes=words.changes(result),
        judged=held,
        interval=None if result.gain is None else _interval(result.gain),
        network=origin.pop("options", None) or "...",
        command=origin.get("command"),
        folder=_folder(result.support),
        provenance=_provenance(result, origin),
        facts=words.other_facts(result),
        warnings=[cautions.sentence(caution) for caution in result.warnings],
        suspects=pictured_suspects(result),
        labelling=labelling,
        tried=[] if result.choice is None else choosing.candidates(result.choice),
        verdicts=(WRONG, RIGHT, STILL),
        tally=[f"{held.count(kind)} {kind}" for kind in (WRONG, RIGHT, STILL) if held.count(kind)] if held else [],
        most=MOST,
        matrices=pictures.matrices(held) if held and len(held.names) <= MATRIX else [],
        pairs=held.pairs(PAIRS) if held and len(held.names) > MATRIX else [],
        shift=pictures.shift(result),
        layers=[layer for layer in result.layers if layer.skipped is None],
        columns=columns(result),
        skipped=[layer for layer in result.layers if layer.skipped is not None],
        learning=pictures.learning(result),
        change=pictures.coefficients(result),
        scenes=_support_scenes(result),
        pictured=PICTURED,
        file=str(delta or PLACE),
        saved=delta is not None,
        versions=_versions(),
    )


def _interval(gain: Gain) -> str:
    alt = f"A change of {gain.point:+.1f} points, probably between {gain.low:+.1f} and {gain.high:+.1f}."
    return figures.interval(gain.point, gain.low, gain.high, key="interval", alt=alt)


def _provenance(result: Adaptation, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Where the network, its images and this page come from, as far as that is known."""
    known = {"network": type(result.source).__name__, "images": _folder(result.support), **origin}
    return {name: value for name, value in known.items() if value}


def _folder(support: Support | None) -> str | None:
    """The folder that all images lie in."""
    if support is None or not support.files:
        return None
    return os.path.commonpath([str(file.parent) for file in support.files])


@dataclass(frozen=True)
class Column:
    """A column of the table of layers; an empty cell is a fact the method did not note."""

    heading: str
    meaning: str
    cell: Callable[[LayerReport], str]


def columns(result: Adaptation) -> list[Column]:
    """What the method noted about its layers; columns without any entry are left out."""
    start = result.notes.get("v")
    own_start = start if isinstance(start, Mapping) else {}  # a common one stands in the caption
    possible = [
        Column("v", "the blend it started from", lambda layer: _number(own_start.get(layer.name))),
        Column("n", "support vectors, for mean and deviation", lambda layer: _n(_detail(layer, "n"))),
        Column(f"{ETA} source", "weight of the source's mean", lambda layer: _weight(layer, "eta", 0)),
        Column(f"{ETA} support", "of the support's mean", lambda layer: _weight(layer, "eta", 1)),
        Column(f"{RHO} source", "of the source's standard deviation", lambda layer: _weight(layer, "rho", 0)),
        Column(f"{RHO} support", "of the support's", lambda layer: _weight(layer, "rho", 1)),
    ]
    return [column for column in possible if any(column.cell(layer) for layer in result.layers)]


def _detail(layer: LayerReport, key: str) -> Any:
    return (layer.details or {}).get(key)


def _weight(layer: LayerReport, key: str, place: int) -> str:
    weights = _detail(layer, key)
    return _number(weights[place] if weights else None)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _n(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return ""
    mean, std = pair
    return f"{mean}" if mean == std else f"{mean}, {std}"


def evaluation_page(
    scores: PixelEvaluation,
    gained: Sequence[Scene],
    lost: Sequence[Scene],
    path: str | Path,
    *,
    origin: Mapping[str, Any],
) -> Path:
    """What adaptation did to the answers on labelled scenes: class by class, and where it did most good and harm."""
    return _write(
        path,
        "evaluation.html",
        scores=scores,
        change_of=change_of,
        sizes=counted_at(scores.sizes) if scores.sizes else None,
        gained=side_by_side(gained, scores.classes, scores.palette, key="gained") if gained else None,
        lost=side_by_side(lost, scores.classes, scores.palette, key="lost") if lost else None,
        origin={**{key: value for key, value in origin.items() if value is not None}, **_versions()},
    )


def accuracy_page(scores: ImageEvaluation, path: str | Path, *, origin: Mapping[str, Any]) -> Path:
    """What adaptation did to the answers on labelled images: class by class, with an interval."""
    gain = scores.gain
    assert gain is not None  # a page compares two networks
    first, *_, last = scores.tallies.values()
    rows = [
        ClassRow(name, count, count, int(first[label, label]), int(last[label, label]))
        for label, (name, count) in enumerate(zip(scores.classes, scores.labels, strict=True))
        if count
    ]
    held = Judged(scores.classes, rows, first, last, [])
    return _write(
        path,
        "accuracy.html",
        scores=scores,
        right=(int(first.trace()), int(last.trace())),
        interval=_interval(gain),
        rows=rows,
        matrices=pictures.matrices(held) if len(scores.classes) <= MATRIX else [],
        origin={**{key: value for key, value in origin.items() if value is not None}, **_versions()},
    )


def comparison_page(result: Comparison, path: str | Path) -> Path:
    """Several methods on the same held-out images: a table, a picture, and every difference."""
    return _write(path, "comparison.html", result=result, versions=_versions())


def fleet_page(result: Fleet, path: str | Path) -> Path:
    """Every place of a fleet: the verdicts, a table, and the gains."""
    return _write(path, "fleet.html", result=result, versions=_versions())


def curve_page(result: LearningCurve, path: str | Path) -> Path:
    """The gain for growing k: a picture, a table, and whether more labels are worth it."""
    return _write(path, "curve.html", result=result, versions=_versions())


def demo_page(demo: Demo, path: str | Path) -> Path:
    """What the demonstration found, with pictures of both domains."""
    example = demo.example
    before = next(row for row in demo.rows if row.method == "source")
    after = next(row for row in demo.rows if (row.method, row.shots) == (example.method.name, example.delta.shots))
    return _write(
        path,
        "demo.html",
        demo=demo,
        before=before,
        after=after,
        rows=[(row, _gains(row, before)) for row in demo.rows],
        streaming=[row.method for row in demo.rows if METHODS[row.method].needs is Needs.STREAM],
        strips=figures.strips(demo.source_images, demo.target_images),
        chart=pictures.chart(demo.rows, before),
        pictures=pictures.learning(example) + pictures.coefficients(example) + pictures.shift(example),
    )


def bench_page(run: Run, path: str | Path) -> Path:
    """What a run of grids found: their tables, how far they are, and the figures their records allow."""
    return _write(path, "run.html", run=run)


@dataclass(frozen=True)
class Failure:
    """An error in words, how many cells ended in it, and some of them."""

    error: str
    count: int
    examples: Sequence[str]


@dataclass(frozen=True)
class Classes:
    """What became of each class of a target: accuracies under two `methods`, and the matrices behind them."""

    place: str
    methods: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    pictures: Sequence[Picture]
    measure: str = "accuracy"


@dataclass(frozen=True)
class SceneFigure:
    """Scenes side by side, as they stand in a page, and what they have in common."""

    title: str
    figure: Markup


@dataclass(frozen=True)
class Section:
    """A grid: how many of its cells are done, its table where it has one, and what there is to see."""

    name: str
    title: str
    cells: int
    done: int
    failures: Sequence[Failure]
    table: Table | None = None
    trials: Sequence[Trial] = ()  # adaptations that were judged, and
    listing: Listing | None = None  # their table
    gaps: Sequence[tuple[str, float, float]] = ()  # of comparisons of features: label, before and after the layer
    seeds: int = 1
    pictures: Sequence[Picture] = ()
    classes: Sequence[Classes] = ()
    scenes: Sequence[SceneFigure] = ()

    @property
    def failed(self) -> int:
        """Cells whose newest record is an error."""
        return sum(failure.count for failure in self.failures)

    @property
    def missing(self) -> int:
        """Cells without a record."""
        return self.cells - self.done - self.failed


@dataclass(frozen=True)
class Run:
    """A folder of records: the grids that were run into it, when, with what, and how to go on."""

    name: str
    sections: Sequence[Section]
    cells: int
    done: int
    began: str
    ended: str
    seconds: float
    versions: Mapping[str, str]
    resume: str
    unreadable: int  # lines of the file of records
    trials: Sequence[Trial] = ()  # of all sections together, where several have some, and
    together: Listing | None = None  # their table


def _support_scenes(result: Adaptation) -> Markup | None:
    """The first images with pixel labels, and what both networks say about them."""
    networks = {"source": result.source}
    if words.changes(result).bits:
        networks["adapted" if result.accepted else "rejected"] = result.candidate
    scenes = support_scenes(result.support, networks, result.preprocess, PICTURED) if result.support else []
    return side_by_side(scenes, result.classes, key="support") if scenes else None


def _versions() -> dict[str, str]:
    return {"fewshift": __version__, "torch": torch.__version__, "Python": platform.python_version()}


def _gains(row: DemoRow, before: DemoRow) -> list[float]:
    """The difference to the source network, draw by draw."""
    if row is before:
        return []
    return [after - then for after, then in zip(row.accuracies, before.accuracies, strict=True)]


def _write(path: str | Path, template: str, **facts: Any) -> Path:
    text = rendered(template, **facts)
    with whole(path) as draft:
        draft.write_bytes(text.encode("utf-8", "replace"))  # a file name may hold bytes that are no text
    return Path(path)

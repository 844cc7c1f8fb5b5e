"""Pages: words and figures, rendered into one self-contained HTML file."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from markupsafe import Markup

from fewshift import __version__
from fewshift.core._files import whole
from fewshift.core.method import Needs
from fewshift.methods.catalog import METHODS
from fewshift.report import figures
from fewshift.report import prose as words
from fewshift.report.judged import MOST, RIGHT, STILL, WRONG, Judged, judged
from fewshift.report.render import rendered
from fewshift.report.scenes import Scene, change_of, counted_at, side_by_side, support_scenes
from fewshift.report.tables import Listing, Table
from fewshift.trust.evaluation import PixelEvaluation

if TYPE_CHECKING:
    from fewshift.lab.demo import Demo, DemoRow
    from fewshift.report.comparison import Comparison
    from fewshift.report.learning_curve import LearningCurve
    from fewshift.report.results import Adaptation

PICTURED = 6  # scenes of a support set that a page shows
MATRIX = 20  # classes of which a page shows a matrix; of more, a table of what changed most
PAIRS = 12  # lines of that table
PLACE = "place.safetensors"  # a delta that was not saved yet


def adaptation_page(result: Adaptation, path: str | Path, delta: str | Path | None = None) -> Path:
    """Whether to trust an adaptation, what it changed, and how to use, keep or undo it.

    `delta` is the file in which it is kept, for the lines that a reader copies.
    """
    found = judged(result)
    return _write(
        path,
        "adaptation.html",
        result=result,
        changes=words.changes(result),
        judged=found,
        facts=words.other_facts(result),
        verdicts=(WRONG, RIGHT, STILL),
        tally=[f"{found.count(it)} {it}" for it in (WRONG, RIGHT, STILL) if found.count(it)] if found else [],
        most=MOST,
        matrices=_matrices(found) if found and len(found.names) <= MATRIX else [],
        pairs=found.pairs(PAIRS) if found and len(found.names) > MATRIX else [],
        shift=_shift(result),
        layers=[it for it in result.layers if it.skipped is None],
        skipped=[it for it in result.layers if it.skipped is not None],
        learning=_learning(result),
        change=_change(result),
        scenes=_support_scenes(result),
        pictured=PICTURED,
        file=str(delta or PLACE),
        saved=delta is not None,
        versions=_versions(),
    )


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
        origin={**{key: it for key, it in origin.items() if it is not None}, **_versions()},
    )


def comparison_page(result: Comparison, path: str | Path) -> Path:
    """Several methods on the same held-out images: a table, a picture, and every difference."""
    return _write(path, "comparison.html", result=result, versions=_versions())


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
        chart=_chart(demo.rows, before),
        pictures=_learning(example) + _change(example) + _shift(example),
    )


def bench_page(run: Run, path: str | Path) -> Path:
    """What a run of grids found: their tables, how far they are, and the figures their records allow."""
    return _write(path, "run.html", run=run)


@dataclass(frozen=True)
class Picture:
    """A figure, and what it shows in words."""

    svg: str
    caption: str


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

    title: str
    file: str
    cells: int
    done: int
    failures: Sequence[Failure]
    table: Table | None = None
    listing: Listing | None = None
    seeds: int = 1
    pictures: Sequence[Picture] = ()
    classes: Sequence[Classes] = ()
    scenes: Sequence[SceneFigure] = ()

    @property
    def failed(self) -> int:
        """Cells whose newest record is an error."""
        return sum(it.count for it in self.failures)


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
    together: Listing | None = None  # of the sections that have a listing, where there are several


def _learning(result: Adaptation) -> list[Picture]:
    """How the coefficients, and the classifier where it was trained, were found."""
    pictures = []
    if curve := result.notes.get("grid"):
        chosen, losses = result.notes["v"], {it["v"]: it["loss"] for it in curve}
        svg = figures.grid_curve(
            losses,
            chosen,
            key="grid",
            alt=f"Loss on the support for {len(losses)} blends of statistics: {losses[0.0]:.3f} with the source's, "
            f"{losses[1.0]:.3f} with the support's, {losses[chosen]:.3f} with the chosen v = {chosen:g}.",
        )
        caption = (
            "The start: loss for every blend of statistics, the same in all layers, from the source's (v = 0) to the "
            f"support's (v = 1). Chosen: v = {chosen:g}."
        )
        pictures.append(Picture(svg, caption))
    what_is_learned = "the coefficients" if any(it.details for it in result.layers) else "the weights"
    for key, what in (("support_loss", what_is_learned), ("classifier_loss", "the classifier")):
        if epochs := result.notes.get(key):
            svg = figures.loss_curve(
                epochs,
                key=key.replace("_", "-"),
                alt=f"Loss on the support while learning {what}: {epochs[0]:.3f} in the first of "
                f"{len(epochs)} epochs, {epochs[-1]:.3f} in the last.",
            )
            pictures.append(Picture(svg, f"Gradient descent on {what}: mean loss in every epoch."))
    return pictures


def _matrices(found: Judged) -> list[Picture]:
    """What was taken for what, before and after."""
    pictures = []
    for key, network, counts in (("before", "the source network", found.before), ("after", "adapted", found.after)):
        right, total = int(counts.diagonal().sum()), int(counts.sum())
        facts = f"{right} of {words.counted(total, 'answer')} right"
        shares = counts.double() / counts.sum(1, keepdim=True)  # NaN for a class without an image
        svg = figures.confusion(
            shares.tolist(),
            found.names,
            key=f"confusion-{key}",
            alt=f"Confusion matrix on held-out images, {network}: {facts}.",
        )
        caption = f"{words.sentence(network)}: for each true class (row), the answers in percent. {facts}."
        pictures.append(Picture(svg, caption))
    return pictures


def _change(result: Adaptation) -> list[Picture]:
    """The coefficients that were learned for each layer."""
    details = [layer.details for layer in result.layers if layer.details]
    v = result.notes.get("v")
    pictures = []
    if all("eta" in it and "rho" in it for it in details) and details:
        for place, whose in enumerate(("source", "support")):
            start = [1 - v, v][place] if isinstance(v, float) else None
            lines = {"mean": [it["eta"][place] for it in details], "deviation": [it["rho"][place] for it in details]}
            svg = figures.over_layers(
                lines,
                label=f"weight of the {whose}",
                level=start,
                key=f"{whose}-weights",
                alt=f"Weight of the {whose}'s statistics in {len(details)} layers: {_range(lines['mean'])} for the "
                f"mean, {_range(lines['deviation'])} for the standard deviation.",
            )
            dashed = "" if start is None else f" Dashed: where all started, {start:g}."
            caption = f"How much each layer takes of the {whose}'s mean and standard deviation.{dashed}"
            pictures.append(Picture(svg, caption))
    return pictures


def _shift(result: Adaptation) -> list[Picture]:
    """Per layer: how far what the source network sees of the images is from what it was trained on."""
    found = result.shift
    if found is None or len(found.layers) < 2:  # a single layer is no curve
        return []
    pictures = []
    for key, label, level, caption in SHIFTS:
        values = [getattr(layer, key) for layer in found.layers]
        svg = figures.over_layers(
            {label: values},
            label=label,
            level=found.threshold if level is None else level,
            key=key.replace("_", "-"),
            alt=f"{caption} From {_range(values)} over {words.counted(len(values), 'layer')}.",
        )
        pictures.append(Picture(svg, caption))
    return pictures


SHIFTS = (
    (
        "score",
        "score",
        None,  # the threshold
        "How far each layer is from the source, in units of what as many images of the source would be off by chance. "
        "Dashed: the alarm, which counts for all layers together.",
    ),
    (
        "mean_shift",
        "mean shift",
        0.0,
        "How far the images' means lie from the source's, in the source's standard deviations "
        "(root mean square over channels).",
    ),
    (
        "std_ratio",
        "ratio of deviations",
        1.0,
        "Standard deviations of the images over those of the source (geometric mean over channels).",
    ),
)


def _support_scenes(result: Adaptation) -> Markup | None:
    """The first images with pixel labels, and what both networks say about them."""
    networks = {"source": result.source}
    if words.changes(result).bits:
        networks["adapted" if result.accepted else "rejected"] = result.candidate
    scenes = support_scenes(result.support, networks, result.preprocess, PICTURED) if result.support else []
    return side_by_side(scenes, result.classes, key="support") if scenes else None


def _chart(rows: Sequence[DemoRow], before: DemoRow) -> str:
    labels = [
        ", ".join(it for it in (row.method, row.settings, row.shots and f"k = {row.shots}") if it) for row in rows
    ]
    facts = "; ".join(f"{it}: {words.over_draws(row.accuracies)}" for it, row in zip(labels, rows, strict=True))
    return figures.accuracies(
        {label: row.accuracies for label, row in zip(labels, rows, strict=True)},
        level=before.mean,
        key="rows",
        alt=f"Accuracy on the target in percent, mean and spread over the draws. {facts}.",
    )


def _versions() -> dict[str, str]:
    return {"fewshift": __version__, "torch": torch.__version__, "Python": platform.python_version()}


def _gains(row: DemoRow, before: DemoRow) -> list[float]:
    """The difference to the source network, draw by draw."""
    if row is before:
        return []
    return [after - then for after, then in zip(row.accuracies, before.accuracies, strict=True)]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def _write(path: str | Path, template: str, **facts: Any) -> Path:
    text = rendered(template, **facts)
    with whole(path) as draft:
        draft.write_bytes(text.encode("utf-8", "replace"))  # a file name may hold bytes that are no text
    return Path(path)

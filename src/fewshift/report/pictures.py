"""Pictures of an adaptation: figures with captions, from what a result knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewshift.report import figures
from fewshift.report import prose as words
from fewshift.report.judged import Judged

if TYPE_CHECKING:
    from fewshift.lab.demo import DemoRow
    from fewshift.report.results import Adaptation


FEW = 20  # images of a class: fewer are counted, not turned into percentages


@dataclass(frozen=True)
class Picture:
    """A figure, and what it shows in words."""

    svg: str
    caption: str


def learning(result: Adaptation) -> list[Picture]:
    """How the coefficients, and the classifier where it was trained, were found."""
    pictures = []
    curve = result.notes.get("grid", [])
    if len(curve) > 1:
        chosen, losses = result.notes["v"], {point["v"]: point["loss"] for point in curve}
        svg = figures.grid_curve(
            losses,
            chosen,
            key="grid",
            alt=f"Loss on the support for {len(losses)} blends of statistics: {losses[min(losses)]:.3f} with the "
            f"source's, {losses[max(losses)]:.3f} with the support's, {losses[chosen]:.3f} with the chosen "
            f"v = {chosen:.3g}.",
        )
        caption = (
            "The start: loss for every blend of statistics, the same in all layers, from the source's (v = 0) to the "
            f"support's (v = 1). Chosen: v = {chosen:.3g}."
        )
        pictures.append(Picture(svg, caption))
    what_is_learned = "the coefficients" if any(layer.details for layer in result.layers) else "the weights"
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


def matrices(judged: Judged) -> list[Picture]:
    """What was taken for what, before and after."""
    pictures = []
    for key, network, counts in (("before", "the source network", judged.before), ("after", "adapted", judged.after)):
        right, total = int(counts.diagonal().sum()), int(counts.sum())
        facts = f"{right} of {words.counted(total, 'answer')} right"
        shares = counts.double() / counts.sum(1, keepdim=True)  # NaN for a class without an image
        few = int(counts.sum(1).max()) < FEW
        svg = figures.confusion(
            shares.tolist(),
            judged.names,
            counts=counts.int().tolist() if few else None,
            key=f"confusion-{key}",
            alt=f"Confusion matrix on held-out images, {network}: {facts}.",
        )
        unit = "" if few else " in percent"
        caption = f"{words.sentence(network)}: for each true class (row), the answers{unit}. {facts}."
        pictures.append(Picture(svg, caption))
    return pictures


def coefficients(result: Adaptation) -> list[Picture]:
    """The coefficients that were learned for each layer."""
    details = [layer.details for layer in result.layers if layer.details]
    v = result.notes.get("v")
    pictures = []
    if all("eta" in layer and "rho" in layer for layer in details) and details:
        for place, whose in enumerate(("source", "support")):
            start = [1 - v, v][place] if isinstance(v, float) else None
            lines = {
                "mean": [layer["eta"][place] for layer in details],
                "deviation": [layer["rho"][place] for layer in details],
            }
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


def shift(result: Adaptation) -> list[Picture]:
    """Per layer: how far what the source network sees of the images is from what it was trained on."""
    measured = result.shift
    if measured is None or len(measured.layers) < 2:  # a single layer is no curve
        return []
    pictures = []
    for key, label, level, caption in SHIFTS:
        values = [getattr(layer, key) for layer in measured.layers]
        svg = figures.over_layers(
            {label: values},
            label=label,
            level=measured.threshold if level is None else level,
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


def chart(rows: Sequence[DemoRow], before: DemoRow) -> str:
    """The accuracies of a demonstration's rows."""
    labels = [
        ", ".join(part for part in (row.method, row.settings, row.shots and f"k = {row.shots}") if part) for row in rows
    ]
    facts = "; ".join(f"{label}: {words.over_draws(row.accuracies)}" for label, row in zip(labels, rows, strict=True))
    return figures.accuracies(
        {label: row.accuracies for label, row in zip(labels, rows, strict=True)},
        level=before.mean,
        key="rows",
        alt=f"Accuracy on the target in percent, mean and spread over the draws. {facts}.",
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"

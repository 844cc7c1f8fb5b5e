"""Metrics: pure functions of a tally, the confusion matrix with true classes as rows and predicted ones as columns.

Scores are float64, whatever the images were: 621 of 1,000 is 0.621. `METRICS` is the one list of them; a new metric is
one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


def tally(labels: Tensor, predictions: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """How often each true class (row) was predicted as each class (column); add tallies to pool them."""
    labels, predictions = labels.flatten(), predictions.flatten()
    if ignore is not None:
        keep = labels != ignore
        labels, predictions = labels[keep], predictions[keep]
    return (labels * classes + predictions).bincount(minlength=classes**2).reshape(classes, classes)


def accuracy(counts: Tensor) -> float:
    """The share of all images that is right."""
    return float(counts.diagonal().sum().double() / counts.sum().clamp(min=1))


def per_class_accuracy(counts: Tensor) -> Tensor:
    """Right / all of a class, NaN for classes that do not occur: its recall."""
    return _ratio(counts.diagonal(), counts.sum(1))


def macro_recall(counts: Tensor) -> float:
    """The mean accuracy of the classes that occur: what papers on VisDA call average precision."""
    return float(per_class_accuracy(counts).nanmean())


def per_class_f1(counts: Tensor) -> Tensor:
    """2 TP / (2 TP + FP + FN), NaN for classes that neither occur nor are predicted."""
    return _ratio(2 * counts.diagonal(), counts.sum(0) + counts.sum(1))


def macro_f1(counts: Tensor, classes: Tensor | None = None) -> float:
    """The mean F1 of these classes; by default of those with an image in this test set (the convention of WILDS)."""
    scores = per_class_f1(counts).nan_to_num(0.0)
    return float(scores[counts.sum(1) > 0 if classes is None else classes].mean())


def per_class_iou(counts: Tensor) -> Tensor:
    """TP / (TP + FP + FN): NaN for an absent class that is never predicted, 0 for one that is."""
    hits = counts.diagonal()
    return _ratio(hits, counts.sum(0) + counts.sum(1) - hits)


def mean_iou(counts: Tensor, *, present_only: bool = False) -> float:
    """The mean IoU of the classes that occur or are predicted; with `present_only` of those that occur."""
    scores = per_class_iou(counts)
    return float((scores[counts.sum(1) > 0] if present_only else scores).nanmean())


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean gap of confidence and accuracy over equally wide bins of confidence."""
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    which = torch.bucketize(confidence, edges[1:-1])
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right - confidence)
    return float(gaps.abs().sum() / max(1, len(labels)))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part.double() / whole.clamp(min=1), torch.nan)


@dataclass(frozen=True)
class Predicted:
    """What a metric may look at; only the tally is always there."""

    tally: Tensor
    probabilities: Tensor | None = None  # (n, classes)
    labels: Tensor | None = None  # (n,), of the same images
    domain_classes: Tensor | None = None  # the classes that occur before the support is taken out
    support_tally: Tensor | None = None  # of the images that are left out for the support's sake


class PerClass(NamedTuple):
    """A score for each class."""

    title: str
    of: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Metric:
    """A score from 0 to 1. `of` returns None where the metric cannot be computed."""

    name: str
    title: str
    of: Callable[[Predicted], float | None]
    short_title: str = ""
    higher_is_better: bool = True
    units: tuple[str, ...] = ("image", "pixel")  # what the labels that it needs belong to
    per_class: PerClass | None = None

    @property
    def brief(self) -> str:
        """The title where space is narrow."""
        return self.short_title or self.title


def _of_tally(score: Callable[[Tensor], float]) -> Callable[[Predicted], float]:
    return lambda predicted: score(predicted.tally)


def _fixed_f1(predicted: Predicted) -> float | None:
    return None if predicted.domain_classes is None else macro_f1(predicted.tally, predicted.domain_classes)


def _f1_with_support(predicted: Predicted) -> float | None:
    return None if predicted.support_tally is None else macro_f1(predicted.tally + predicted.support_tally)


def _calibration(predicted: Predicted) -> float | None:
    if predicted.probabilities is None or predicted.labels is None:
        return None
    return calibration_error(predicted.probabilities, predicted.labels)


IMAGE, PIXEL = ("image",), ("pixel",)
RECALL, F1, IOU = PerClass("accuracy", per_class_accuracy), PerClass("F1", per_class_f1), PerClass("IoU", per_class_iou)
FIXED = "macro-F1 over the classes there were before the support was taken out"
PRESENT = "mean IoU of the classes that occur"
_ROWS = (
    Metric("accuracy", "accuracy", _of_tally(accuracy), per_class=RECALL),
    Metric("macro_recall", "mean accuracy of the classes", _of_tally(macro_recall), "class accuracy", per_class=RECALL),
    Metric("macro_f1", "macro-F1 over the classes that occur", _of_tally(macro_f1), "macro-F1", True, IMAGE, F1),
    Metric("macro_f1_fixed", FIXED, _fixed_f1, "macro-F1", units=IMAGE),
    Metric("macro_f1_with_support", "macro-F1 with the support counted in", _f1_with_support, "macro-F1", units=IMAGE),
    Metric("mean_iou", "mean IoU", _of_tally(mean_iou), units=PIXEL, per_class=IOU),
    Metric("mean_iou_present", PRESENT, _of_tally(partial(mean_iou, present_only=True)), units=PIXEL, per_class=IOU),
    Metric("calibration_error", "expected calibration error", _calibration, "calibration error", False, IMAGE),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ROWS}


def metrics_of(unit: str) -> dict[str, Metric]:
    """The metrics that labels of each `unit` ("image" or "pixel") allow."""
    return {name: metric for name, metric in METRICS.items() if unit in metric.units}


def scores(predicted: Predicted, unit: str) -> dict[str, float]:
    """Every metric that can be computed, by its name."""
    values = {name: metric.of(predicted) for name, metric in metrics_of(unit).items()}
    return {name: value for name, value in values.items() if value is not None}

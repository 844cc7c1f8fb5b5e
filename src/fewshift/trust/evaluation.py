"""How right networks are on labelled images: per class, per image, before and after adaptation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fewshift.core._display import Displayed, few
from fewshift.core._progress import Stage, plan, track
from fewshift.core.labels import PIXELS
from fewshift.core.metrics import accuracy, mean_iou, per_class_accuracy, per_class_iou, tally
from fewshift.core.network import copied_like, logits_of
from fewshift.core.outputs import refuse_unanswered
from fewshift.core.probing import running
from fewshift.errors import FewshiftError
from fewshift.images.inputs import Labelled
from fewshift.images.label_files import Palette
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes
from fewshift.images.sliding_window import Size, evaluating, label_map, output_shape
from fewshift.trust.gain import Gain, gain_from


@dataclass(frozen=True, repr=False)
class Evaluation(Displayed):
    """What networks make of the same labelled images. Scores are in percent, by the name of the network."""

    classes: tuple[str, ...]
    tallies: Mapping[str, Tensor]  # (classes, classes): true classes are rows, predicted ones columns
    images: Mapping[str, Sequence[float]]  # the score of each image, from 0 to 1; NaN if nothing in it is labelled

    class_scores: ClassVar[staticmethod[[Tensor], Tensor]]  # of a tally: from 0 to 1; NaN where a class has none

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The scores as JSON knows them."""

    @property
    def title(self) -> str:
        """What it is."""
        return f"Evaluation of {len(next(iter(self.images.values()))):,} images"

    @property
    def facts(self) -> dict[str, str]:
        """The share that is right and the mean over classes, for each network."""
        means = {name: "-" if value is None else f"{value:.1f} %" for name, value in self.mean.items()}
        scores = {name: f"{value:.1f} % right, mean of classes {means[name]}" for name, value in self.accuracy.items()}
        return scores | {"classes": few(self.classes)}

    @property
    def labels(self) -> list[int]:
        """How many labels each class has."""
        counts: list[int] = next(iter(self.tallies.values())).sum(1).tolist()
        return counts

    @property
    def mean(self) -> dict[str, float | None]:
        """The mean over the classes that have a score."""
        scores = {name: self.class_scores(counts) for name, counts in self.tallies.items()}
        return {name: _percent(float(values.nanmean())) for name, values in scores.items()}

    @property
    def accuracy(self) -> dict[str, float]:
        """The share of all labels that is right."""
        return {name: 100 * accuracy(counts) for name, counts in self.tallies.items()}

    @property
    def rows(self) -> list[tuple[str, int, list[float | None]]]:
        """Name, labels and the score by each network, for the classes that have a score."""
        scores = [self.class_scores(counts).tolist() for counts in self.tallies.values()]
        columns = ([_percent(score) for score in values] for values in zip(*scores, strict=True))
        rows = zip(self.classes, self.labels, columns, strict=True)
        return [row for row in rows if row[2] != [None] * len(scores)]

    @cached_property
    def changes(self) -> list[float]:
        """The score of the last network less that of the first, image by image."""
        first, *_, last = self.images.values()
        return [after - before for before, after in zip(first, last, strict=True)]

    @property
    def better(self) -> int:
        """Images whose score rose."""
        return sum(change > 0 for change in self.changes)

    @property
    def worse(self) -> int:
        """Images whose score fell."""
        return sum(change < 0 for change in self.changes)

    @property
    def same(self) -> int:
        """Images whose score stayed, or that have none."""
        return len(self.changes) - self.better - self.worse

    def extremes(self, most: int) -> tuple[list[int], list[int]]:
        """The images that gained most and those that lost most, best and worst first."""
        scored = [index for index, change in enumerate(self.changes) if not math.isnan(change)]
        order = sorted(scored, key=self.changes.__getitem__)
        lost = [index for index in order if self.changes[index] < 0]
        gained = [index for index in reversed(order) if self.changes[index] > 0]
        return gained[:most], lost[:most]


@dataclass(frozen=True, repr=False)
class ImageEvaluation(Evaluation):
    """One label per image: accuracy."""

    class_scores = staticmethod(per_class_accuracy)

    truth: Sequence[int] = ()  # the label of each image

    @property
    def gain(self) -> Gain | None:
        """Of the last network over the first, every class with the same weight; None for one network."""
        if len(self.images) < 2:
            return None
        first, *_, last = (torch.tensor(scores) for scores in self.images.values())
        return gain_from(torch.arange(len(first)), first, last, first * 0, labels=torch.tensor(self.truth))

    def to_json(self) -> dict[str, Any]:
        """Images, accuracy, and the accuracy of each class."""
        per_class = {name: dict(zip(self.tallies, values, strict=True)) for name, _, values in self.rows}
        gain = self.gain
        interval = {} if gain is None else {"gain": {"point": gain.point, "low": gain.low, "high": gain.high}}
        return {"images": sum(self.labels), "accuracy": self.accuracy, **interval, "per_class": per_class}


@dataclass(frozen=True)
class Sizes:
    """At which sizes (width, height) pixels were counted, and which sizes their files have: scores depend on it."""

    counted: Sequence[tuple[int, int]]
    files: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class ScenePredictions:
    """One preprocessed image, its labels, and the labels that each network predicts."""

    name: str
    image: Tensor  # (channels, H, W)
    labels: Tensor  # (H, W)
    predictions: Mapping[str, Tensor]  # (H, W)


@dataclass(frozen=True, repr=False)
class PixelEvaluation(Evaluation):
    """One label per pixel: IoU. Predictions are not kept: `scene` makes those of one image again."""

    class_scores = staticmethod(per_class_iou)

    palette: Palette | None = None
    sizes: Sizes | None = None
    preprocess: Preprocess | None = None
    scene: Callable[[int], ScenePredictions] | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Images, pixels, mean IoU, pixel accuracy, sizes, and the IoU of each class."""
        per_class = {
            name: {"pixels": pixels, "iou": dict(zip(self.tallies, values, strict=True))}
            for name, pixels, values in self.rows
        }
        sizes = self.sizes and {"counted": list(self.sizes.counted), "files": list(self.sizes.files)}
        return {
            "images": len(next(iter(self.images.values()))),
            "pixels": sum(self.labels),
            "mean_iou": self.mean,
            "pixel_accuracy": self.accuracy,
            **({"sizes": sizes} if sizes else {}),
            "per_class": per_class,
        }


def evaluate_networks(
    networks: Mapping[str, nn.Module],
    labelled: Labelled,
    *,
    window: Size | None = None,
    stride: Size | None = None,
    batch_size: int = 32,
) -> Evaluation:
    """The scores of each network on labelled images; pixels are counted as the network sees them."""
    if labelled.kind is PIXELS:
        with plan([Stage("images", 1)]):
            return _pixel_evaluation(networks, labelled, window, stride)
    refuse_window(window, stride)
    with plan([Stage("images", 1)] * len(networks)):
        return _image_evaluation(networks, labelled, batch_size)


def _image_evaluation(networks: Mapping[str, nn.Module], labelled: Labelled, batch_size: int) -> ImageEvaluation:
    labels = torch.tensor([int(label) for label in labelled.labels])  # type: ignore[union-attr]
    tallies, images = {}, {}
    for name, network in networks.items():
        pictures = (labelled[index][0] for index in track(range(len(labelled)), "images"))
        predicted = refuse_unanswered(torch.stack(list(class_probabilities(network, pictures, batch_size))))
        classes = labelled.classes or tuple(map(str, range(predicted.shape[1])))
        if predicted.shape[1] != len(classes):
            raise FewshiftError(
                f"the images have {len(classes)} classes and the network {predicted.shape[1]} outputs: "
                "pass --classes (classes=), a name for each output in their order"
            )
        labelled.kind.check_range(labelled.kind.counts(labels), len(classes))
        tallies[name] = tally(labels, predicted.argmax(1).cpu(), len(classes))
        images[name] = (predicted.argmax(1).cpu() == labels).double().tolist()
    return ImageEvaluation(classes, tallies, images, labels.tolist())


def class_probabilities(network: nn.Module, images: Iterable[Tensor], batch_size: int = 32) -> Iterator[Tensor]:
    """(classes,): the probabilities of one preprocessed image after another; `images` are read a batch at a time."""
    network = evaluating(network)
    for group in _groups(iter(images), batch_size):
        with torch.no_grad(), running(group):
            logits = logits_of(network(copied_like(network, group)))
        several = logits[0].numel() != logits.shape[1]
        if several or (logits.ndim == 4 and len(output_shape(network, group[0])) == 3):
            raise FewshiftError(
                f"the {type(network).__name__} labels every pixel: give a folder with images/ and labels/ of the same "
                "names"
            )
        yield from logits.flatten(1).float().softmax(1)


def refuse_window(window: Size | None, stride: Size | None) -> None:
    """Raise an error where a network with one output per image was given a window."""
    if window is not None or stride is not None:
        raise FewshiftError("this network has one output per image: leave out --window and --stride (window=, stride=)")


def _groups(images: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Batches of `size` images, or single images where their shapes differ."""
    while batch := list(islice(images, size)):
        alike = len({image.shape for image in batch}) == 1
        yield from [torch.stack(batch)] if alike else [image.unsqueeze(0) for image in batch]


def _pixel_evaluation(
    networks: Mapping[str, nn.Module], labelled: Labelled, window: Size | None, stride: Size | None
) -> PixelEvaluation:
    networks = {name: evaluating(network) for name, network in networks.items()}

    def scene(index: int) -> ScenePredictions:
        image, labels = labelled[index]
        maps = {
            name: label_map(network, image, window=window, stride=stride).labels.cpu()
            for name, network in networks.items()
        }
        name = labelled.files[index].name if labelled.files else f"image {index + 1}"
        return ScenePredictions(name, image, torch.as_tensor(labels).cpu(), maps)

    tallies: dict[str, Tensor] = {}
    images: dict[str, list[float]] = {name: [] for name in networks}
    classes = labelled.classes or ()
    counted, stored = set(), set()
    for index in track(range(len(labelled)), "images"):
        shown = scene(index)
        if not classes:
            classes = tuple(
                map(str, range(output_shape(next(iter(networks.values())), shown.image, window, stride)[0]))
            )
        counted.add((shown.labels.shape[1], shown.labels.shape[0]))
        if isinstance(labelled, Scenes):
            stored.add(labelled.size(index))
        _refuse_other_labels(shown.labels, len(classes))
        for name, predicted in shown.predictions.items():
            counts = PIXELS.tally(shown.labels.long(), predicted.long(), len(classes))
            tallies[name] = tallies.get(name, torch.zeros_like(counts)) + counts
            images[name].append(mean_iou(counts))
    if not any(counts.any() for counts in tallies.values()):
        raise FewshiftError(f"no pixel of the {len(labelled):,} images is labelled: label some")
    return PixelEvaluation(
        classes,
        tallies,
        images,
        palette=labelled.palette if isinstance(labelled, Scenes) else None,
        sizes=Sizes(sorted(counted), sorted(stored)) if stored else None,
        preprocess=labelled.preprocess if isinstance(labelled, Scenes) else None,
        scene=scene,
    )


def _refuse_other_labels(labels: Tensor, classes: int) -> None:
    """Raise an error if a pixel has a label that is no output."""
    values, counts = labels[labels != PIXELS.ignored].long().unique(return_counts=True)
    PIXELS.check_range(dict(zip(values.tolist(), counts.tolist(), strict=True)), classes)


def _percent(share: float) -> float | None:
    return None if math.isnan(share) else 100 * share

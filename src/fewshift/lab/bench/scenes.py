"""Running a cell with pixel labels: one tally of all pixels, and small pictures for the page."""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from fewshift.core import metrics
from fewshift.core.labels import PIXELS
from fewshift.core.layout import fastest_layout, laid_out, with_layout
from fewshift.core.losses import at_labels
from fewshift.core.method import Method, Needs
from fewshift.core.network import like, logits_of
from fewshift.core.randomness import checked_seed
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.formats import picture
from fewshift.images.label_files import indexed, resized_labels
from fewshift.images.scenes import Scenes
from fewshift.lab.bench.cell import Cell
from fewshift.report.scenes import Scene, encoded, image_iou, photograph

WHOLE = {"answer", "image", "labels", "name"}  # what a record of the source network keeps of a scene
PICTURES = 150  # images of which a record keeps a small picture
WIDTH = 240  # pixels of its longer side
TEST_SEED = 0
MOST = 3  # scenes that gained most, and that lost most, on a page


@dataclass(frozen=True)
class SceneSplit:
    """The scenes that a network is judged on, and the scenes that its support is drawn from; they may be the same."""

    test: Scenes
    pool: Scenes

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.test.classes

    def drawn(self, count: int | None, seed: int) -> Tensor:
        """`count` images of the pool; each draw is part of every larger one."""
        if count is None:
            return torch.empty(0, dtype=torch.long)
        if count > len(self.pool):
            raise FewshiftError(f"{count} support images asked of {len(self.pool)}: ask for fewer")
        return torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(checked_seed(seed)))[:count]

    def judged(self, cell: Cell) -> Tensor:
        """The images that every row is judged on: all that are in no support of this seed, up to `max_test`."""
        left = (
            self.pool.without(self.drawn(cell.largest_support, cell.seed))
            if self.pool is self.test
            else torch.arange(len(self.test))
        )
        return capped(left, len(self.test), cell.max_test)


def capped(test: Tensor, images: int, most: int | None) -> Tensor:
    """At most so many of the test images; the same images for every seed of the support."""
    if most is None or most >= len(test):
        return test
    order = torch.randperm(images, generator=torch.Generator().manual_seed(TEST_SEED))
    return order[torch.isin(order, test)][:most].sort().values


def in_precision(precision: str, *, changing: bool) -> torch.autocast:
    """Where networks compute in so many bits; weights and statistics keep theirs.

    Rounded weights are kept for the next batch, unless the network is `changing`: it would go on with its first ones.
    """
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=not changing)


def run_scenes(cell: Cell, method: Method, network: nn.Module, split: SceneSplit) -> dict[str, Any]:
    """The result of one experiment as plain numbers, with small pictures of the predictions."""
    _check(cell, method)
    drawn, judged = split.drawn(cell.shots, cell.seed), split.judged(cell)
    if method.needs is Needs.STREAM:
        order = judged[torch.randperm(len(judged), generator=torch.Generator().manual_seed(cell.seed))]
        batches = order.split(cell.condition.batch_size)
    else:
        batches = judged.split(1)

    pairs = [split.pool[index] for index in drawn.tolist()]
    images, labels = tuple(image for image, _ in pairs), tuple(label for _, label in pairs)
    support = Support(images, labels, split.classes) if pairs else None
    stream = Unlabelled(split.test.subset(torch.cat(list(batches)).tolist())) if method.needs is Needs.STREAM else None
    began = time.perf_counter()
    with in_precision(cell.precision, changing=True):
        fitted = method.fit(network, Target(support, stream), cell.seed)
    adapted = time.perf_counter()
    layout = fastest_layout(network, like(network, split.test[int(judged[0])][0][None]))
    predictor = with_layout(fitted.predictor, layout)
    classes = len(split.classes)
    tally, scores = torch.zeros(classes, classes, dtype=torch.long), dict[int, float]()
    kept = set(_spread(judged.tolist(), PICTURES))
    pictures: dict[int, dict[str, str]] = {}
    for index, truth, answer in _answers(predictor, split.test, batches, layout, cell.precision):
        tally += PIXELS.tally(truth, answer, classes)
        scores[index] = image_iou(truth, answer, classes)
        if index in kept:
            pictures[index] = _pictures(split.test, index, truth, answer, whole=method.needs is Needs.NOTHING)
    ended = time.perf_counter()
    return {
        **metrics.scores(metrics.Predicted(tally), PIXELS.unit),
        "per_class_iou": [_number(score) for score in metrics.per_class_iou(tally).tolist()],
        "tally": tally.tolist(),
        "classes": list(split.classes),
        "palette": [list(colour) for colour in split.test.palette],
        "support": drawn.tolist(),
        "image_iou": {str(index): _number(scores[index]) for index in sorted(scores)},
        "pictures": {str(index): pictures[index] for index in sorted(pictures)},
        "realised_counts": tally.sum(1).tolist(),
        "notes": short_notes(fitted.notes),
        "layers": {},
        "seconds": {"adapt": adapted - began, "predict": ended - adapted},
    }


def short_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes without long lists: a record is one line."""
    return {key: value for key, value in notes.items() if not isinstance(value, (list, dict)) or len(value) <= 20}


def _check(cell: Cell, method: Method) -> None:
    if cell.condition.order != "shuffled" or cell.condition.alpha is not None:
        raise FewshiftError("a scene holds many classes: of the conditions of a stream, set only batch_size")
    if method.needs is Needs.UNLABELLED or (method.needs is Needs.EITHER and cell.shots is None):
        raise FewshiftError(f"{method.name} runs on scenes only with a support: give the row shots")


def _number(score: float) -> float | None:
    return None if math.isnan(score) else round(score, 6)


def extremes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[Scene], list[Scene]]:
    """From the results of two cells on the same images: the scenes that gained most, and those that lost most."""
    old, new = before["image_iou"], after["image_iou"]
    shown = [
        index
        for index, kept in before["pictures"].items()
        if index in after["pictures"] and None not in (old.get(index), new.get(index)) and kept.keys() >= WHOLE
    ]
    order = sorted(shown, key=lambda index: new[index] - old[index])
    lost = [index for index in order if new[index] < old[index]][:MOST]
    gained = [index for index in reversed(order) if new[index] > old[index]][:MOST]

    def scene(index: str) -> Scene:
        kept = before["pictures"][index]
        answers = {"source": kept, "adapted": after["pictures"][index]}
        return Scene(
            name=kept["name"],
            pixels=_tensor(kept["image"]).permute(2, 0, 1),
            labels=_tensor(kept["labels"]),
            answers={name: _tensor(pictures["answer"]) for name, pictures in answers.items()},
            scores={"source": old[index], "adapted": new[index]},
        )

    return [scene(index) for index in gained], [scene(index) for index in lost]


@torch.no_grad()
def _answers(
    predictor: nn.Module, scenes: Scenes, batches: Sequence[Tensor], layout: torch.memory_format, precision: str
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(index, labels, predicted classes) of one image after the other."""
    for batch in batches:
        pairs = [scenes[index] for index in batch.tolist()]
        images, labels = _stacked([image for image, _ in pairs]), [label for _, label in pairs]
        with in_precision(precision, changing=True):
            logits = logits_of(predictor(like(predictor, laid_out(images, layout)))).float()
        for index, label, answer in zip(batch.tolist(), labels, logits, strict=True):
            yield index, label, at_labels(answer[None], label[None])[0].argmax(0)


def _stacked(images: list[Tensor]) -> Tensor:
    if len({image.shape for image in images}) > 1:
        raise FewshiftError("scenes of different sizes cannot be one batch: set batch_size = 1")
    return torch.stack(images)


def _spread(indices: list[int], most: int) -> list[int]:
    """At most `most` of them, equally spaced."""
    return indices if len(indices) <= most else [indices[step * len(indices) // most] for step in range(most)]


def _pictures(scenes: Scenes, index: int, labels: Tensor, answer: Tensor, *, whole: bool) -> dict[str, str]:
    """Small pictures: the prediction, and with `whole` also the image and its labels."""
    size = _small(labels.shape[1], labels.shape[0])
    pictures = {"answer": encoded(indexed(resized_labels(answer.byte(), size), scenes.palette), "png", optimize=True)}
    if whole:
        photo = photograph(scenes.pixels(index)[0]).resize(size, Image.Resampling.LANCZOS)
        pictures["image"] = encoded(photo, "jpeg", quality=75)
        pictures["labels"] = encoded(indexed(resized_labels(labels.byte(), size), scenes.palette), "png", optimize=True)
        pictures["name"] = scenes.files[index].name
    return pictures


def _small(width: int, height: int) -> tuple[int, int]:
    scale = min(1.0, WIDTH / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _tensor(text: str) -> Tensor:
    """A small picture of a record."""
    import numpy as np

    try:
        return torch.from_numpy(np.array(picture(io.BytesIO(base64.b64decode(text)))))
    except Exception as error:  # decoders raise whatever broken bytes lead them to
        raise FewshiftError(
            "a picture in records.jsonl cannot be decoded: remove the lines with pictures and run the grid again"
        ) from error

"""Running a cell whose images have a label for every pixel: one tally of all pixels, and pictures to look at."""

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
from fewshift.core.losses import at_labels
from fewshift.core.method import Method, Needs
from fewshift.core.network import channels_last, like, logits_of
from fewshift.core.randomness import checked_seed
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.images.scenes import Scenes
from fewshift.lab.bench.cell import Cell
from fewshift.report.scenes import Scene, image_iou, indexed, photograph, resized_labels

PICTURES = 150  # images of which a record keeps a small picture
WIDTH = 240  # pixels of its longer side
MOST = 3  # scenes that gained most, and that lost most, on a page


@dataclass(frozen=True)
class Scenery:
    """The scenes a network is judged on, and those its support is drawn from: others, or the same."""

    test: Scenes
    pool: Scenes

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names."""
        return self.test.classes

    def drawn(self, count: int | None, seed: int) -> Tensor:
        """So many images of the pool, each draw part of the next larger one."""
        if count is None:
            return torch.empty(0, dtype=torch.long)
        if count > len(self.pool):
            raise FewshiftError(f"{count} support images asked of {len(self.pool)}: ask for fewer")
        return torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(checked_seed(seed)))[:count]

    def judged(self, cell: Cell) -> Tensor:
        """The images that every row is judged on: all that are in no support of this seed, capped if asked."""
        left = (
            self.pool.without(self.drawn(cell.largest_support, cell.seed))
            if self.pool is self.test
            else torch.arange(len(self.test))
        )
        if cell.max_test is None or cell.max_test >= len(left):
            return left
        order = torch.randperm(len(self.test), generator=torch.Generator().manual_seed(0))
        return order[torch.isin(order, left)][: cell.max_test].sort().values


def run_scenes(cell: Cell, method: Method, network: nn.Module, scenery: Scenery) -> dict[str, Any]:
    """The result of one experiment as plain numbers, and small pictures of the answers."""
    condition = cell.condition
    if condition.order != "shuffled" or condition.alpha is not None:
        raise FewshiftError("scenes hold many classes each: of the conditions of a stream only batch_size fits them")
    if method.needs is Needs.UNLABELLED or (method.needs is Needs.EITHER and cell.shots is None):
        raise FewshiftError(f"{method.name} is run on scenes with a support only: give the row shots")
    drawn, judged = scenery.drawn(cell.shots, cell.seed), scenery.judged(cell)
    if method.needs is Needs.STREAM:
        order = judged[torch.randperm(len(judged), generator=torch.Generator().manual_seed(cell.seed))]
        batches = order.split(condition.batch_size)
    else:
        batches = judged.split(1)

    pairs = [scenery.pool[int(it)] for it in drawn]
    images, labels = tuple(image for image, _ in pairs), tuple(label for _, label in pairs)
    support = Support(images, labels, scenery.classes) if pairs else None
    stream = Unlabelled(_Images(scenery.test, torch.cat(list(batches)))) if method.needs is Needs.STREAM else None
    began = time.perf_counter()
    fitted = method.fit(network, Target(support, stream), cell.seed)
    adapted = time.perf_counter()
    predictor = fitted.predictor.to(memory_format=torch.channels_last)
    classes = len(scenery.classes)
    counts, scores = torch.zeros(classes, classes, dtype=torch.long), dict[int, float]()
    kept = set(_spread(judged.tolist(), PICTURES))
    pictures: dict[int, dict[str, str]] = {}
    for index, truth, answer in _answers(predictor, scenery.test, batches):
        counts += PIXELS.tally(truth, answer, classes)
        scores[index] = image_iou(truth, answer, classes)
        if index in kept:
            pictures[index] = _pictures(scenery.test, index, truth, answer, whole=method.needs is Needs.NOTHING)
    ended = time.perf_counter()
    per_class = metrics.per_class_iou(counts).tolist()
    return {
        **metrics.scores(metrics.Predicted(counts), PIXELS.unit),
        "per_class_iou": [None if math.isnan(it) else round(it, 6) for it in per_class],
        "tally": counts.tolist(),
        "classes": list(scenery.classes),
        "palette": [list(colour) for colour in scenery.test.palette],
        "support": drawn.tolist(),
        "image_iou": {str(it): None if math.isnan(scores[it]) else round(scores[it], 6) for it in sorted(scores)},
        "pictures": {str(it): pictures[it] for it in sorted(pictures)},
        "realised_counts": counts.sum(1).tolist(),
        "notes": {key: it for key, it in fitted.notes.items() if not isinstance(it, (list, dict)) or len(it) <= 20},
        "layers": {},
        "seconds": {"adapt": adapted - began, "predict": ended - adapted},
    }


def extremes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[Scene], list[Scene]]:
    """From the results of two cells on the same images: the scenes that gained most, and those that lost most."""
    old, new = before["image_iou"], after["image_iou"]
    shown = [it for it in before["pictures"] if it in after["pictures"] and None not in (old.get(it), new.get(it))]
    order = sorted(shown, key=lambda it: new[it] - old[it])
    lost = [it for it in order if new[it] < old[it]][:MOST]
    gained = [it for it in reversed(order) if new[it] > old[it]][:MOST]

    def scene(index: str) -> Scene:
        kept = before["pictures"][index]
        answers = {"source": kept, "adapted": after["pictures"][index]}
        return Scene(
            name=kept["name"],
            pixels=_tensor(kept["image"]).permute(2, 0, 1),
            labels=_tensor(kept["labels"]),
            answers={name: _tensor(it["answer"]) for name, it in answers.items()},
            scores={"source": old[index], "adapted": new[index]},
        )

    return [scene(it) for it in gained], [scene(it) for it in lost]


@torch.no_grad()
def _answers(predictor: nn.Module, scenes: Scenes, batches: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(index, labels, predicted classes) of one image after the other."""
    for batch in batches:
        pairs = [scenes[it] for it in batch.tolist()]
        images, labels = _stacked([image for image, _ in pairs]), [label for _, label in pairs]
        logits = logits_of(predictor(like(predictor, channels_last(images))))
        for index, label, answer in zip(batch.tolist(), labels, logits, strict=True):
            yield index, label, at_labels(answer[None], label[None])[0].argmax(0)


def _stacked(images: list[Tensor]) -> Tensor:
    if len({image.shape for image in images}) > 1:
        raise FewshiftError("scenes of different sizes cannot be one batch: set batch_size = 1")
    return torch.stack(images)


@dataclass(frozen=True)
class _Images:
    scenes: Scenes
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Tensor:
        return self.scenes[int(self.indices[index])][0]


def _spread(indices: list[int], most: int) -> list[int]:
    """So many of them, from everywhere."""
    return indices if len(indices) <= most else [indices[it * len(indices) // most] for it in range(most)]


def _pictures(scenes: Scenes, index: int, labels: Tensor, answer: Tensor, *, whole: bool) -> dict[str, str]:
    """Small pictures of an answer, and with `whole` also of the image and its labels."""
    size = _small(labels.shape[1], labels.shape[0])
    found = {"answer": _encoded(indexed(resized_labels(answer.byte(), size), scenes.palette), "png")}
    if whole:
        photo = photograph(scenes.pixels(index)[0]).resize(size, Image.Resampling.LANCZOS)
        found["image"] = _encoded(photo, "jpeg")
        found["labels"] = _encoded(indexed(resized_labels(labels.byte(), size), scenes.palette), "png")
        found["name"] = scenes.files[index].name
    return found


def _small(width: int, height: int) -> tuple[int, int]:
    scale = min(1.0, WIDTH / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _encoded(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 75} if kind == "jpeg" else {"optimize": True}))
    return base64.b64encode(file.getvalue()).decode()


def _tensor(text: str) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(text)))))

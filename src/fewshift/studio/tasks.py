"""What processes of the studio do: answer images, measure a learning curve, export. (`adapt_task` adapts.)

A task runs in a process of its own and tells what it has by messages: tuples that begin with a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import fewshift
from fewshift.core._progress import told_to, watched_by
from fewshift.core.network import Network, copied_like, head_inputs, like, logits_of
from fewshift.errors import FewshiftError
from fewshift.images.folders import read_tensor
from fewshift.images.preprocess import FileSteps, Preprocess
from fewshift.images.scenes import scene_folder
from fewshift.images.sliding_window import evaluating
from fewshift.report import prose
from fewshift.studio.parcel import Parcel

Send = Callable[[tuple[Any, ...]], None]
Numbered = tuple[tuple[int, Path], ...]  # images by the number that the page knows them by
Array = np.ndarray[Any, Any]

BATCH = 16
FIRST = 64  # images that are answered before anything else: what the page shows first
SHIFT_IMAGES = 128  # that the verdict without labels looks at
DIRECTIONS = 64  # to which features are reduced
EVERY = 0.1  # seconds between messages about progress
EXPORT = "fewshift:export"
NO_EXPORT = 'this installation cannot write ONNX: pip install "fewshift[onnx]"'


class StudioTask(Protocol):
    """Work for a process of its own."""

    def work(self, send: Send) -> None:
        """Do it, and send messages."""


@contextmanager
def telling(send: Send) -> Iterator[None]:
    """Within the block, send ("share", done, then) and ("stage", words), not too often."""
    last = {"share": 0.0, "stage": 0.0}

    def now_and_then(kind: str, *facts: Any) -> None:
        if time.monotonic() - last[kind] >= EVERY:
            last[kind] = time.monotonic()
            send((kind, *facts))

    def hear(what: str, done: int, total: int) -> None:
        now_and_then("stage", f"{what}, {done} of {total}")

    with watched_by(lambda share: now_and_then("share", *share)), told_to(hear):
        yield


# --- answers


@dataclass(frozen=True)
class AnswerTask:
    """What the network says about every image, and whether they differ from those of training."""

    parcel: Parcel
    images: Numbered  # in the order in which they are answered
    pixels: bool = False  # a network that labels pixels has no single answer

    def work(self, send: Send) -> None:
        """Send ("answers", numbers, probabilities, features), ("broken", number, why) and ("shift", ...)."""
        model, steps = self.parcel.unpacked()
        if not self.pixels:
            self._answer(model, steps, self.images[:FIRST], send)
        send(("shift", *self._shift(model, steps)))
        if not self.pixels:
            self._answer(model, steps, self.images[FIRST:], send)

    def _shift(self, model: nn.Module, steps: FileSteps) -> tuple[bool | None, str, str]:
        """Whether the images differ, the same in words, and what that means; None where it cannot be seen."""
        files = [file for _, file in self.images]
        chosen = files[:: max(1, len(files) // SHIFT_IMAGES)][:SHIFT_IMAGES]
        readable = [file for file in chosen if _can_be_read(file, steps)]
        try:
            measured = fewshift.shift(model, readable, preprocess=steps)
        except FewshiftError as error:
            return None, f"whether the images differ from those of training cannot be seen: {error}", ""
        return measured.shifted, prose.shift(measured), prose.shift_meaning(measured)

    def _answer(self, model: nn.Module, steps: FileSteps, images: Numbered, send: Send) -> None:
        for numbers, probabilities, features in answered(model, steps, images, send):
            send(("answers", numbers, probabilities, features))


@dataclass(frozen=True)
class LookTask:
    """What the adapted network says about images."""

    parcel: Parcel
    delta: Path
    images: Numbered

    def work(self, send: Send) -> None:
        """Send ("after", numbers, probabilities)."""
        model, steps = self.parcel.unpacked()
        network = fewshift.apply(model, self.delta)
        for numbers, probabilities, _ in answered(network, steps, self.images, send):
            send(("after", numbers, probabilities))


def _can_be_read(file: Path, steps: FileSteps) -> bool:
    try:
        read_tensor(file, steps)
    except FewshiftError:
        return False
    return True


def answered(
    model: nn.Module, steps: FileSteps, images: Numbered, send: Send
) -> Iterator[tuple[list[int], Array, Array]]:
    """Numbers, probabilities (n, classes) and features (n, 64) of one batch after another.

    Features are what enters the head, of length 1 and reduced to a few random directions: angles stay about the same.
    """
    network = evaluating(model)
    head: str | None = None
    for start in range(0, len(images), BATCH):
        batch: list[tuple[int, Tensor]] = []
        for number, file in images[start : start + BATCH]:
            try:
                batch.append((number, read_tensor(file, steps)))
            except FewshiftError as error:
                send(("broken", number, str(error)))
        for shape in {picture.shape for _, picture in batch}:
            alike = [(number, picture) for number, picture in batch if picture.shape == shape]
            inputs = like(network, torch.stack([picture for _, picture in alike]))
            head = head or Network.of(network, inputs[:1]).head or ""
            logits, features = _passed(network, head, inputs)
            yield [number for number, _ in alike], logits.softmax(1).numpy(), _reduced(features).numpy()


@torch.no_grad()
def _passed(network: nn.Module, head: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and what entered the head; the logits again where no head is known."""
    if not head:
        logits = logits_of(network(copied_like(network, inputs))).flatten(1).float().cpu()
        return logits, logits
    with head_inputs(network, head) as seen:
        logits = logits_of(network(copied_like(network, inputs))).flatten(1).float().cpu()
    return logits, seen[-1].flatten(1).float().cpu()


def _reduced(features: Tensor) -> Tensor:
    features = nn.functional.normalize(features, dim=1)
    if features.shape[1] <= DIRECTIONS:
        return features
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(features.shape[1], DIRECTIONS, generator=generator) / DIRECTIONS**0.5
    reduced: Tensor = features @ directions
    return reduced


# --- labels, and what is measured with them


@dataclass(frozen=True)
class LabelledImages:
    """Files with the names of their classes, or a folder whose pixels have labels."""

    rows: tuple[tuple[Path, str], ...] = ()
    scenes: Path | None = None
    wanted: frozenset[str] = frozenset()  # the scenes that have label files

    def opened(self, steps: FileSteps, classes: Sequence[str]) -> Any:
        """What `adapt` takes as support."""
        if self.scenes is None:
            return list(self.rows)
        if not isinstance(steps, Preprocess):
            raise FewshiftError("labels of pixels need a Preprocess: pass preprocess=fewshift.Preprocess(...)")
        return scene_folder(self.scenes, steps, classes, wanted=self.wanted)


@dataclass(frozen=True)
class CurveTask:
    """How the gain grows with the number of labels."""

    parcel: Parcel
    labelled: LabelledImages
    options: tuple[tuple[str, Any], ...] = ()  # for `learning_curve`

    def work(self, send: Send) -> None:
        """Send ("share", done, then), ("stage", words) and ("result", facts)."""
        model, steps = self.parcel.unpacked()
        labelled, classes = self.labelled.opened(steps, self.parcel.classes), self.parcel.classes
        with telling(send):
            curve = fewshift.learning_curve(model, labelled, preprocess=steps, classes=classes, **dict(self.options))
        send(("result", curve.to_json() | {"unit": curve.unit}))


@dataclass(frozen=True)
class ExportTask:
    """Write the adapted network as ONNX."""

    parcel: Parcel
    delta: Path
    path: Path
    exporter: str = EXPORT  # module:function

    def work(self, send: Send) -> None:
        """Send ("result", facts)."""
        module, _, name = self.exporter.partition(":")
        try:
            export = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise FewshiftError(NO_EXPORT) from error
        model, _ = self.parcel.unpacked()
        try:
            export(model, self.path, delta=self.delta)
        except ImportError as error:
            raise FewshiftError(NO_EXPORT) from error
        send(("result", {"path": str(self.path), "bytes": self.path.stat().st_size}))

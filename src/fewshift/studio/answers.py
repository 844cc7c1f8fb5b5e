"""What the network says about every image, as it becomes known; nobody waits for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fewshift.studio.errand import RUNNING, Errand
from fewshift.studio.gallery import Gallery
from fewshift.studio.parcel import Parcel
from fewshift.studio.tasks import FIRST, AnswerTask

Array = np.ndarray[Any, Any]


class NetworkAnswers:
    """Probabilities and features of the images that were answered, and why others cannot be."""

    def __init__(self, parcel: Parcel, gallery: Gallery) -> None:
        self._parcel, self._gallery = parcel, gallery
        self._lock = threading.Lock()
        self._probabilities: dict[int, Array] = {}
        self._features: dict[int, Array] = {}
        self._asked: set[int] = set()
        self._job: Errand | None = None
        self.broken: dict[int, str] = {}
        self.shift: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._probabilities)

    def start(self) -> None:
        """Answer the images that were not asked about yet, in the background."""
        new = [image for image in self._gallery.images if image.number not in self._asked]
        if not new or self.busy:
            return
        self._asked |= {image.number for image in new}
        first, rest = new[:FIRST], new[FIRST:]
        random.Random(0).shuffle(rest)  # those that are answered first stand for all
        images = tuple((image.number, image.file) for image in [*first, *rest] if self._inside(image.number))
        task = AnswerTask(self._parcel, images, pixels=self._gallery.scenes is not None)
        self._job = Errand("looking at the images", task, self._hear)

    @property
    def busy(self) -> bool:
        """Whether images are being answered."""
        return self._job is not None and self._job.state == RUNNING

    def stop(self) -> None:
        """End the process that answers."""
        if self._job is not None:
            self._job.stop()

    def wait(self, seconds: float) -> None:
        """Wait until every image is answered, for a while."""
        if self._job is not None:
            self._job.wait(seconds)

    def about(self, number: int) -> tuple[int, float] | None:
        """The most probable class of an image and its probability; None before it is known."""
        probabilities = self._probabilities.get(number)
        if probabilities is None:
            return None
        label = int(probabilities.argmax())
        return label, float(probabilities[label])

    def ranked(self, number: int, most: int) -> list[tuple[int, float]]:
        """The most probable classes of an image; none before they are known."""
        probabilities = self._probabilities.get(number)
        if probabilities is None:
            return []
        return [(int(label), float(probabilities[label])) for label in (-probabilities).argsort()[:most]]

    def table(self) -> tuple[list[int], Array, Array]:
        """The images that were answered, their probabilities (n, classes) and their features (n, d)."""
        with self._lock:
            known = list(self._probabilities)
            if not known:
                return [], np.zeros((0, 0)), np.zeros((0, 0))
            columns: Iterable[Mapping[int, Array]] = (self._probabilities, self._features)
            probabilities, features = (np.stack([column[number] for number in known]) for column in columns)
            return known, probabilities, features

    def to_json(self) -> dict[str, Any]:
        """How many images are answered, and the verdict of `shift`."""
        job = self._job
        return {
            "known": len(self),
            "broken": len(self.broken),
            "busy": self.busy,
            "sentence": "" if job is None or job.state == RUNNING else job.sentence,
            "shift": self.shift,
        }

    def _inside(self, number: int) -> bool:
        image = self._gallery[number]
        inside = image.file.resolve().is_relative_to(self._gallery.root.resolve())
        if not inside:
            self.broken[number] = f"{image.name} is a link that leads outside the folder: it is not opened"
        return inside

    def _hear(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("answers", numbers, probabilities, features):
                with self._lock:
                    self._probabilities.update(zip(numbers, probabilities.astype(np.float32), strict=True))
                    self._features.update(zip(numbers, features.astype(np.float32), strict=True))
            case ("broken", number, why):
                self.broken[number] = why
            case ("shift", shifted, words, meaning):
                self.shift = {"shifted": shifted, "words": words, "meaning": meaning}

"""Everything that the page works with: images, labels, answers, adaptations. No web in it."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fewshift.api import known_card
from fewshift.core._arguments import checked_model, checked_names
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import FileSteps
from fewshift.studio import decisions, label_exchange
from fewshift.studio.answers import NetworkAnswers
from fewshift.studio.errand import preload
from fewshift.studio.gallery import Gallery, GalleryImage
from fewshift.studio.labels_store import LABELLED, NONE, OPEN, SKIPPED, LabelStore
from fewshift.studio.opening_studio import opened_outputs, opened_scenes
from fewshift.studio.order import Order
from fewshift.studio.parcel import Parcel

WANTED = 5  # labels of each class
RESERVED = 120.0  # seconds for which an image that one tab was offered is not offered to another
GUESSES = 5  # classes that are offered first for an image


class Workbench:
    """A network, a folder of images, and a folder for labels and adaptations."""

    def __init__(
        self,
        model: nn.Module,
        images: str | Path,
        *,
        labels: str | Path | None = None,
        out: str | Path | None = None,
        classes: Sequence[str] | None = None,
        preprocess: FileSteps | None = None,
        seed: int | None = None,
    ) -> None:
        self.gallery = Gallery(images)
        self.out = _checked_out(self.gallery.folder, out)
        card, chosen = known_card(checked_model(model)), checked_names(classes)
        names = chosen or card.classes
        if names is None and labels is not None and self.gallery.scenes is None:
            names = label_exchange.class_names_in(labels)
        self.steps, names = opened_outputs(model, preprocess, names, self.gallery)
        self.scenes = opened_scenes(self.gallery, self.steps, names)
        self.classes = names if self.scenes is None else self.scenes.classes
        self.network = card.arch or type(model).__name__
        preload(model)
        self.parcel = Parcel.of(model, self.steps, self.classes)
        self.store = LabelStore(self.out)
        try:
            self.taken_in = self._take_in(labels)
        except BaseException:
            self.store.close()
            raise
        decisions.clear_drafts(self.out)
        decisions.settle(self.out)
        self.answers = NetworkAnswers(self.parcel, self.gallery)
        self.order = Order(len(self.classes), seed)
        self._offered: dict[int, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Stop what runs in the background, and let others open the folder."""
        self.answers.stop()
        self.store.close()

    def _take_in(self, labels: str | Path | None) -> str:
        """Existing labels, and a sentence about them."""
        if self.gallery.scenes is not None:
            if labels is not None:
                raise FewshiftError(
                    "labels of pixels are files in labels/ beside images/: leave out --labels (labels=)"
                )
            return ""
        sources = [("class folders", label_exchange.class_folders(self.gallery, self.classes))]
        if labels is not None:
            read = label_exchange.read_labels(labels, self.gallery, self.classes)
            sources.insert(0, (str(labels), read))
        sentences = []
        for name, taken in sources:
            new = self.store.take_in(taken.labels, name)
            if new:
                sentences.append(f"{new} label{'s' * (new > 1)} taken in from {name}")
            if taken.elsewhere:
                sentences.append(f"{taken.elsewhere} in {name} belong to images that are not in this folder")
        return "; ".join(sentences)

    # --- looking

    def record(self, image: GalleryImage) -> dict[str, Any]:
        """What the page knows about an image."""
        mark, answer = self.store.mark(image.name), self.answers.about(image.number)
        return {
            "number": image.number,
            "name": image.name,
            "state": mark.state,
            "label": mark.label,
            "version": mark.version,
            "guess": None if answer is None else self.classes[answer[0]],
            "confidence": None if answer is None else round(answer[1], 4),
            "broken": self.answers.broken.get(image.number),
            "scene": self.scenes is not None and self.gallery.label_file(image.number) is not None,
        }

    def details(self, number: int) -> dict[str, Any]:
        """The same, with the classes that the network finds most probable."""
        ranked = self.answers.ranked(number, GUESSES)
        guesses = [{"label": self.classes[label], "confidence": round(share, 4)} for label, share in ranked]
        return self.record(self.gallery[number]) | {"guesses": guesses}

    def listing(
        self, start: int, count: int, show: str = "all", label: str = "", sort: str = "name", query: str = ""
    ) -> dict[str, Any]:
        """A page of images: all or those in a state, of a class (by label, else by guess), with a word in the name."""
        images = [image for image in self.gallery.images if query.casefold() in image.name.casefold()]
        if show != "all":
            images = [image for image in images if self._state(image) == show]
        if label:
            images = [image for image in images if self._class_of(image) == label]
        images.sort(key=lambda image: image.name)
        if sort == "unsure":
            sure = {image.number: self.answers.about(image.number) for image in images}
            images.sort(key=lambda image: (answer := sure[image.number]) is None or answer[1])
        return {"total": len(images), "images": [self.record(image) for image in images[start : start + count]]}

    def _state(self, image: GalleryImage) -> str:
        return "unreadable" if image.number in self.answers.broken else self.store.mark(image.name).state

    def _class_of(self, image: GalleryImage) -> str | None:
        label, answer = self.store.mark(image.name).label, self.answers.about(image.number)
        return label or (None if answer is None else self.classes[answer[0]])

    def look_again(self) -> int:
        """Take in new files; returns how many there are."""
        new = self.gallery.look_again()
        self.store.take_in(label_exchange.class_folders(self.gallery, self.classes).labels, "class folders")
        self.answers.start()
        return new

    # --- labelling

    def counts(self) -> dict[str, int]:
        """Labels of each class."""
        found = Counter(self.store.labels().values())
        return {name: found[name] for name in self.classes}

    def tally(self) -> dict[str, int]:
        """How many images are in each state."""
        states = Counter(mark.state for mark in self.store.marks.values())
        decided = {state: states[state] for state in (LABELLED, SKIPPED, NONE)}
        return decided | {OPEN: len(self.gallery) - sum(decided.values()), "all": len(self.gallery)}

    def mark(self, number: int, state: str, label: str | None, base: int, tab: str) -> dict[str, Any]:
        """Write down a decision; the record comes back when it is on disk."""
        if label is not None and label not in self.classes:
            raise FewshiftError(f"{label!r} is none of the network's classes: choose one of them")
        image = self.gallery[number]
        self.store.change(image.name, state, label, base=base, tab=tab)
        return self.record(image)

    def undo(self, tab: str) -> dict[str, Any] | None:
        """Take back the last decision of a tab; the record of that image, or None if there is nothing to take back."""
        name = self.store.undo(tab)
        number = None if name is None else self.gallery.number_of(self.gallery.root / name)
        return None if number is None else self.record(self.gallery[number])

    def next(self, tab: str, mode: str, count: int, without: Sequence[int] = ()) -> list[dict[str, Any]]:
        """The images to label next: spread, or at random."""
        now = time.monotonic()
        with self._lock:
            others = {n for n, (who, when) in self._offered.items() if who != tab and now - when < RESERVED}
            marks, broken = self.store.marks, self.answers.broken
            free = {image.number for image in self.gallery.images if image.name not in marks or self._is_open(image)}
            free -= set(without) | set(broken)
            free = (free - others) or free
            if mode == "random":
                chosen = self.order.random(count, free)
            else:
                chosen = self.order.next(count, free, self._numbered_labels(), *self.answers.table())
            self._offered |= dict.fromkeys(chosen, (tab, now))
        return [self.details(number) for number in chosen]

    def _is_open(self, image: GalleryImage) -> bool:
        return self.store.mark(image.name).state == OPEN

    def _numbered_labels(self) -> dict[int, int]:
        """Classes by their numbers, of images by theirs."""
        place = {name: number for number, name in enumerate(self.classes)}
        files = {image.name: image.number for image in self.gallery.images}
        labels = self.store.labels().items()
        return {files[name]: place[label] for name, label in labels if name in files and label in place}

    def labelled_files(self) -> dict[Path, str]:
        """The labelled images that are still there, and their classes."""
        labels = self._numbered_labels()
        return {self.gallery[number].file: self.classes[label] for number, label in sorted(labels.items())}

    def write_labels(self, form: str) -> Path:
        """Write the labels for other programs: "csv", "label-studio", "folders" (copies) or "links"."""
        labels, root = self.labelled_files(), self.gallery.root
        if not labels:
            raise FewshiftError("there are no labels yet: label some images")
        if form == "csv":
            return label_exchange.write_table(labels, self.out / label_exchange.TABLE)
        if form == "label-studio":
            return label_exchange.write_tasks(labels, self.out / label_exchange.TASKS, root)
        if form in ("folders", "links"):
            folder = self.out / label_exchange.FOLDERS
            return label_exchange.write_class_folders(labels, folder, root, links=form == "links")
        raise FewshiftError(f"{form!r} is no way to write labels: choose csv, label-studio, folders or links")

    def without_label(self) -> list[GalleryImage]:
        """The images that have no label and can be read."""
        labelled = self._numbered_labels()
        return [
            image
            for image in self.gallery.images
            if image.number not in labelled and image.number not in self.answers.broken
        ]

    def some_without_label(self, most: int) -> tuple[Path, ...]:
        """A fair sample of them."""
        images = self.without_label()
        return tuple(image.file for image in random.Random(0).sample(images, min(most, len(images))))


def _checked_out(images: Path, out: str | Path | None) -> Path:
    """Where labels and adaptations go: beside the images, never among them."""
    place = images.with_name(f"{images.name}-studio") if out is None else Path(out).absolute()
    if place.exists() and not place.is_dir():
        raise FewshiftError(f"{place} is not a folder: choose another with --out (out=)")
    if place.resolve().is_relative_to(images.resolve()):
        raise FewshiftError(f"{place} lies among the images: choose a folder that is not inside {images}")
    return place

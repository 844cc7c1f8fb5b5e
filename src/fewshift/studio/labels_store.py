"""Labels on disk: a journal to which every change is appended, and nothing is ever overwritten.

A change is a line of JSON that is on the disk (fsync) before anyone is told that it is. It names the version of the
image's label that it was made on: if another tab has changed it since, nothing is written. A line that a kill cut off
was never confirmed, and is removed when the journal is opened again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fewshift.errors import FewshiftError
from fewshift.files.appending import append_whole
from fewshift.files.parsing import parsed_json
from fewshift.files.shapes import fields, is_count, is_text, one_of, or_none

JOURNAL, LOCK = "labels.jsonl", ".lock"
OPEN, LABELLED, SKIPPED, NONE = "open", "labelled", "skipped", "none of these"  # what was decided about an image
STATES = (OPEN, LABELLED, SKIPPED, NONE)
EVENT = fields(
    {"image": is_text, "state": one_of(*STATES), "label": or_none(is_text), "version": is_count},
    {"tab": is_text, "undoes": is_count, "base": is_count, "at": is_text, "from": is_text},
)  # a line of the journal


@dataclass(frozen=True)
class ImageMark:
    """What was decided about an image, and the version of the journal that says so; 0 before any."""

    state: str = OPEN
    label: str | None = None
    version: int = 0


class ConflictError(FewshiftError):
    """A change that was made on an older version of the image's label."""

    def __init__(self, image: str, current: ImageMark) -> None:
        super().__init__(f"the label of {image} was changed elsewhere: look at it again")
        self.image, self.current = image, current


class LabelStore:
    """The labels of a folder of images; one process at a time has it open."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file_lock = FileLock(self.folder / LOCK, timeout=0)
            self._file_lock.acquire()
            self.path = self.folder / JOURNAL
            self._lock = threading.Lock()
            self._events: list[dict[str, Any]] = []
            self._marks: dict[str, ImageMark] = {}
            self._read()
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            _sync_folder(self.folder)
        except Timeout as error:
            raise FewshiftError(
                f"another studio has {self.folder} open: use its page, or choose another folder with --out (out=)"
            ) from error
        except OSError as error:
            raise FewshiftError(
                f"cannot write {self.folder}: {error.strerror}: choose another folder with --out (out=)"
            ) from error

    def close(self) -> None:
        """Let another process open it."""
        os.close(self._file)
        self._file_lock.release()

    @property
    def version(self) -> int:
        """The number of the last change; 0 before any."""
        return int(self._events[-1]["version"]) if self._events else 0

    @property
    def marks(self) -> Mapping[str, ImageMark]:
        """What was decided about each image that was decided on."""
        with self._lock:
            return dict(self._marks)

    def mark(self, image: str) -> ImageMark:
        """What was decided about an image."""
        return self._marks.get(image, ImageMark())

    def labels(self) -> dict[str, str]:
        """The class of every labelled image, in the order of their names."""
        marks = self.marks
        return {image: mark.label for image, mark in sorted(marks.items()) if mark.label is not None}

    def changed_since(self, version: int) -> list[str]:
        """The images that were decided on after a version."""
        return list(dict.fromkeys(str(event["image"]) for event in self._events if event["version"] > version))

    def change(self, image: str, state: str, label: str | None, *, base: int, tab: str) -> ImageMark:
        """Write down a decision that was made on version `base` of the image's label."""
        if state not in STATES or (state == LABELLED) != (label is not None):
            raise FewshiftError(
                f"{state!r} with the label {label!r} is no decision: choose a class, or one of {STATES}"
            )
        with self._lock:
            return self._append([(image, state, label, base, {"tab": tab})])[0]

    def undo(self, tab: str) -> str | None:
        """Take back the last change of a tab that was not taken back; returns the image, or None if there is none."""
        with self._lock:
            undone = {event["undoes"] for event in self._events if "undoes" in event}
            mine = (
                event
                for event in reversed(self._events)
                if event["tab"] == tab and "undoes" not in event and event["version"] not in undone
            )
            last = next(mine, None)
            if last is None:
                return None
            image = str(last["image"])
            of_image = [event for event in self._events if event["image"] == image]
            if any(event["tab"] != tab for event in of_image if event["version"] > last["version"]):
                raise ConflictError(image, self._marks[image])
            earlier = [event for event in of_image if event["version"] < last["version"]]
            state, label = (earlier[-1]["state"], earlier[-1]["label"]) if earlier else (OPEN, None)
            base = self._marks[image].version
            self._append([(image, state, label, base, {"tab": tab, "undoes": last["version"]})])
            return image

    def take_in(self, labels: Mapping[str, str], source: str) -> int:
        """Labels from elsewhere, for images that nothing was decided about here; returns how many were new."""
        with self._lock:
            new = {image: label for image, label in labels.items() if image not in self._marks}
            self._append([(image, LABELLED, label, 0, {"tab": "", "from": source}) for image, label in new.items()])
            return len(new)

    def _append(self, changes: Iterable[tuple[str, str, str | None, int, dict[str, Any]]]) -> list[ImageMark]:
        """Write lines, wait for the disk, and only then know about them."""
        events: list[dict[str, Any]] = []
        for image, state, label, base, more in changes:
            current = self._marks.get(image, ImageMark())
            if base != current.version:
                raise ConflictError(image, current)
            events.append(
                {"version": self.version + len(events) + 1, "image": image, "state": state, "label": label}
                | {"base": base, "at": datetime.now(UTC).isoformat(timespec="seconds")}
                | more
            )
        if not events:
            return []
        try:
            append_whole(self._file, "".join(json.dumps(event) + "\n" for event in events).encode())
        except OSError as error:
            raise FewshiftError(
                f"the label is not on disk ({error.strerror}): free some space on {self.folder}"
            ) from error
        self._events += events
        self._marks.update((str(event["image"]), _mark(event)) for event in events)
        return [_mark(event) for event in events]

    def _read(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(self.path, end)
        for number, line in enumerate(content[:end].splitlines(), 1):
            what, cure = f"line {number} of {self.path}", "restore the file from a copy, or remove that line"
            event = parsed_json(line, what, cure)
            if not EVENT(event):
                raise FewshiftError(f"{what} is no label: {cure}")
            self._marks[event["image"]] = _mark(event)
            self._events.append({"tab": "", **event})


def _mark(event: Mapping[str, Any]) -> ImageMark:
    return ImageMark(event["state"], event["label"], event["version"])


def _sync_folder(folder: Path) -> None:
    """A new file is on the disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

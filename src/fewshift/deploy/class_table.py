"""A table of classes: a row for every image, written as it comes, so that a run that was stopped can go on."""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import nn

from fewshift.core._display import MOST_NAMES, Displayed
from fewshift.core._files import refuse_long_name, whole, writing
from fewshift.core._names import as_cell, as_text, from_cell, is_unicode, write_rows
from fewshift.core.outputs import NO_ANSWER, REMEDY
from fewshift.deploy.decoding import ReadBatch, Unreadable, batches_of, decoded
from fewshift.deploy.fingerprints import fingerprint
from fewshift.errors import FewshiftError
from fewshift.files.parsing import read_json
from fewshift.files.shapes import fields, is_flag, is_text
from fewshift.images.class_names import refuse_repeated
from fewshift.images.preprocess import Preprocess
from fewshift.trust.evaluation import class_probabilities

RECORD = ".run.json"  # the file beside a table that names its run


class Scored(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


class ImagePrediction(NamedTuple):
    """The most probable class of an image, and what else was asked for."""

    file: Path
    name: str
    probability: float
    others: tuple[Scored, ...] = ()  # the next most probable classes
    source: Scored | None = None  # what the source network says
    probabilities: array[float] = array("f")  # of every class


@dataclass(frozen=True)
class Columns:
    """What a row says: the `top` classes, the source network's, and the probability of every class."""

    classes: tuple[str, ...]
    top: int = 1
    source: bool = False
    every: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.top, int) or not 1 <= self.top <= len(self.classes):
            raise FewshiftError(f"top={self.top!r} of {len(self.classes)} classes: give 1 to {len(self.classes)}")
        refuse_repeated(self.classes)
        if strange := [name for name in self.classes if not is_unicode(name)]:
            raise FewshiftError(f"the class name {as_text(strange[0])} is not UTF-8 text: give it another (classes=)")

    @property
    def header(self) -> list[str]:
        """The names of the columns of a table."""
        more = [word for place in range(2, self.top + 1) for word in (f"class_{place}", f"probability_{place}")]
        source = ["source_class", "source_probability"] if self.source else []
        return ["file", "class", "probability", *source, *more, *(f"p_{name}" for name in self.classes if self.every)]

    def rows(self, files: Sequence[Path], scores: np.ndarray, source: np.ndarray | None) -> list[ImagePrediction]:
        """What the probabilities of images say, (images, classes) each; of equal ones the first class leads."""
        leading = self._leading(scores, self.top)
        before = [None] * len(files) if source is None else [each for (each,) in self._leading(source, 1)]
        every = [array("f", row.tobytes()) if self.every else array("f") for row in scores.astype(np.float32)]
        return [
            ImagePrediction(file, *first, tuple(others), old, probabilities)
            for file, (first, *others), old, probabilities in zip(files, leading, before, every, strict=True)
        ]

    def _leading(self, scores: np.ndarray, count: int) -> list[list[Scored]]:
        """The most probable classes of each image."""
        order = scores.argmax(1)[:, None] if count == 1 else np.argsort(-scores, axis=1, kind="stable")[:, :count]
        values = np.take_along_axis(scores, order, axis=1).tolist()
        return [
            [Scored(self.classes[place], value) for place, value in zip(places, row, strict=True)]
            for places, row in zip(order.tolist(), values, strict=True)
        ]

    def cells(self, row: ImagePrediction) -> list[str | float]:
        """A row as a table has it."""
        pairs = [(row.name, row.probability), *([row.source] if row.source else []), *row.others]
        scored = [cell for name, probability in pairs for cell in (name, round(probability, 6))]
        return [str(row.file), *scored, *(round(probability, 6) for probability in row.probabilities)]

    def csv_cells(self, row: ImagePrediction) -> list[str | float]:
        """A row as a table that spreadsheets open has it."""
        file, *others = self.cells(row)
        return [as_cell(str(file)), *others]


@dataclass(frozen=True, repr=False)
class ImagePredictions(Displayed):
    """A class for each image that could be read."""

    rows: tuple[ImagePrediction, ...]
    columns: Columns
    broken: tuple[Unreadable, ...] = ()
    earlier: int = 0  # rows that the table had already, left out here

    @property
    def title(self) -> str:
        """What it is."""
        return f"Predictions for {len(self.rows):,} images"

    @property
    def facts(self) -> dict[str, str]:
        """How many images each class has, the most first."""
        counts = Counter(row.name for row in self.rows).most_common(MOST_NAMES)
        return {name: f"{count:,}" for name, count in counts}

    @property
    def asked(self) -> int:
        """The number of images that were to be predicted."""
        return len(self.rows) + len(self.broken) + self.earlier

    def to_json(self) -> list[dict[str, Any]]:
        """File, class and probability of each image, and what else was asked for."""
        return [self._entry(row) for row in self.rows]

    def _entry(self, row: ImagePrediction) -> dict[str, Any]:
        scored = [
            {"class": name, "probability": round(score, 6)}
            for name, score in ((row.name, row.probability), *row.others)
        ]
        entry = {"file": str(row.file), **scored[0]}
        if row.source is not None:
            entry |= {"source_class": row.source.name, "source_probability": round(row.source.probability, 6)}
        if row.others:
            entry["top"] = scored
        if self.columns.every:
            entry["probabilities"] = {
                name: round(score, 6) for name, score in zip(self.columns.classes, row.probabilities, strict=True)
            }
        return entry

    def to_csv(self) -> str:
        """The same as a table with a header."""
        table = io.StringIO()
        write_rows(table, [self.columns.header, *map(self.columns.csv_cells, self.rows)])
        return table.getvalue()


@dataclass(frozen=True)
class ClassRun:
    """Networks with one output per image, and what is wanted of them: the last one answers, the first is the source."""

    networks: Sequence[nn.Module]
    preprocess: Preprocess
    columns: Columns
    batch_size: int
    workers: int
    strict: bool

    def predict(
        self, files: Sequence[Path], out: str | Path | TextIO | None, *, resume: bool, overwrite: bool
    ) -> ImagePredictions:
        """Predict the images that the table `out` lacks; rows are written after each batch."""
        rows: list[ImagePrediction] = []
        broken: list[Unreadable] = []
        with self._table(out, resume, overwrite) as (known, write):
            left = without(files, known)
            for part, unread in self.batches(batches_of(left, self.batch_size)):
                write([self.columns.csv_cells(row) for row in part])
                rows += part
                broken += unread
        return ImagePredictions(tuple(rows), self.columns, tuple(broken), len(files) - len(left))

    def predict_json(
        self, files: Sequence[Path], out: str | Path | TextIO | None, *, resume: bool, overwrite: bool
    ) -> ImagePredictions:
        """Predict the images and write them as JSON, which is whole or not there."""
        if resume:
            raise FewshiftError("JSON is written whole at the end and cannot be resumed: write CSV")
        if not isinstance(out, (str, Path)):
            return self.predict(files, None, resume=False, overwrite=False)
        if not overwrite and Path(out).exists() and Path(out).stat().st_size:
            raise FewshiftError(f"{out} exists already: pass --overwrite (overwrite=True), or choose another file")
        with whole(out) as draft:  # what cannot be written is known before the work
            result = self.predict(files, None, resume=False, overwrite=False)
            draft.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        return result

    def batches(self, batches: Sequence[Sequence[Path]]) -> Iterator[tuple[list[ImagePrediction], list[Unreadable]]]:
        """The rows of one batch after the other, and the images of it that cannot be read."""
        for batch in decoded(batches, self.preprocess, self.workers, strict=self.strict):
            rows, broken = self.answers(batch)
            yield rows, broken
            if self.strict and broken:
                raise FewshiftError(broken[0].error)

    def answers(self, batch: ReadBatch) -> tuple[list[ImagePrediction], list[Unreadable]]:
        """The rows of the images of a batch, and those that cannot be read, or whose answer is not finite."""
        if not batch.files:
            return [], batch.broken
        scores = [
            torch.stack(list(class_probabilities(network, batch.pictures, self.batch_size))).cpu().numpy()
            for network in self.networks
        ]
        good = np.isfinite(np.concatenate(scores, 1)).all(1)
        files = list(compress(batch.files, good))
        silent = [Unreadable(file, f"{file}: {NO_ANSWER}: {REMEDY}") for file in compress(batch.files, ~good)]
        rows = self.columns.rows(files, scores[-1][good], scores[0][good] if self.columns.source else None)
        return rows, [*batch.broken, *silent]

    @contextmanager
    def _table(
        self, out: str | Path | TextIO | None, resume: bool, overwrite: bool
    ) -> Iterator[tuple[Counter[str], Callable[[list[list[str | float]]], None]]]:
        """The files that the table has, and a function that adds rows to it."""
        if out is None:
            yield Counter(), lambda rows: None
            return
        if not isinstance(out, (str, Path)):
            yield Counter(), _writing(out, self.columns.header)
            return
        path = Path(out).resolve()  # a link stays a link: the file behind it is written
        run = fingerprint(self.networks, (self.preprocess, self.columns))
        known = _known(path, run, self.columns, resume, overwrite)
        record = path.with_name(path.name + RECORD)
        refuse_long_name(record)
        with writing(path), path.open("a" if known is not None else "w", encoding="utf-8", newline="") as file:
            _note(record, run, finished=False)
            yield known or Counter(), _writing(file, [] if known is not None else self.columns.header)
        _note(record, run, finished=True)


def _writing(file: TextIO, header: Sequence[str]) -> Callable[[list[list[str | float]]], None]:
    """A function that appends rows to an open table and hands them to the system at once."""

    def write(rows: list[list[str | float]]) -> None:
        write_rows(file, rows)
        file.flush()

    write([list(header)] if header else [])
    return write


def without(files: Sequence[Path], known: Mapping[str, int]) -> list[Path]:
    """The files that have no row yet; one that is named several times has a row for each, the first ones first."""
    seen: Counter[str] = Counter()
    left = []
    for file in files:
        seen[str(file)] += 1
        if seen[str(file)] > known.get(str(file), 0):
            left.append(file)
    return left


def _known(path: Path, run: str, columns: Columns, resume: bool, overwrite: bool) -> Counter[str] | None:
    """How many rows a table has of each file from the same run, or None where a new table is to be written."""
    if path.exists() and not path.is_file():
        raise FewshiftError(f"cannot write {path}: it is not an ordinary file: choose another path")
    if overwrite or not path.exists() or path.stat().st_size == 0:
        return None
    record = _read_record(path.with_name(path.name + RECORD))
    if not resume:
        stopped = record is not None and not record["finished"]
        what = "has the rows of a run that was stopped" if stopped else "exists already"
        go_on = "to go on" if stopped else "to add what is not in it"
        raise FewshiftError(
            f"{path} {what}: pass --resume (resume=True) {go_on}, --overwrite (overwrite=True) to start anew, or "
            "choose another file"
        )
    if record is None or record["run"] != run:
        why = f"has no {path.name}{RECORD} beside it, which names its network" if record is None else ""
        raise FewshiftError(
            f"{path} {why or 'is by another network, or by other classes, preprocessing or columns'}: pass --overwrite "
            "(overwrite=True) to write it anew, or choose another file"
        )
    return _whole_rows(path, columns)


def _whole_rows(path: Path, columns: Columns) -> Counter[str] | None:
    """How many rows a table has of each file, or None without a header; a last row that a kill cut off is removed."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    while content.count(b'"', 0, end) % 2:  # that line break is one of a quoted name
        end = content.rfind(b"\n", 0, end - 1) + 1
    if not end:
        return None
    instead = "pass --overwrite (overwrite=True), or choose another file"
    try:
        header, *rows = csv.reader(io.StringIO(content[:end].decode("utf-8"), newline=""))
    except (UnicodeDecodeError, csv.Error) as error:
        raise FewshiftError(f"{path} is no table: {instead}") from error
    if header != columns.header:
        raise FewshiftError(f"{path} has other columns: {instead}")
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
    return Counter(from_cell(row[0]) for row in rows if row)


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path, path, "remove it")
    except FewshiftError:
        return None
    return record if fields({"run": is_text, "finished": is_flag})(record) else None


def _note(path: Path, run: str, *, finished: bool) -> None:
    """Write down which run a table is by, and whether it came to its end."""
    with whole(path) as draft:
        draft.write_text(json.dumps({"run": run, "finished": finished}) + "\n", encoding="utf-8")

"""A folder of Parquet parts: the rows of millions of images, some thousand in each file, each file whole or not there.

Parts are fixed slices of the list of images. A part names its run and its files in its metadata, so a run that was
stopped goes on with the parts that are missing. What is kept in memory is the list of names and the part at hand.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fewshift.core._display import Displayed
from fewshift.core._files import whole, writing
from fewshift.core._names import as_cell, as_text, from_cell, write_rows
from fewshift.deploy.class_table import ClassRun, Columns, ImagePrediction
from fewshift.deploy.decoding import Unreadable, batches_of
from fewshift.deploy.fingerprints import fingerprint
from fewshift.errors import FewshiftError
from fewshift.files.parsing import read_json
from fewshift.files.shapes import fields, is_text
from fewshift.jobs.ledger import alone_in

PART_SIZE = 2000  # images
RUN = "_run.json"  # readers of Parquet folders pass over names that begin with _
BROKEN = "_broken"
ORIGIN = b"fewshift"  # the key of the metadata that names run and files
REMEDY = "free some space or make it writable, then --resume (resume=True) goes on"
SHOWN = 20  # images that cannot be read, named in the result


@dataclass(frozen=True, repr=False)
class PartPredictions(Displayed):
    """How many rows a folder of Parquet parts has, and how many images could not be read."""

    folder: Path
    parts: int
    predicted: int  # rows that were written now
    earlier: int  # rows that were there
    unreadable: int  # images without a row, whenever they were tried
    broken: tuple[Unreadable, ...]  # the first of these

    @property
    def title(self) -> str:
        """What it is."""
        return f"Predictions for {self.predicted + self.earlier:,} images in {self.parts:,} Parquet files"

    @property
    def facts(self) -> dict[str, str]:
        """Where they are, and how many images could not be read."""
        return {"folder": str(self.folder), "not read": f"{self.unreadable:,}"}

    @property
    def asked(self) -> int:
        """The number of images that were to be predicted."""
        return self.predicted + self.earlier + self.unreadable

    def to_json(self) -> dict[str, Any]:
        """Counts, and the first images that could not be read."""
        counts = {name: getattr(self, name) for name in ("parts", "predicted", "earlier", "unreadable")}
        broken = [{"file": str(image.file), "error": image.error} for image in self.broken]
        return {"folder": str(self.folder), **counts, "broken": broken}


@dataclass(frozen=True)
class Part:
    """A slice of the images, and the file of its rows."""

    number: int
    files: Sequence[Path]
    folder: Path
    run: str

    @property
    def path(self) -> Path:
        """Where its rows are."""
        return self.folder / f"part-{self.number:05}.parquet"

    @property
    def broken(self) -> Path:
        """Where its images are named that cannot be read, if there are any."""
        return self.folder / BROKEN / f"part-{self.number:05}.csv"

    @cached_property
    def origin(self) -> bytes:
        """A word that changes with the network, the options, and the name, size or time of any image."""
        facts = hashlib.sha256(self.run.encode())
        for file in self.files:
            size, time = -1, -1
            with suppress(OSError):
                status = file.stat()
                size, time = status.st_size, status.st_mtime_ns
            facts.update(json.dumps([str(file), size, time]).encode())
        return facts.hexdigest()[:16].encode()

    def rows_there(self) -> int | None:
        """How many rows it has; None if it is not there, or not by the same run over the same files."""
        from pyarrow import ArrowException, parquet

        try:
            stored = parquet.ParquetFile(self.path)
        except (OSError, ArrowException):
            return None
        with stored:
            known = (stored.metadata.metadata or {}).get(ORIGIN)
            return int(stored.metadata.num_rows) if known == self.origin else None

    def unread_there(self) -> list[Unreadable]:
        """The images that could not be read when it was written."""
        if not self.broken.exists():
            return []
        with self.broken.open(encoding="utf-8", newline="") as file:
            return [Unreadable(Path(row["file"]), from_cell(row["error"])) for row in csv.DictReader(file)]

    def write(self, columns: Columns, rows: Sequence[ImagePrediction], broken: Sequence[Unreadable]) -> None:
        """Write its rows; images that cannot be read come first, because the rows show that it is done."""
        with writing(self.path, REMEDY):
            self.broken.unlink(missing_ok=True)
            if broken:
                self.broken.parent.mkdir(exist_ok=True)
                with whole(self.broken) as draft, draft.open("w", encoding="utf-8", newline="") as file:
                    write_rows(file, [["file", "error"], *map(_broken_cells, broken)])
            _write_parquet(self.path, columns, rows, self.origin)


def _broken_cells(image: Unreadable) -> list[str]:
    """A row about an image that cannot be read; the error begins with its name."""
    return [as_cell(as_text(image.file)), as_cell(image.error)]


def _write_parquet(path: Path, columns: Columns, rows: Sequence[ImagePrediction], origin: bytes) -> None:
    import pyarrow
    from pyarrow import parquet

    words = {"file", "class", "source_class", *(f"class_{place}" for place in range(2, columns.top + 1))}
    kinds = [(name, pyarrow.string() if name in words else pyarrow.float64()) for name in columns.header]
    cells = list(zip(*map(columns.cells, rows), strict=True)) or [()] * len(kinds)
    arrays = [pyarrow.array(values, kind) for values, (_, kind) in zip(cells, kinds, strict=True)]
    table = pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(kinds, metadata={ORIGIN: origin}))
    with whole(path) as draft:
        parquet.write_table(table, draft)


@contextmanager
def part_folder(out: str | Path) -> Iterator[Path]:
    """The folder of parts, ours alone during the block."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise FewshiftError('Parquet needs pyarrow: pip install "fewshift[parquet]"') from error
    with alone_in(out) as folder:
        yield folder


class Parts:
    """The parts of a run, those that are done, and what was done now."""

    def __init__(
        self, folder: Path, run: ClassRun, files: Sequence[Path], size: int, *, resume: bool, overwrite: bool
    ) -> None:
        self.folder, self.columns, self.batch_size = folder, run.columns, run.batch_size
        name = fingerprint(run.networks, (run.preprocess, run.columns, size))
        slices = batches_of(files, size)
        self.all = [Part(number, part, folder, name) for number, part in enumerate(slices)]
        self._begin(name, resume, overwrite)
        self._there = {part.number: rows for part in self.all if (rows := part.rows_there()) is not None}
        self.predicted, self.unreadable = 0, 0
        self.broken: list[Unreadable] = []
        for number in self._there:
            self._count(self.all[number].unread_there())

    @property
    def missing(self) -> list[Part]:
        """The parts that are to be written."""
        return [part for part in self.all if part.number not in self._there]

    def add(self, part: Part, rows: Sequence[ImagePrediction], broken: Sequence[Unreadable]) -> None:
        """Write a part."""
        part.write(self.columns, rows, broken)
        self.predicted += len(rows)
        self._count(broken)

    def end(self) -> PartPredictions:
        """All parts are there: note it, and remove those of a longer list."""
        ours = {path for part in self.all for path in (part.path, part.broken)}
        for path in (path for path in self._files() if path not in ours):
            path.unlink()
        self._note(self.all[0].run, finished=True)
        earlier = sum(self._there.values())
        return PartPredictions(self.folder, len(self.all), self.predicted, earlier, self.unreadable, tuple(self.broken))

    def _count(self, broken: Sequence[Unreadable]) -> None:
        self.unreadable += len(broken)
        self.broken += broken[: SHOWN - len(self.broken)]

    def _files(self) -> list[Path]:
        return [*self.folder.glob("part-*.parquet"), *(self.folder / BROKEN).glob("part-*.csv")]

    def _begin(self, run: str, resume: bool, overwrite: bool) -> None:
        """Go on, start anew, or say why neither."""
        record = self.folder / RUN
        if overwrite:
            for path in (*self._files(), record):
                path.unlink(missing_ok=True)
        elif record.exists() or self._files():
            if not resume:
                raise FewshiftError(
                    f"{self.folder} has predictions already: pass --resume (resume=True) to go on, --overwrite "
                    "(overwrite=True) to replace them, or choose another folder"
                )
            if _stored_run(record) != run:
                raise FewshiftError(
                    f"{self.folder} is by another network, or by other classes, preprocessing, columns or size of "
                    "parts: pass --overwrite (overwrite=True) to write it anew, or choose another folder"
                )
        self._note(run, finished=False)

    def _note(self, run: str, *, finished: bool) -> None:
        with writing(self.folder / RUN, REMEDY), whole(self.folder / RUN) as draft:
            draft.write_text(json.dumps({"run": run, "finished": finished}) + "\n", encoding="utf-8")


def _stored_run(path: Path) -> str | None:
    try:
        record = read_json(path, path, "remove it")
    except FewshiftError:
        return None
    return str(record["run"]) if fields({"run": is_text})(record) else None


def predict_parts(run: ClassRun, parts: Parts) -> PartPredictions:
    """Predict the missing parts in this process, while others read the images."""
    plan = [(part, batch) for part in parts.missing for batch in batches_of(part.files, run.batch_size)]
    rows: list[ImagePrediction] = []
    broken: list[Unreadable] = []
    answers = run.batches([batch for _, batch in plan])
    for (part, _), (some, unread) in zip(plan, answers, strict=True):
        rows += some
        broken += unread
        if len(rows) + len(broken) == len(part.files):
            parts.add(part, rows, broken)
            rows, broken = [], []
    return parts.end()

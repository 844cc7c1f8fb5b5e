"""Records: one JSON line per finished cell, in a file that survives kills and serves several processes at once."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewshift.core._files import whole
from fewshift.errors import FewshiftError

Record = dict[str, Any]


class Records:
    """The folder of a run: `records.jsonl`, and one lock file for each cell somebody is working on.

    A line is appended by one write under a lock. A kill in the middle of it leaves a last line without its end, which
    the next reader or writer recognises and removes. A cell is claimed by locking its file, and the system releases
    the lock of a process that dies: no claim outlives its owner.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.file = self.folder / "records.jsonl"
        self.damaged = 0  # lines that the last reading passed over
        try:
            (self.folder / "claims").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FewshiftError(f"cannot write into {folder} ({error.strerror}): choose another folder") from error

    def read(self) -> dict[str, Record]:
        """The newest record of every key; lines that are no records are passed over, and counted."""
        with self._locked() as file:
            found = [_record(line) for line in _lines(_content(file))]
        self.damaged = found.count(None)
        return {record["key"]: record for record in found if record is not None}

    def append(self, record: Record) -> None:
        """Add one line, on disk before this returns."""
        line = (json.dumps(record, sort_keys=True) + "\n").encode()
        with self._locked() as file:
            _repair(file)
            os.lseek(file, 0, os.SEEK_END)
            os.write(file, line)
            os.fsync(file)

    def keep_grid(self, grid: Path) -> None:
        """A copy of a grid file beside its records, so that the folder alone can be reported on."""
        (self.folder / "grids").mkdir(exist_ok=True)
        with whole(self.folder / "grids" / f"{grid.stem}.toml") as draft:
            draft.write_bytes(grid.read_bytes())

    def grids(self) -> list[Path]:
        """The grid files that were run into this folder."""
        return sorted((self.folder / "grids").glob("*.toml"))

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether the cell is ours to work on during the block: False if another process has it."""
        handle = os.open(self.folder / "claims" / key, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(handle)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise FewshiftError(f"cannot open {self.file} ({error.strerror}): choose another folder") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)


def _content(handle: int) -> bytes:
    os.lseek(handle, 0, os.SEEK_SET)
    with os.fdopen(os.dup(handle), "rb") as file:
        return file.read()


def _repair(handle: int) -> None:
    """Cut off a last line that has no end, for its writer died; if only the end is missing, add it."""
    content = _content(handle)
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    if _record(content[end:]) is None:
        os.ftruncate(handle, end)
    else:
        os.lseek(handle, 0, os.SEEK_END)
        os.write(handle, b"\n")


def _lines(content: bytes) -> Iterator[bytes]:
    """Every line; a torn last one is left to the next writer's repair."""
    *lines, last = content.split(b"\n")
    yield from filter(None, lines)
    if _record(last) is not None:
        yield last


def _record(line: bytes) -> Record | None:
    """The record in a line, if there is one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("key"), str) else None

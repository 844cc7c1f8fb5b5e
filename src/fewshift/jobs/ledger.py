"""The ledger of jobs: one JSON line for each that ended, in a file that survives kills and serves several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from fewshift.errors import NO_ROOM, FewshiftError

Record = dict[str, Any]


def stored_key(record: Record) -> str:
    """The key that a record was written with."""
    return str(record["key"])


def has_result(record: Record) -> bool:
    """Whether a job came to its end: what failed has an error instead."""
    return "result" in record


class Ledger:
    """A folder with `records.jsonl`, and a lock file for each job that a process is working on.

    A line is appended under a lock. A kill in the middle leaves a torn last line, which the next reader skips and the
    next writer removes. A job is claimed by locking its file. The system releases the locks of a process that dies, so
    no claim outlives its owner.

    `key_of` says which key a record has now, `finished` whether its job need not be run again.
    """

    def __init__(
        self,
        folder: str | Path,
        key_of: Callable[[Record], str] = stored_key,
        finished: Callable[[Record], bool] = has_result,
    ) -> None:
        self.folder = Path(folder)
        self.file = self.folder / "records.jsonl"
        self.unreadable = 0  # lines that the last reading skipped
        self._key_of, self._finished = key_of, finished
        self._keys: dict[str, str] = {}  # stored -> current
        try:
            (self.folder / "claims").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FewshiftError(f"cannot write into {folder} ({error.strerror}): choose another folder") from error

    def read(self) -> dict[str, Record]:
        """The newest record of every key; lines that are no records are skipped and counted.

        Records of older versions get the key that their job has now.
        """
        with self._locked() as file:
            lines = [_record(line) for line in _lines(file.read())]
        self.unreadable = lines.count(None)
        records = [record | {"key": self._key(record)} for record in lines if record is not None]
        return {record["key"]: record for record in records}

    def finished(self) -> set[str]:
        """The keys of the jobs that need not be run again."""
        return {key for key, record in self.read().items() if self._finished(record)}

    def append(self, record: Record) -> None:
        """Add one line, on disk before this returns."""
        with self._locked() as file:
            _repair(file)
            file.write((json.dumps(record, sort_keys=True) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether the job is ours to work on during the block: False if another process has it."""
        lock = FileLock(self.folder / "claims" / key, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _key(self, record: Record) -> str:
        if record["key"] not in self._keys:
            self._keys[record["key"]] = self._key_of(record)
        return self._keys[record["key"]]

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        try:
            with FileLock(self.folder / "records.lock", poll_interval=0.005):
                self.file.touch()
                with self.file.open("r+b") as file:
                    yield file
        except OSError as error:
            what = "free some space, then run it again" if error.errno in NO_ROOM else "choose another folder"
            raise FewshiftError(f"cannot read or write {self.file} ({error.strerror}): {what}") from error


@contextmanager
def alone_in(folder: str | Path) -> Iterator[Path]:
    """The folder, made if need be; during the block no other process that asks for it gets it."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FewshiftError(f"{folder} is not a folder: choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise FewshiftError(
            f"another process is writing into {folder}: wait until it is done, or choose another folder"
        ) from None
    except OSError as error:
        raise FewshiftError(f"cannot write into {folder} ({error.strerror}): choose another folder") from error
    try:
        yield folder
    finally:
        lock.release()


def _repair(file: BinaryIO) -> None:
    """Go to the end; remove a last line that was torn, or end it if only its end is missing."""
    content = file.read()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    if _record(content[end:]) is None:
        file.seek(end)
        file.truncate()
    else:
        file.write(b"\n")


def _lines(content: bytes) -> Iterator[bytes]:
    """Every line; a torn last one is left to the next writer."""
    *lines, last = content.split(b"\n")
    yield from filter(None, lines)
    if _record(last) is not None:
        yield last


def _record(line: bytes) -> Record | None:
    """The record in a line, if there is one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("key"), str) else None

"""Files appear whole or not at all, and what the system does not let us write is one sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fewshift.core._arguments import checked_path
from fewshift.errors import NO_ROOM, FewshiftError

MARK, SUFFIX = ".fewshift-", ".part"  # in the name of every draft: nobody else's files are removed
LONGEST_NAME = 255  # bytes, on all usual file systems
SHOWN = 40  # letters of a file's name in the name of its draft

_cleared: set[Path] = set()  # folders in which this process has looked for what others left


class UnwrittenError(FewshiftError):
    """A file that the system did not let us write, and what to do."""

    def __init__(self, path: Path, cause: OSError, remedy: str | None = None) -> None:
        self.path, self.cause = path, cause
        self.reason = os.strerror(cause.errno) if cause.errno else str(cause)
        self.full = cause.errno in NO_ROOM
        advice = "free some space" if self.full else "choose a folder that exists and is writable"
        if cause.errno == errno.ENAMETOOLONG:
            advice, remedy = "choose a shorter name", None
        super().__init__(f"cannot write {path}: {self.reason}: {remedy or advice}")


@contextmanager
def writing(path: Path, remedy: str | None = None, only: Container[int | None] | None = None) -> Iterator[None]:
    """Within the block, what cannot be written is one sentence that ends in `remedy`.

    `only` are the system's errors that are meant, where a block does more than write; all by default.
    """
    try:
        yield
    except UnwrittenError as error:
        if remedy is None:
            raise
        raise UnwrittenError(error.path, error.cause, remedy) from error
    except FewshiftError:
        raise
    except Exception as error:
        cause = _system_error(error)
        if cause is None or (only is not None and cause.errno not in only):
            raise
        raise UnwrittenError(path, cause, remedy) from error


def _system_error(error: Exception) -> OSError | None:
    """The system's error; libraries that are written in Rust have errors of their own, which quote it."""
    if isinstance(error, OSError):
        return error
    quoted = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(quoted[1]), os.strerror(int(quoted[1]))) if quoted else None


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it into place if the block succeeds, remove it otherwise.

    A reader, a kill or Ctrl-C at any moment sees either the old file or the new one. What a kill leaves is removed by
    the next process that writes into the folder.
    """
    path = checked_path(path, "the output").resolve()  # a link stays a link: the file behind it is written
    refuse_long_name(path)
    if path.exists() and not path.is_file():
        raise FewshiftError(f"cannot write {path}: it is not an ordinary file: choose another path")
    with writing(path):
        handle, draft = _new_draft(path)
    try:
        with writing(path, only=NO_ROOM):  # any other error may be about something that the block reads
            yield draft
        with writing(path):
            draft.chmod(0o666 & ~_umask())  # mkstemp is private; the result is an ordinary file
            with draft.open("rb") as written:
                os.fsync(written.fileno())
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
        os.close(handle)


def refuse_long_name(path: Path) -> None:
    """One sentence for a name that no file can have: to be asked before the work whose result gets it."""
    size = len(os.fsencode(path.name))
    if size > LONGEST_NAME:
        raise FewshiftError(
            f"the name {path.name[:SHOWN]}... has {size} bytes, and a file's name at most {LONGEST_NAME}: choose a "
            "shorter one"
        )


def make_folder(path: Path) -> Path:
    """The folder, made if need be."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def read_ordinary(path: Path) -> bytes:
    """The content of a file; a pipe, which might keep us waiting for ever, is an `OSError`."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not an ordinary file")
    return path.read_bytes()


# --- drafts


def remove_drafts(folder: Path) -> None:
    """Remove what processes that were killed left of files in a folder; a draft that is being written stays."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.path for entry in entries if MARK in entry.name and entry.name.endswith(SUFFIX)]
        for name in names:
            with suppress(OSError):
                _remove_dead(name)


def _remove_dead(name: str) -> None:
    """Remove a draft that nobody has locked: the system unlocks what a process that dies had locked."""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(name).unlink()
    finally:
        os.close(handle)


def _new_draft(path: Path) -> tuple[int, Path]:
    """An empty file beside `path`, and the handle that keeps it locked until it is closed."""
    if path.parent not in _cleared:
        remove_drafts(path.parent)
        _cleared.add(path.parent)
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:SHOWN]}{MARK}", suffix=SUFFIX, dir=path.parent)
        with suppress(OSError):  # a file system without locks: there, nobody removes drafts
            fcntl.flock(handle, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), Path(name).stat()):
                return handle, Path(name)
        os.close(handle)  # another process took it for dead before it was locked


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

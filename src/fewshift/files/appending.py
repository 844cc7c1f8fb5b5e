"""Lines at the end of files: all of them are on the disk, or the file is as it was.

A disk that is nearly full takes a part of what it is given. A kill is another matter: it leaves a part of a line, which
the next reader has to recognise.
"""

from __future__ import annotations

import os
from pathlib import Path

from fewshift.errors import NO_ROOM


def append_whole(file: int, content: bytes) -> None:
    """Add bytes to an open file and wait for the disk; if that fails, the file ends where it did, and OSError tells."""
    end = os.lseek(file, 0, os.SEEK_END)
    try:
        _write_all(file, content)
        os.fsync(file)
    except BaseException:
        os.ftruncate(file, end)
        raise


def append_to(path: Path, content: bytes) -> None:
    """Add bytes to the file at a path, which need not exist."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        append_whole(file, content)
    finally:
        os.close(file)


def disk_cure(error: OSError, otherwise: str) -> str:
    """What to do about a file that cannot be written: free some space, or what is said otherwise."""
    return "free some space" if error.errno in NO_ROOM else otherwise


def _write_all(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]

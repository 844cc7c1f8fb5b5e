"""Files appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fewshift.core._arguments import checked_path
from fewshift.errors import FewshiftError


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it into place if the block succeeds, remove it otherwise.

    A reader, a kill or Ctrl-C at any moment sees either the old file or the new one.
    """
    path = checked_path(path, "the output").resolve()  # a link stays a link: the file behind it is written
    if path.exists() and not path.is_file():
        raise FewshiftError(f"cannot write {path}: it is not an ordinary file: choose another path")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise FewshiftError(
            f"cannot write {path}: {error.strerror}: choose a folder that exists and is writable"
        ) from error
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o666 & ~_umask())  # mkstemp is private; the result is an ordinary file
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        try:
            draft.replace(path)
        except OSError as error:
            raise FewshiftError(f"cannot write {path}: {error.strerror}: choose another path") from error
    finally:
        draft.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""What lies below a folder: one walk for all who look for images, labels or files that are left out.

Folders behind links are looked into, as people gather images from several disks. Each folder is read once, however many
links lead to it: a circle ends, and no image counts twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

Entry = os.DirEntry[str]


def entries_below(root: str | Path) -> Iterator[Entry]:
    """Every file at any depth, sorted by its path, hidden ones too; hidden folders are not looked into.

    Pipes, sockets and devices come too, and folders that cannot be looked into.
    """
    yield from _walked(_listed(str(root)) or [], _Met(str(root)), linked=False)


def is_ordinary(entry: Entry) -> bool:
    """Whether an entry can be read, or is a link, of which opening says what is wrong with it."""
    return entry.is_symlink() or entry.is_file()


def is_folder(entry: Entry) -> bool:
    """Whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walked(entries: list[Entry], met: _Met, *, linked: bool) -> Iterator[Entry]:
    for entry in entries:
        if not is_folder(entry):
            yield entry
            continue
        behind = linked or entry.is_symlink()
        if entry.name.startswith(".") or (behind and not met.first_time(entry.path)):
            continue
        inside = _listed(entry.path)
        if inside is None:
            yield entry
        else:
            yield from _walked(inside, met, linked=behind)


def _listed(folder: str) -> list[Entry] | None:
    """What is in a folder, sorted; None if it cannot be looked into."""
    try:
        with os.scandir(folder) as listing:
            return sorted(listing, key=lambda entry: entry.name)
    except OSError:
        return None


class _Met:
    """The folders that were read behind links, and those that are read by their own name."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: set[tuple[int, int]] = set()

    def first_time(self, folder: str) -> bool:
        """Whether a folder behind a link was not met before, under whatever name."""
        if not self._known:  # most trees have no link
            self._known = {_identity(place) for place in _own_folders(self._root)}
        new = _identity(folder) not in self._known
        self._known.add(_identity(folder))
        return new


def _own_folders(root: str) -> Iterator[str]:
    for place, folders, _ in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield place


def _identity(folder: str) -> tuple[int, int]:
    status = Path(folder).stat()
    return status.st_dev, status.st_ino

"""Names of files as other programs take them: tables are UTF-8, and spreadsheets run what looks like a formula."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

WIDE = ("\uff1d", "\uff0b", "\uff0d", "\uff20")  # the same signs as Japanese keyboards write them
FORMULA = ("=", "+", "-", "@", *WIDE, "\t", "\r", "\n")  # how a cell begins that a spreadsheet computes


def as_cell(name: str | Path) -> str:
    """A path as a table has it: =1.jpg becomes ./=1.jpg, which is the same file and no formula."""
    text = str(name)
    return f"./{text}" if text.startswith(FORMULA) else text


def from_cell(text: str) -> str:
    """The path that `as_cell` wrote."""
    return text.removeprefix("./") if text.startswith(tuple(f"./{sign}" for sign in FORMULA)) else text


def write_rows(file: TextIO, rows: Iterable[Sequence[str | float]]) -> None:
    r"""Write rows of CSV. A name with \r is quoted: the module csv does not, and its reader ends the row there."""
    plain, quoted = (
        csv.writer(file, lineterminator="\n", quoting=quoting) for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC)
    )
    for row in rows:
        (quoted if any("\r" in cell for cell in row if isinstance(cell, str)) else plain).writerow(row)


def is_unicode(name: str | Path) -> bool:
    """Whether a name is text; that of a file may be any bytes."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        return False
    return True


def as_text(name: str | Path) -> str:
    r"""A name that can be printed and written: bytes that are no text appear as \xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")

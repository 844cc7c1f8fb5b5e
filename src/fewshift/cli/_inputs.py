"""What a command is to read, looked at before a network is built."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fewshift.cli.console import refuse_missing, refuse_overwriting

FOLDERS = ("support", "sites", "unlabelled", "labelled", "images", "labels", "source", "validate", "folder")
READ = (*FOLDERS, "delta", "weights", "base")
NOT_A_PATH = ("random", "cv", "loo", "none")
PYPI = "pypi:"


def refuse_missing_inputs(values: Mapping[str, Any]) -> None:
    """Notice a mistyped path before a network is built."""
    for word in values["images"] if isinstance(values.get("images"), list) else []:
        if word != "-" and not glob.has_magic(word):
            refuse_missing(Path(word.removeprefix("@")))
    for name in READ:
        value = values.get(name)
        path = name == "validate" or isinstance(value, Path)
        if value is not None and path and str(value) not in NOT_A_PATH and not str(value).startswith(PYPI):
            refuse_missing(Path(value))


def refuse_written_inputs(values: Mapping[str, Any]) -> None:
    """Notice a file that is to be read and written over before a network is built."""
    read: list[Path] = []
    for name in FOLDERS:
        words = values.get(name)
        for word in words if isinstance(words, list) else [words]:
            if word is not None and str(word) not in (*NOT_A_PATH, "-"):
                read.append(Path(str(word).removeprefix("@")))
    outputs = [path for name in ("out", "report") if isinstance(path := values.get(name), Path)]
    with suppress(OSError):  # a name that is too long is refused later
        refuse_overwriting([path for path in outputs if not path.is_dir()], read)

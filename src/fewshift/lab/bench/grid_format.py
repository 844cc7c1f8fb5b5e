"""A grid as a file: reading it, and what its keys may hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fewshift.errors import FewshiftError
from fewshift.files import parsing
from fewshift.lab.bench.cell import OWN_SOURCE, PRECISIONS
from fewshift.lab.bench.damage import DAMAGES
from fewshift.lab.datasets.corruptions import CORRUPTIONS

VALIDATIONS = ("cv",)
STAND_INS = ("target", "origin", "seed")  # what a source may name in braces


@dataclass(frozen=True)
class Kind:
    """What a key of a grid file may hold, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 2**63


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list of different values that fit."""
    return lambda value: (
        isinstance(value, list) and all(map(fits, value)) and 0 < len(set(map(str, value))) == len(value)
    )


def _word(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _source(value: Any) -> bool:
    return _word(value) and not set("{}") & set(_STAND_IN.sub("", value))


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _printed(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _number(part) or (isinstance(part, dict) and all(map(_number, part.values()))) for part in value.values()
    )


def _one_of(known: Iterable[str]) -> Kind:
    words = tuple(known)
    return Kind(" or ".join(f"'{word}'" for word in words), lambda value: isinstance(value, str) and value in words)


_STAND_IN = re.compile(rf"\{{({'|'.join(STAND_INS)})\}}")
WORD = Kind("a word", _word)
SOURCE = Kind(f"a name, in which {', '.join(f'{{{name}}}' for name in STAND_INS)} stand for the cell's own", _source)
TARGETS = Kind('a list of different domains, such as ["sketch"]', _list_of(_word))
COUNT = Kind("a whole number from 1", _whole(1))
GRID_KINDS = {
    "title": WORD,
    "source": SOURCE,
    "dataset": WORD,
    "metric": WORD,
    "measure": WORD,
    "paper_networks": WORD,
    "validate": _one_of(VALIDATIONS),
    "precision": _one_of(PRECISIONS),
    "targets": TARGETS,
    "tuned_on": TARGETS,
    "seeds": Kind("a list of different whole numbers from 0, such as [0, 1, 2]", _list_of(_whole(0))),
    "max_test": COUNT,
    "largest_support": COUNT,
}
ROW_KINDS = {
    "method": WORD,
    "label": WORD,
    "source": SOURCE,
    "targets": TARGETS,
    "target": _one_of([OWN_SOURCE]),
    "damage": _one_of(DAMAGES),
    "validate": _one_of(VALIDATIONS),
    "settings": Kind("a table of settings, such as {epochs = 5}", lambda value: isinstance(value, dict)),
    "unlabelled": COUNT,
    "corruptions": Kind(f'a list of different corruptions, such as ["{CORRUPTIONS[0]}"]', _list_of(_word)),
    "shots": Kind("a list of different whole numbers from 1, such as [1, 5]", _list_of(_whole(1))),
    "conditions": Kind("a list of tables, such as [{batch_size = 8}]", _list_of(lambda value: isinstance(value, dict))),
    "paper": Kind("values by target, such as {sketch = 67.0}", _printed),
}
TABLES = Kind("tables with keys", lambda value: isinstance(value, list) and all(isinstance(row, dict) for row in value))
COMPARISON_KINDS = {
    "dataset": WORD,
    "source": WORD,
    "label": WORD,
    "layer": WORD,
    "images": COUNT,
    "batch_size": COUNT,
    "seed": Kind("a whole number from 0", _whole(0)),
}
SAMPLE_KINDS = {"domain": WORD, "statistics": WORD, "classes": WORD}
CONDITION_KINDS = {"order": WORD, "alpha": Kind("a number from 1", _number), "batch_size": COUNT}


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    if not path.is_file():
        raise FewshiftError(f"there is no grid '{path}': give a file, or a name from `fewshift list grids`")
    return parsing.read_toml(path, path, "correct it")


def named_source(source: str, **own: object) -> str:
    """The name of a source with the cell's own words in the place of those in braces, and nothing else replaced.

    A grid is a file that somebody may have sent: `str.format` would read attributes, and pad without end.
    """
    return _STAND_IN.sub(lambda word: str(own[word[1]]), source)


def check_known(path: Path, where: str, data: Mapping[str, Any], kind: type) -> None:
    """Raise one sentence when a table of the file has a key that `kind` has no field for."""
    if not isinstance(data, Mapping):
        raise FewshiftError(f"{path} has {data!r} for {where}: give a table with keys")
    known = [each.name for each in fields(kind)]
    unknown = [key for key in data if key not in known]
    if unknown:
        raise FewshiftError(f"{path} has '{unknown[0]}' in {where}: choose from {', '.join(known)}")


def check_kinds(path: Path, data: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raise one sentence when a value of the file is not of its key's kind."""
    for name, kind in kinds.items():
        if name in data and not kind.fits(data[name]):
            raise FewshiftError(f"{path} has {name} = {data[name]!r}: give {kind.words}")


def with_precision(text: str, precision: str) -> str:
    """A grid's file with another precision."""
    head, table, rows = text.partition("\n[[")
    lines = [line for line in head.split("\n") if not re.match(r"precision\s*=", line)]
    return "\n".join([*lines, f'precision = "{precision}"', ""]) + table + rows

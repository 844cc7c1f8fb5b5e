"""Grid: a table or figure of the paper as data. A TOML file becomes cells."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from fewshift.bench.cell import Cell
from fewshift.errors import FewshiftError
from fewshift.methods import METHODS
from fewshift.streams import Condition


@dataclass(frozen=True)
class Row:
    """One line of a table: a method with settings, at some shots, under some conditions; the paper's values beside."""

    method: str
    label: str = ""
    settings: Mapping[str, Any] | None = None
    shots: tuple[int, ...] = ()
    conditions: tuple[Condition, ...] = (Condition(),)
    paper: Mapping[str, Any] | None = None  # target -> value, or target -> shots -> value


@dataclass(frozen=True)
class Grid:
    """All cells of a table: every row on every target with every seed, judged on one test set for each of those."""

    title: str
    dataset: str
    source: str
    targets: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    max_test: int | None = None
    largest_support: int = 10

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """Read a grid; a mistake in the file is one sentence that names it."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FewshiftError(f"there is no grid at {path}: give a file such as grids/smoke.toml") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FewshiftError(f"{path} is no TOML file ({error}): correct it") from error
        _known(path, "the grid", data, cls)
        rows = tuple(_row(path, row) for row in data.pop("rows", ()))
        missing = [it for it in ("title", "dataset", "source", "targets", "seeds") if it not in data]
        if missing or not rows:
            raise FewshiftError(f"{path} lacks {missing[0] if missing else 'rows'}: add it")
        values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in data.items()}
        return cls(rows=rows, **values)

    def cells(self) -> list[Cell]:
        """Every experiment, in the order of the table."""
        return [cell for row in self.rows for cell in self.cells_of(row)]

    def cells_of(self, row: Row) -> list[Cell]:
        """The experiments of one row."""
        return [
            Cell(
                dataset=self.dataset,
                source=self.source.format(target=target),
                target=target,
                method=row.method,
                settings=dict(row.settings or {}),
                shots=shots,
                seed=seed,
                condition=condition,
                largest_support=self.largest_support,
                max_test=self.max_test,
            )
            for target, shots, condition, seed in product(
                self.targets, row.shots or (None,), row.conditions, self.seeds
            )
        ]


def _row(path: Path, data: dict[str, Any]) -> Row:
    _known(path, "a row", data, Row)
    if data.get("method") not in METHODS:
        raise FewshiftError(f"{path} has a row with method {data.get('method')!r}: choose one of {', '.join(METHODS)}")
    for condition in data.get("conditions", []):
        _known(path, "a condition", condition, Condition)
    given = dict(data)
    if "conditions" in given:
        given["conditions"] = tuple(Condition(**it) for it in given["conditions"])
    if "shots" in given:
        given["shots"] = tuple(given["shots"])
    return Row(**given)


def _known(path: Path, where: str, data: Mapping[str, Any], kind: type) -> None:
    known = [it.name for it in fields(kind)]
    unknown = [key for key in data if key not in known]
    if unknown:
        raise FewshiftError(f"{path} has '{unknown[0]}' in {where}: choose from {', '.join(known)}")

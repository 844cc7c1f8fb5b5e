"""Grid: a table or figure of the paper as data. A TOML file becomes cells."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from fewshift.core.method import Needs
from fewshift.core.metrics import METRICS, metrics_of
from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import OWN_SOURCE, Cell, current_method, current_names
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.damage import DAMAGES
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.lab.datasets.corruptions import CORRUPTIONS
from fewshift.methods.catalog import METHODS

MEASURES = ("score", "v", "adapt_seconds", "epoch_seconds")
VALIDATIONS = ("cv",)
ARROW, OF = "->", "/"


@dataclass(frozen=True)
class Kind:
    """What a key of a grid file may hold, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list of different values that fit."""
    return lambda value: (
        isinstance(value, list) and all(map(fits, value)) and 0 < len(set(map(str, value))) == len(value)
    )


def _word(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _printed(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _number(part) or (isinstance(part, dict) and all(map(_number, part.values()))) for part in value.values()
    )


def _one_of(known: Iterable[str]) -> Kind:
    words = tuple(known)
    return Kind(" or ".join(f"'{word}'" for word in words), lambda value: isinstance(value, str) and value in words)


WORD = Kind("a word", _word)
COUNT = Kind("a whole number from 1", _whole(1))
GRID_KINDS = {
    "title": WORD,
    "source": WORD,
    "dataset": WORD,
    "metric": WORD,
    "measure": WORD,
    "validate": _one_of(VALIDATIONS),
    "targets": Kind('a list of different domains, such as ["sketch"]', _list_of(_word)),
    "seeds": Kind("a list of different whole numbers from 0, such as [0, 1, 2]", _list_of(_whole(0))),
    "max_test": COUNT,
    "largest_support": COUNT,
}
ROW_KINDS = {
    "method": WORD,
    "label": WORD,
    "source": WORD,
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
CONDITION_KINDS = {"order": WORD, "alpha": Kind("a number from 1", _number), "batch_size": COUNT}


@dataclass(frozen=True)
class TargetColumn:
    """A column of a table: the domain that networks are adapted to, and the one they come from where it is named."""

    label: str
    dataset: str
    target: str
    origin: str = ""


@dataclass(frozen=True)
class GridRow:
    """One line of a table: a method with settings, shots and conditions, and the values that the paper prints.

    `paper` has a value for each column, or one for each of its shots; "average" is a column too. With the target "its
    own source" the network of a column is adapted to, and judged on, held-out images of its own source.
    """

    method: str
    label: str = ""
    settings: Mapping[str, Any] | None = None
    shots: tuple[int, ...] = ()
    conditions: tuple[Condition, ...] = (Condition(),)
    source: str = ""  # the grid's if empty
    target: str = ""  # the column's if empty
    damage: str = ""  # to its supports
    validate: str = ""  # how its adaptations are judged
    unlabelled: int | None = None  # how many images it sees without labels
    corruptions: tuple[str, ...] = ()  # of the target's images, one cell for each
    paper: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The label of the line."""
        return self.label or self.method


@dataclass(frozen=True)
class Grid:
    """All cells of a table: every row on every target with every seed, tested on the same images.

    - targets: domains of `dataset`, or "DATASET/DOMAIN" without it; "ORIGIN -> DOMAIN" names a source domain.
    - source: the name of the source network; {target}, {origin} and {seed} stand for the cell's own.
    - metric: the score, the data set's own by default.
    - measure: what the table holds: that score, the blend `v` that LCCS chose, or seconds.
    - validate: "cv" judges the adaptations of all rows with shots as `adapt` does.
    """

    title: str
    source: str
    targets: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[GridRow, ...]
    dataset: str = ""
    metric: str = ""
    measure: str = "score"
    validate: str = ""
    max_test: int | None = None
    largest_support: int = 10

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """Read a grid; a mistake in the file raises one sentence that names it."""
        path = Path(path)
        data = read_toml(path)
        check_known(path, "the grid", data, cls)
        rows = tuple(_row(path, row) for row in data.pop("rows", ()))
        missing = [name for name in ("title", "source", "targets", "seeds") if name not in data]
        if missing or not rows:
            raise FewshiftError(f"{path} lacks {missing[0] if missing else 'rows'}: add it")
        _check_kinds(path, data, GRID_KINDS)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        grid = cls(rows=rows, **values)
        _check(path, grid)
        return grid

    @property
    def columns(self) -> tuple[TargetColumn, ...]:
        """The columns."""
        return tuple(_column(target, self.dataset) for target in self.targets)

    def cells(self) -> list[Cell]:
        """Every experiment, in the order of the table."""
        return [cell for row in self.rows for cell in self.cells_of(row)]

    def cells_of(self, row: GridRow) -> list[Cell]:
        """The experiments of one row."""
        return [
            cell
            for column, shots, condition in product(self.columns, row.shots or (None,), row.conditions)
            for cell in self.cells_at(row, column, shots, condition)
        ]

    def cells_at(self, row: GridRow, column: TargetColumn, shots: int | None, condition: Condition) -> list[Cell]:
        """The experiments behind one entry of the table: one for each seed, and each corruption of the row."""
        return [
            Cell(
                dataset=column.dataset,
                source=(row.source or self.source).format(target=column.target, origin=column.origin, seed=seed),
                target=row.target or column.target,
                method=row.method,
                settings=dict(row.settings or {}),
                shots=shots,
                seed=seed,
                condition=condition,
                largest_support=self.largest_support,
                max_test=self.max_test,
                damage=row.damage or None,
                unlabelled=row.unlabelled,
                validate=row.validate or (self.validate if row.shots else "") or None,
                corruption=corruption,
            )
            for corruption, seed in product(row.corruptions or (None,), self.seeds)
        ]


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise FewshiftError(f"there is no grid '{path}': give a file, or a name from `fewshift list grids`") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FewshiftError(f"{path} is no TOML file ({error}): correct it") from error


def check_known(path: Path, where: str, data: Mapping[str, Any], kind: type) -> None:
    """Raise one sentence when a table of the file has a key that `kind` has no field for."""
    if not isinstance(data, Mapping):
        raise FewshiftError(f"{path} has {data!r} for {where}: give a table with keys")
    known = [each.name for each in fields(kind)]
    unknown = [key for key in data if key not in known]
    if unknown:
        raise FewshiftError(f"{path} has '{unknown[0]}' in {where}: choose from {', '.join(known)}")


def _check_kinds(path: Path, data: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    for name, kind in kinds.items():
        if name in data and not kind.fits(data[name]):
            raise FewshiftError(f"{path} has {name} = {data[name]!r}: give {kind.words}")


def _row(path: Path, data: dict[str, Any]) -> GridRow:
    data = current_names(data)
    check_known(path, "a row", data, GridRow)
    _check_kinds(path, data, ROW_KINDS)
    if data.get("method") not in METHODS:
        raise FewshiftError(f"{path} has a row with method {data.get('method')!r}: choose one of {', '.join(METHODS)}")
    for condition in data.get("conditions", []):
        check_known(path, "a condition", condition, Condition)
        _check_kinds(path, condition, CONDITION_KINDS)
    values = dict(data)
    if "settings" in values:
        values["method"], values["settings"] = current_method(values["method"], values["settings"])
    if "conditions" in values:
        try:
            values["conditions"] = tuple(Condition(**condition) for condition in values["conditions"])
        except FewshiftError as error:
            raise FewshiftError(f"{path} has an impossible condition: {error}") from error
    for name in ("shots", "corruptions"):
        if name in values:
            values[name] = tuple(values[name])
    for corruption in values.get("corruptions", ()):
        if corruption not in CORRUPTIONS:
            raise FewshiftError(f"{path} has the corruption '{corruption}': choose one of {', '.join(CORRUPTIONS)}")
    row = GridRow(**values)
    _check_shots(path, row)
    return row


def _check_shots(path: Path, row: GridRow) -> None:
    """Methods that look at labels need shots; the others take none."""
    needs = METHODS[row.method].needs
    if needs is Needs.SUPPORT and not row.shots:
        raise FewshiftError(f"{path} has a row '{row.name}' without shots: give it some, such as shots = [1, 5]")
    if needs not in (Needs.SUPPORT, Needs.EITHER) and row.shots:
        raise FewshiftError(
            f"{path} has a row '{row.name}' with shots, but {row.method} uses no labels: leave shots out"
        )
    for name in ("damage", "validate"):
        if getattr(row, name) and not row.shots:
            raise FewshiftError(f"{path} has a row '{row.name}' with {name} and without shots: give it some")


def _check(path: Path, grid: Grid) -> None:
    """Raise one sentence about what only the whole file shows."""
    for name, known in (("metric", METRICS), ("measure", MEASURES)):
        value = getattr(grid, name)
        if value and value not in known:
            raise FewshiftError(f"{path} has {name} = {value!r}: choose one of {', '.join(known)}")
    for target in grid.targets:
        if not grid.dataset and OF not in target:
            raise FewshiftError(f"{path} names no dataset for '{target}': add one, or write DATASET/DOMAIN")
    for column in grid.columns:
        dataset = COLLECTIONS.get(column.dataset)
        fitting = METRICS if dataset is None else metrics_of(dataset.labels.unit)
        if grid.metric and grid.metric not in fitting:
            raise FewshiftError(
                f"{path} has metric = {grid.metric!r}, which {column.dataset} has no labels for: "
                f"choose one of {', '.join(fitting)}"
            )
        if dataset is not None and not dataset.labels.stratified:
            _check_dense(path, grid, dataset.name)
    most = max((shots for row in grid.rows for shots in row.shots), default=0)
    if most > grid.largest_support:
        raise FewshiftError(f"{path} asks for {most} shots: set largest_support = {most} or more")
    labels = {column.label for column in grid.columns} | {"average"}
    for row in grid.rows:
        for label in row.paper or {}:
            if label not in labels:
                raise FewshiftError(f"{path} has the paper's value for '{label}', which is no target: correct it")
        try:
            grid.cells_of(replace(row, method="source", settings={}))
            METHODS[row.method](**row.settings or {})
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise FewshiftError(f"{path} has a row '{row.name}' that cannot be run ({error}): correct it") from error


def _check_dense(path: Path, grid: Grid, dataset: str) -> None:
    for name in ("validate", "damage", "target", "corruptions"):
        if any(getattr(part, name, "") for part in (grid, *grid.rows)):
            raise FewshiftError(
                f"{path} has {name}, which needs image labels, but {dataset} has pixel labels: leave it out"
            )


def _column(text: str, dataset: str) -> TargetColumn:
    origin, arrow, target = text.partition(ARROW)
    if not arrow:
        origin, target = "", text
    if not dataset:
        dataset, _, target = target.strip().partition(OF)
    return TargetColumn(text, dataset, target.strip(), origin.strip())

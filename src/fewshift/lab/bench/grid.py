"""Grid: a table or figure of the paper as data. A TOML file becomes cells."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from fewshift.core.labels import PIXELS
from fewshift.core.method import Needs
from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.flaws import FLAWS
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.methods.catalog import METHODS

IMAGE_METRICS = (
    "accuracy",
    "macro_recall",
    "macro_f1",
    "macro_f1_fixed",
    "macro_f1_with_support",
    "calibration_error",
)
PIXEL_METRICS = ("mean_iou", "mean_iou_present", "accuracy", "macro_recall")
METRICS = tuple(dict.fromkeys(IMAGE_METRICS + PIXEL_METRICS))
MEASURES = ("score", "v", "adapt_seconds", "epoch_seconds")
VALIDATIONS = ("cv",)
ARROW, OF = "->", "/"


@dataclass(frozen=True)
class Kind:
    """What a key of a grid file may hold, and how to say so."""

    words: str
    fits: Callable[[Any], bool]

    def check(self, path: Path, name: str, value: Any) -> None:
        """One sentence if the value does not fit."""
        if not self.fits(value):
            raise FewshiftError(f"{path} has {name} = {value!r}: give {self.words}")


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and value != [] and all(map(fits, value)) and _differ(value)


def _differ(values: list[Any]) -> bool:
    return len({str(value) for value in values}) == len(values)


def _word(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _printed(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _number(it) or (isinstance(it, dict) and all(map(_number, it.values()))) for it in value.values()
    )


def _one_of(known: Iterable[str]) -> Kind:
    words = tuple(known)
    return Kind(" or ".join(f"'{it}'" for it in words), lambda value: isinstance(value, str) and value in words)


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
    "flaw": _one_of(FLAWS),
    "validate": _one_of(VALIDATIONS),
    "settings": Kind("a table of settings, such as {epochs = 5}", lambda value: isinstance(value, dict)),
    "shots": Kind("a list of different whole numbers from 1, such as [1, 5]", _list_of(_whole(1))),
    "conditions": Kind("a list of tables, such as [{batch_size = 8}]", _list_of(lambda it: isinstance(it, dict))),
    "paper": Kind("values by target, such as {sketch = 67.0}", _printed),
}
CONDITION_KINDS = {"order": WORD, "alpha": Kind("a number from 1", _number), "batch_size": COUNT}


@dataclass(frozen=True)
class Place:
    """A column of a table: the domain that networks are adapted to, and the one they come from where that is said."""

    label: str
    dataset: str
    target: str
    origin: str = ""


@dataclass(frozen=True)
class Row:
    """One line of a table: a method with settings, at some shots, under some conditions; the paper's values beside.

    `paper` gives a value for the label of a column, or for each of its shots; "average" is a column too. With the
    target "its own source" the network of a column is adapted to, and judged on, held-out images of its own source.
    """

    method: str
    label: str = ""
    settings: Mapping[str, Any] | None = None
    shots: tuple[int, ...] = ()
    conditions: tuple[Condition, ...] = (Condition(),)
    source: str = ""  # of this row, where it is not the grid's
    target: str = ""  # of this row, where it is not the column's
    flaw: str = ""  # how its supports are spoilt
    validate: str = ""  # how its adaptations are judged before they are handed over
    paper: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """What the line is called."""
        return self.label or self.method


@dataclass(frozen=True)
class Grid:
    """All cells of a table: every row on every target with every seed, judged on one test set for each of those.

    - targets: domains of `dataset`, or "DATASET/DOMAIN" where there is none; "ORIGIN -> DOMAIN" names a source domain.
    - source: the name of the source network; {target}, {origin} and {seed} stand for the cell's own.
    - metric: which score counts, the data set's own by default.
    - measure: what the table holds: that score, the blend `v` that LCCS chose, or seconds.
    - validate: "cv" judges the adaptations of all rows with shots as `adapt` does.
    """

    title: str
    source: str
    targets: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    dataset: str = ""
    metric: str = ""
    measure: str = "score"
    validate: str = ""
    max_test: int | None = None
    largest_support: int = 10

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """Read a grid; a mistake in the file is one sentence that names it."""
        path = Path(path)
        data = read_toml(path)
        check_known(path, "the grid", data, cls)
        rows = tuple(_row(path, row) for row in data.pop("rows", ()))
        missing = [it for it in ("title", "source", "targets", "seeds") if it not in data]
        if missing or not rows:
            raise FewshiftError(f"{path} lacks {missing[0] if missing else 'rows'}: add it")
        for name, kind in GRID_KINDS.items():
            if name in data:
                kind.check(path, name, data[name])
        values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in data.items()}
        grid = cls(rows=rows, **values)
        _check(path, grid)
        return grid

    @property
    def places(self) -> tuple[Place, ...]:
        """The columns."""
        return tuple(_place(target, self.dataset) for target in self.targets)

    def cells(self) -> list[Cell]:
        """Every experiment, in the order of the table."""
        return [cell for row in self.rows for cell in self.cells_of(row)]

    def cells_of(self, row: Row) -> list[Cell]:
        """The experiments of one row."""
        return [
            cell
            for place, shots, condition in product(self.places, row.shots or (None,), row.conditions)
            for cell in self.cells_at(row, place, shots, condition)
        ]

    def cells_at(self, row: Row, place: Place, shots: int | None, condition: Condition) -> list[Cell]:
        """The experiments behind one entry of the table: one for each seed."""
        return [
            Cell(
                dataset=place.dataset,
                source=(row.source or self.source).format(target=place.target, origin=place.origin, seed=seed),
                target=row.target or place.target,
                method=row.method,
                settings=dict(row.settings or {}),
                shots=shots,
                seed=seed,
                condition=condition,
                largest_support=self.largest_support,
                max_test=self.max_test,
                flaw=row.flaw or None,
                validate=row.validate or (self.validate if row.shots else "") or None,
            )
            for seed in self.seeds
        ]


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a file, or one sentence."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise FewshiftError(f"there is no grid at {path}: give a file such as grids/smoke.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FewshiftError(f"{path} is no TOML file ({error}): correct it") from error


def check_known(path: Path, where: str, data: Mapping[str, Any], kind: type) -> None:
    """One sentence when a table of the file has a key that `kind` has no field for."""
    if not isinstance(data, Mapping):
        raise FewshiftError(f"{path} has {data!r} for {where}: give a table with keys")
    known = [it.name for it in fields(kind)]
    unknown = [key for key in data if key not in known]
    if unknown:
        raise FewshiftError(f"{path} has '{unknown[0]}' in {where}: choose from {', '.join(known)}")


def _row(path: Path, data: dict[str, Any]) -> Row:
    check_known(path, "a row", data, Row)
    for name, kind in ROW_KINDS.items():
        if name in data:
            kind.check(path, name, data[name])
    if data.get("method") not in METHODS:
        raise FewshiftError(f"{path} has a row with method {data.get('method')!r}: choose one of {', '.join(METHODS)}")
    for condition in data.get("conditions", []):
        check_known(path, "a condition", condition, Condition)
        for name, kind in CONDITION_KINDS.items():
            if name in condition:
                kind.check(path, name, condition[name])
    given = dict(data)
    if "conditions" in given:
        try:
            given["conditions"] = tuple(Condition(**it) for it in given["conditions"])
        except FewshiftError as error:
            raise FewshiftError(f"{path} has a condition that cannot be: {error}") from error
    if "shots" in given:
        given["shots"] = tuple(given["shots"])
    row = Row(**given)
    _check_shots(path, row)
    return row


def _check_shots(path: Path, row: Row) -> None:
    """Those who look at labels have some, and nobody else."""
    needs = METHODS[row.method].needs
    if needs is Needs.SUPPORT and not row.shots:
        raise FewshiftError(f"{path} has a row '{row.name}' without shots: give it some, such as shots = [1, 5]")
    if needs not in (Needs.SUPPORT, Needs.EITHER) and row.shots:
        raise FewshiftError(
            f"{path} has a row '{row.name}' with shots, and {row.method} sees no labels: leave them out"
        )
    for name in ("flaw", "validate"):
        if getattr(row, name) and not row.shots:
            raise FewshiftError(f"{path} has a row '{row.name}' with {name} and without shots: give it some")


def _check(path: Path, grid: Grid) -> None:
    """What only the whole file shows."""
    for name, known in (("metric", METRICS), ("measure", MEASURES)):
        value = getattr(grid, name)
        if value and value not in known:
            raise FewshiftError(f"{path} has {name} = {value!r}: choose one of {', '.join(known)}")
    for target in grid.targets:
        if not grid.dataset and OF not in target:
            raise FewshiftError(f"{path} names no dataset for '{target}': add one, or write DATASET/DOMAIN")
    for place in grid.places:
        dataset = COLLECTIONS.get(place.dataset)
        fitting = METRICS if dataset is None else PIXEL_METRICS if dataset.labels is PIXELS else IMAGE_METRICS
        if grid.metric and grid.metric not in fitting:
            raise FewshiftError(
                f"{path} has metric = {grid.metric!r}, which {place.dataset} has no labels for: "
                f"choose one of {', '.join(fitting)}"
            )
        if dataset is not None and dataset.labels is PIXELS:
            _check_dense(path, grid, dataset.name)
    most = max((shots for row in grid.rows for shots in row.shots), default=0)
    if most > grid.largest_support:
        raise FewshiftError(f"{path} asks for {most} shots: set largest_support = {most} or more")
    labels = {place.label for place in grid.places} | {"average"}
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
    for name in ("validate", "flaw", "target"):
        if any(getattr(it, name, "") for it in (grid, *grid.rows)):
            raise FewshiftError(
                f"{path} has {name}, which works with labels for images, not pixels as {dataset} has: leave it out"
            )


def _place(text: str, dataset: str) -> Place:
    origin, arrow, target = text.partition(ARROW)
    if not arrow:
        origin, target = "", text
    if not dataset:
        dataset, _, target = target.strip().partition(OF)
    return Place(text, dataset, target.strip(), origin.strip())

"""Grid: a table or figure of the paper as data. A TOML file becomes cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fewshift.core.method import Needs
from fewshift.core.metrics import METRICS, metrics_of
from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import PRECISIONS, Cell, current_method, current_names
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.grid_format import (
    CONDITION_KINDS,
    GRID_KINDS,
    ROW_KINDS,
    TABLES,
    check_kinds,
    check_known,
    named_source,
    read_toml,
)
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.lab.datasets.corruptions import CORRUPTIONS
from fewshift.methods.catalog import METHODS

MEASURES = ("score", "v", "adapt_seconds", "epoch_seconds")
ARROW, OF = "->", "/"


@dataclass(frozen=True)
class TargetColumn:
    """A column of a table: the domain that networks are adapted to, and the one they come from where it is named.

    `tuned`: its results were looked at while settings or thresholds were chosen.
    """

    label: str
    dataset: str
    target: str
    origin: str = ""
    tuned: bool = False


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
    targets: tuple[str, ...] = ()  # the columns it has entries in; all if empty
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
    - tuned_on: the targets whose results were looked at while settings or thresholds were chosen.
    - source: the name of the source network; {target}, {origin} and {seed} stand for the cell's own.
    - metric: the score, the data set's own by default.
    - measure: what the table holds: that score, the blend `v` that LCCS chose, or seconds.
    - paper_networks: those that the paper's values are of.
    - precision: "bfloat16" lets networks compute in half the bits, two to four times as fast where the processor can.
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
    precision: str = PRECISIONS[0]
    tuned_on: tuple[str, ...] = ()
    paper_networks: str = ""

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """Read a grid; a mistake in the file raises one sentence that names it."""
        path = Path(path)
        data = read_toml(path)
        check_known(path, "the grid", data, cls)
        check_kinds(path, data, {"rows": TABLES})
        rows = tuple(_row(path, row) for row in data.pop("rows", ()))
        missing = [name for name in ("title", "source", "targets", "seeds") if name not in data]
        if missing or not rows:
            raise FewshiftError(f"{path} lacks {missing[0] if missing else 'rows'}: add it")
        check_kinds(path, data, GRID_KINDS)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        grid = cls(rows=rows, **values)
        _check(path, grid)
        return grid

    @property
    def columns(self) -> tuple[TargetColumn, ...]:
        """The columns."""
        return tuple(_column(target, self.dataset, target in self.tuned_on) for target in self.targets)

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
        """The experiments behind one entry of the table: one for each seed, and each corruption of the row.

        There are none if the row leaves the column out.
        """
        if row.targets and column.label not in row.targets:
            return []
        return [
            Cell(
                dataset=column.dataset,
                source=named_source(row.source or self.source, target=column.target, origin=column.origin, seed=seed),
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
                precision=self.precision,
            )
            for corruption, seed in product(row.corruptions or (None,), self.seeds)
        ]


def _row(path: Path, data: dict[str, Any]) -> GridRow:
    data = current_names(data)
    check_known(path, "a row", data, GridRow)
    check_kinds(path, data, ROW_KINDS)
    if data.get("method") not in METHODS:
        raise FewshiftError(f"{path} has a row with method {data.get('method')!r}: choose one of {', '.join(METHODS)}")
    for condition in data.get("conditions", []):
        check_known(path, "a condition", condition, Condition)
        check_kinds(path, condition, CONDITION_KINDS)
    values = dict(data)
    if "settings" in values:
        values["method"], values["settings"] = current_method(values["method"], values["settings"])
    if "conditions" in values:
        try:
            values["conditions"] = tuple(Condition(**condition) for condition in values["conditions"])
        except FewshiftError as error:
            raise FewshiftError(f"{path} has an impossible condition: {error}") from error
    for name in ("shots", "corruptions", "targets"):
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
    _check_targets(path, grid)
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


def _check_targets(path: Path, grid: Grid) -> None:
    for target in grid.targets:
        if not grid.dataset and OF not in target:
            raise FewshiftError(f"{path} names no dataset for '{target}': add one, or write DATASET/DOMAIN")
    named = {"tuned_on": grid.tuned_on} | {f"the row '{row.name}'": row.targets for row in grid.rows}
    for where, targets in named.items():
        for target in targets:
            if target not in grid.targets:
                raise FewshiftError(
                    f"{path} has '{target}' in {where}, which is no target: choose from {', '.join(grid.targets)}"
                )


def _check_dense(path: Path, grid: Grid, dataset: str) -> None:
    for name in ("validate", "damage", "target", "corruptions"):
        if any(getattr(part, name, "") for part in (grid, *grid.rows)):
            raise FewshiftError(
                f"{path} has {name}, which needs image labels, but {dataset} has pixel labels: leave it out"
            )


def _column(text: str, dataset: str, tuned: bool) -> TargetColumn:
    origin, arrow, target = text.partition(ARROW)
    if not arrow:
        origin, target = "", text
    if not dataset:
        dataset, _, target = target.strip().partition(OF)
    return TargetColumn(text, dataset, target.strip(), origin.strip(), tuned)

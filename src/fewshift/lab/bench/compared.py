"""The three figures of the documentation, gathered: records of several grids, and the paper's values beside them.

A figure joins grids of one data set that adapt the same networks to the same targets and, where they have the paper's
values, print them for the same networks of the paper. If several such families were run, the one with most lines is
shown. Lines are methods as they come: default settings, undamaged supports, no images without labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fewshift.lab.bench.folder import RunFolder
from fewshift.lab.bench.grid import Grid, GridRow
from fewshift.lab.bench.record import Record
from fewshift.lab.bench.results import PlacedLine, brief, images_of, is_streamed, metric_of, placed_lines
from fewshift.lab.bench.told import dataset_title, networks_in, span
from fewshift.methods.catalog import METHODS
from fewshift.report.compared_figures import ComparedCurve, ComparedFigure
from fewshift.report.tables import Entry, average_of

AS_FOUND = 1.0  # where classes keep all their images, on the axis of class imbalance
FEW = 5  # the k of lines that have one, where they were run with it
METHODS_OVER_K = (("source",), ("adabn", "testtime-bn"), ("l2",), ("lccs",), ("auto",))  # the first that is a line
METHODS_OVER_STREAMS = (("source",), ("testtime-bn",), ("tent",), ("lccs",), ("auto",))


@dataclass(frozen=True)
class AveragedLine:
    """A line of a table, averaged over the targets, and the numbers of test images behind it."""

    placed: PlacedLine
    average: Entry
    images: frozenset[int]

    @property
    def streamed(self) -> bool:
        """Whether it depends on the order and size of the batches."""
        return is_streamed(METHODS[self.placed.row.method](**self.placed.row.settings or {}), self.placed.shots)


@dataclass(frozen=True)
class AveragedGrid:
    """The lines of a grid that a figure may show."""

    grid: Grid
    lines: Sequence[AveragedLine]
    networks: str  # nothing where the records do not know

    def joins(self, other: AveragedGrid) -> bool:
        """Whether lines of this grid may stand beside those of another."""
        alike = all(getattr(self.grid, name) == getattr(other.grid, name) for name in ("dataset", "source", "targets"))
        paper = not self.printed or not other.printed or self.grid.paper_networks == other.grid.paper_networks
        known = not self.networks or not other.networks or self.networks == other.networks
        return alike and metric_of(self.grid) == metric_of(other.grid) and paper and known

    @property
    def printed(self) -> bool:
        """Whether it has values of the paper."""
        return any(row.paper for row in self.grid.rows)


def averaged_grids(runs: Iterable[RunFolder]) -> list[AveragedGrid]:
    """Every grid of scores that has results for all of its targets."""
    return [
        AveragedGrid(grid, lines, networks_in(record.get("result", {}) for record in run.records_of(name)))
        for run in runs
        for name, grid in run.grids.items()
        if isinstance(grid, Grid) and grid.measure == "score" and (lines := _lines(grid, run.records))
    ]


def _lines(grid: Grid, records: Mapping[str, Record]) -> list[AveragedLine]:
    lines = []
    for placed in placed_lines(grid, records):
        average = average_of(placed.line) if len(grid.columns) > 1 else placed.line.entries[0]
        if average.values and _as_it_comes(grid, placed.row) and placed.condition.order == "shuffled":
            at = [cell for column in grid.columns
                  for cell in grid.cells_at(placed.row, column, placed.shots, placed.condition)]  # fmt: skip
            results = [records[cell.key].get("result", {}) for cell in at if cell.key in records]
            lines.append(AveragedLine(placed, average, frozenset(map(images_of, results)) - {0}))
    return lines


def _as_it_comes(grid: Grid, row: GridRow) -> bool:
    special = row.source or row.target or row.damage or row.corruptions or row.unlabelled or row.validate
    default = METHODS[row.method](**row.settings or {}) == METHODS[row.method]()
    return default and not special and not grid.validate


# the three figures


@dataclass(frozen=True)
class ComparedAxis:
    """What a figure has across: where a line stands on it, which lines do not depend on it, which are left out."""

    across: str
    methods: Sequence[Sequence[str]]  # of each group, the first that has a line
    of: Callable[[AveragedLine], float]
    irrelevant: Callable[[AveragedLine], bool]
    kept: Callable[[Sequence[AveragedLine]], Sequence[AveragedLine]]
    ticks: Mapping[float, str] = field(default_factory=dict)  # that are words


def over_k(grids: Sequence[AveragedGrid]) -> ComparedFigure | None:
    """Scores against k; streams in the largest batches."""
    axis = ComparedAxis(
        "k, labelled images of each class",
        METHODS_OVER_K,
        lambda line: line.placed.shots or 0,
        lambda line: line.placed.shots is None,
        lambda lines: _largest_batches(_classes_as_found(lines)),
    )
    return _figure(grids, axis)


def over_batch_sizes(grids: Sequence[AveragedGrid]) -> ComparedFigure | None:
    """Scores against the size of test batches; methods that answer image by image do not depend on it."""
    axis = ComparedAxis(
        "test batch size",
        METHODS_OVER_STREAMS,
        lambda line: line.placed.condition.batch_size,
        lambda line: not line.streamed,
        lambda lines: _with_few_shots(_classes_as_found(lines)),
    )
    return _figure(grids, axis)


def over_imbalance(grids: Sequence[AveragedGrid]) -> ComparedFigure | None:
    """Scores against the ratio of the largest to the smallest class; streams in the largest batches."""
    axis = ComparedAxis(
        "class imbalance \N{GREEK SMALL LETTER ALPHA}: largest class to smallest",
        METHODS_OVER_STREAMS,
        lambda line: line.placed.condition.alpha or AS_FOUND,
        lambda line: False,
        lambda lines: _largest_batches(_with_few_shots(lines)),
        {AS_FOUND: "as found"},
    )
    return _figure(grids, axis)


def _classes_as_found(lines: Sequence[AveragedLine]) -> list[AveragedLine]:
    return [line for line in lines if line.placed.condition.alpha is None]


def _largest_batches(lines: Sequence[AveragedLine]) -> list[AveragedLine]:
    largest = max((line.placed.condition.batch_size for line in lines if line.streamed), default=0)
    return [line for line in lines if not line.streamed or line.placed.condition.batch_size == largest]


def _with_few_shots(lines: Sequence[AveragedLine]) -> list[AveragedLine]:
    """Lines without shots, and those of one k."""
    known = {line.placed.shots for line in lines if line.placed.shots is not None}
    k = FEW if FEW in known else max(known, default=None)
    return [line for line in lines if line.placed.shots in (None, k)]


@dataclass(frozen=True)
class GatheredCurve:
    """A curve, and the lines that it was made of."""

    curve: ComparedCurve
    lines: Sequence[AveragedLine]


def _figure(grids: Sequence[AveragedGrid], axis: ComparedAxis) -> ComparedFigure | None:
    """The family of grids with most curves, of these the one with most of the paper's; None where no line moves."""
    shown = [(family, _gathered(family, axis)) for family in (_family(lead, grids) for lead in grids)]
    moving = [pair for pair in shown if any(not each.curve.level for each in pair[1])]
    if not moving:
        return None
    family, gathered = max(moving, key=lambda pair: (len(pair[1]), sum(bool(each.curve.paper) for each in pair[1])))
    curves = [each.curve for each in gathered]
    ticks = sorted({x for curve in curves if not curve.level for x in curve.ours})
    return ComparedFigure(
        curves,
        across=axis.across,
        label=brief(family[0].grid),
        ticks={x: axis.ticks.get(x, f"{x:g}") for x in ticks},
        note=_note(family, [line for each in gathered for line in each.lines]),
    )


def _family(lead: AveragedGrid, grids: Sequence[AveragedGrid]) -> list[AveragedGrid]:
    """A grid, and those that may stand beside it and beside each other."""
    family = [lead]
    for grid in grids:
        if grid is not lead and all(grid.joins(member) for member in family):
            family.append(grid)
    return family


def _gathered(family: Sequence[AveragedGrid], axis: ComparedAxis) -> list[GatheredCurve]:
    """One curve for each group of methods that has any."""
    groups = [[curve for method in group for curve in _curves(family, method, axis)[:1]] for group in axis.methods]
    return [group[0] for group in groups if group]


def _curves(family: Sequence[AveragedGrid], method: str, axis: ComparedAxis) -> list[GatheredCurve]:
    """The curves of a method in all grids that have one: the longest first, then those with the paper's values."""
    curves = []
    for grid in family:
        lines = axis.kept([line for line in grid.lines if line.placed.row.method == method])
        moving = [line for line in lines if not axis.irrelevant(line)]
        if len({axis.of(line) for line in moving}) > 1:
            curves.append(_curve(method, moving, axis, level=False))
        elif lines and not moving:
            curves.append(_curve(method, lines[:1], axis, level=True))
    return sorted(curves, key=lambda each: (-len(each.curve.ours), not each.curve.paper))


def _curve(method: str, lines: Sequence[AveragedLine], axis: ComparedAxis, *, level: bool) -> GatheredCurve:
    points = {axis.of(line): line for line in sorted(lines, key=axis.of)}
    shots = {line.placed.shots for line in points.values()}
    curve = ComparedCurve(
        method,
        ours={x: list(line.average.values.values()) for x, line in points.items()},
        paper={x: line.average.paper for x, line in points.items() if line.average.paper is not None},
        shots=shots.pop() if len(shots) == 1 else None,
        level=level,
    )
    return GatheredCurve(curve, list(points.values()))


def _note(family: Sequence[AveragedGrid], lines: Sequence[AveragedLine]) -> str:
    """What was averaged over, and the networks."""
    grid = family[0].grid
    draws = span({line.average.n for line in lines}, "draw")
    images = span({count for line in _classes_as_found(lines) for count in line.images}, "test image")
    targets = len(grid.columns)
    where = f"mean over {targets} targets" if targets > 1 else f"target {grid.targets[0]}"
    networks = next((each.networks for each in family if each.networks), grid.source)
    paper = next((each.grid.paper_networks for each in family if each.printed), "")
    title = dataset_title(grid.columns[0].dataset)
    beside = f" The paper's: {paper}." if paper else ""
    return (
        f"{title}, {where}, {images}{' of each' * (targets > 1)}. Band: one standard deviation over {draws}.\n"
        f"Networks: {networks}.{beside}"
    )

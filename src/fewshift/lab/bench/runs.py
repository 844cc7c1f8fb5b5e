"""Runs: what `fewshift bench` and `fewshift report` do, in one call each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewshift.core._files import whole
from fewshift.errors import FewshiftError
from fewshift.lab.bench import trust
from fewshift.lab.bench.cell import Experiment
from fewshift.lab.bench.features import FeatureGrid, grid_file, load_grid
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.materials import open_materials
from fewshift.lab.bench.page import judged_of, run_page
from fewshift.lab.bench.record import Record, Records
from fewshift.lab.bench.results import table_of
from fewshift.lab.bench.sweep import missing, sweep
from fewshift.lab.bench.trust import Trial
from fewshift.lab.datasets.catalog import find_collection
from fewshift.report import tables
from fewshift.report.tables import Table

Progress = Callable[[int, int, int], None]  # cells that were run, cells to run, failed cells


@dataclass(frozen=True)
class RunSummary:
    """A run after `run_grids`: all its cells, those that were run now, their errors, and cells without a result."""

    folder: Path
    cells: int
    run: int
    errors: tuple[str, ...]
    missing: int
    unreadable: int  # lines of the file of records

    def plain(self) -> dict[str, Any]:
        """Numbers and words, ready for JSON."""
        counts = {"cells": self.cells, "run": self.run, "failed": len(self.errors), "missing": self.missing}
        return {"folder": str(self.folder), **counts}


def run_grids(
    grids: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    data_root: str | Path | None = None,
    weights: str | Path | None = None,
    workers: int = 1,
    engine: str = "local",
    address: str | None = None,
    tell: Progress = lambda done, total, failed: None,
) -> RunSummary:
    """Run the cells of grids that have no result yet, into the folder `out` (runs/NAME of the first grid by default).

    Grids are names of the package's own, or files. `weights` is a folder with SOURCE.safetensors for each source.
    """
    files = [grid_file(name) for name in grids]
    plans = [load_grid(file) for file in files]
    _check(files, plans)
    cells = list({cell.key: cell for plan in plans for cell in plan.cells()}.values())
    folder = Path(out) if out is not None else Path("runs") / files[0].stem
    records = Records(folder)
    for file in files:
        records.keep_grid(file)
    total, done = len(missing(cells, records)), 0
    errors: list[str] = []

    def count(record: Record) -> None:
        nonlocal done
        done += 1
        if "error" in record:
            errors.append(record["error"])
        tell(done, total, len(errors))

    tell(0, total, 0)
    places = (_absolute(data_root), _absolute(weights))
    sweep(cells, folder, open_materials, places, workers=workers, tell=count, engine=engine, address=address)
    left = len(missing(cells, records))
    return RunSummary(folder, len(cells), done, tuple(errors), left, records.unreadable)


@dataclass(frozen=True)
class GridReport:
    """A grid of a run: its cells by state, its table, its judged adaptations, the gaps of its feature comparisons."""

    name: str
    title: str
    counts: Mapping[str, int]
    table: Table | None
    judged: Sequence[Trial]
    gaps: Sequence[tuple[str, float, float]]  # label, before and after the layer

    def texts(self) -> dict[str, dict[str, str]]:
        """The files of this grid by name and ending."""
        texts = {}
        if self.table is not None:
            texts[f"tables/{self.name}"] = _table_texts(self.table)
        if self.judged:
            texts[f"tables/{self.name}-judged"] = _trial_texts(self.title, self.judged)
        return texts


@dataclass(frozen=True)
class RunReport:
    """All grids of a run, the page that shows them, and the judged adaptations of several grids together."""

    folder: Path
    page: Path
    grids: Sequence[GridReport]
    together: Sequence[Trial]
    unreadable: int  # lines of the file of records

    def texts(self) -> dict[str, dict[str, str]]:
        """Every table by the name and the ending of its file."""
        texts = {name: endings for grid in self.grids for name, endings in grid.texts().items()}
        return texts | ({"judged": _trial_texts("All grids", self.together)} if self.together else {})

    def plain(self) -> dict[str, Any]:
        """Numbers and words, ready for JSON."""
        judged = {grid.name: trust.plain(grid.judged) for grid in self.grids if grid.judged}
        return {
            "page": str(self.page),
            "cells": {grid.name: dict(grid.counts) for grid in self.grids},
            "tables": {grid.name: tables.plain(grid.table) for grid in self.grids if grid.table is not None},
            **({"judged": judged} if judged else {}),
            **({"judged_together": trust.plain(self.together)} if self.together else {}),
        }


def report_run(folder: str | Path) -> RunReport:
    """Write the tables of a run as Markdown, CSV and LaTeX, and a page with figures, into its folder."""
    folder = Path(folder)
    if not (folder / "records.jsonl").is_file():
        raise FewshiftError(f"there are no records in {folder}: give the folder that `fewshift bench` named")
    records = Records(folder)
    done = records.read()
    plans = {path.stem: load_grid(path) for path in records.grids()}
    judged, together = judged_of(plans, done)
    reports = tuple(
        GridReport(
            name,
            plan.title,
            _counts(plan.cells(), done),
            tables.with_average(table_of(plan, done)) if isinstance(plan, Grid) else None,
            judged.get(name, []),
            _gaps(plan, done) if isinstance(plan, FeatureGrid) else [],
        )
        for name, plan in plans.items()
    )
    report = RunReport(folder, run_page(folder), reports, together, records.unreadable)
    (folder / "tables").mkdir(exist_ok=True)
    for name, endings in report.texts().items():
        for ending, text in endings.items():
            with whole(folder / f"{name}.{ending}") as draft:
                draft.write_text(text, encoding="utf-8")
    return report


def _check(files: Sequence[Path], plans: Sequence[Grid | FeatureGrid]) -> None:
    """Raise one sentence about what can be known before any cell is run."""
    names = [file.stem for file in files]
    for name in names:
        if names.count(name) > 1:
            raise FewshiftError(f"two grids are called {name}, but a run keeps one of a name: rename one")
    for file, plan in zip(files, plans, strict=True):
        for column in plan.columns if isinstance(plan, Grid) else ():
            known = find_collection(column.dataset)
            for part in column.target.split("+"):
                if part not in known.domains:
                    raise FewshiftError(
                        f"{file} has the target '{part}', which {known.name} lacks: use {', '.join(known.domains)}"
                    )


def _counts(cells: Iterable[Experiment], records: Mapping[str, Record]) -> dict[str, int]:
    ours = [records.get(key, {}) for key in {cell.key for cell in cells}]
    done, failed = (sum(state in record for record in ours) for state in ("result", "error"))
    return {"done": done, "failed": failed, "missing": len(ours) - done - failed}


def _gaps(plan: FeatureGrid, records: Mapping[str, Record]) -> list[tuple[str, float, float]]:
    results = [(cell.label, records.get(cell.key, {}).get("result")) for cell in plan.cells()]
    return [(label, result["gap_before"], result["gap_after"]) for label, result in results if result]


def _table_texts(table: Table) -> dict[str, str]:
    return {"md": tables.markdown(table), "csv": tables.comma_separated(table), "tex": tables.latex(table)}


def _trial_texts(title: str, judged: Sequence[Trial]) -> dict[str, str]:
    listing = trust.listing(f"{title}: adaptations judged", judged)
    return {
        "md": tables.listing_markdown(listing),
        "csv": trust.comma_separated(judged),
        "tex": tables.listing_latex(listing),
    }


def _absolute(path: str | Path | None) -> str | None:
    """As text that means the same in a worker's folder."""
    return None if path is None else str(Path(path).absolute())

"""Runs: what `fewshift bench` and `fewshift report` do, in one call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fewshift.core._files import make_folder, whole
from fewshift.errors import FewshiftError
from fewshift.lab.bench import trust_tables
from fewshift.lab.bench.cell import PRECISIONS
from fewshift.lab.bench.features import FeatureGrid, grid_file, load_grid
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.materials import open_materials
from fewshift.lab.bench.page import read_run
from fewshift.lab.bench.record import Record, Records
from fewshift.lab.bench.sweep import missing, sweep
from fewshift.lab.bench.trust import Trial
from fewshift.lab.datasets.catalog import find_collection
from fewshift.report import tables
from fewshift.report.pages import Run, Section, bench_page

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
    lost: int = 0  # cells that were run now, and have no result in the file of records

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
    precision: str | None = None,
    tell: Progress = lambda done, total, failed: None,
) -> RunSummary:
    """Run the cells of grids that have no result yet, into the folder `out` (runs/NAME of the first grid by default).

    Grids are names of the package's own, or files. `weights` is a folder with SOURCE.safetensors for each source.
    `precision` takes the place of the grids' own.
    """
    files = [grid_file(name) for name in grids]
    plans = [in_precision(load_grid(file), precision) for file in files]
    _check(files, plans)
    cells = list({cell.key: cell for plan in plans for cell in plan.cells()}.values())
    folder = Path(out) if out is not None else Path("runs") / files[0].stem
    records = Records(folder)
    for file in files:
        records.keep_grid(file, precision)
    total = len(missing(cells, records))
    told: set[str] = set()
    errors: dict[str, str] = {}

    def count(record: Record) -> None:
        told.add(record["key"])
        if "error" in record:
            errors[record["key"]] = record["error"]
        tell(len(told), total, len(errors))

    tell(0, total, 0)
    places = (_absolute(data_root), _absolute(weights))
    sweep(cells, folder, open_materials, places, workers=workers, tell=count, engine=engine, address=address)
    left = {cell.key for cell in missing(cells, records)}
    lost = left & told - errors.keys()
    return RunSummary(folder, len(cells), len(told), tuple(errors.values()), len(left), records.unreadable, len(lost))


def in_precision(plan: Grid | FeatureGrid, precision: str | None) -> Grid | FeatureGrid:
    """A grid whose networks compute in another precision."""
    if precision is None:
        return plan
    if precision not in PRECISIONS:
        raise FewshiftError(f"precision={precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
    if isinstance(plan, FeatureGrid):
        raise FewshiftError(f"'{plan.title}' compares features, always in float32: run it without a precision")
    return replace(plan, precision=precision)


@dataclass(frozen=True)
class RunReport:
    """A run, grid by grid, and the page that shows it."""

    run: Run
    page: Path

    def texts(self) -> dict[str, dict[str, str]]:
        """Every table by the name and the ending of its file."""
        texts = {name: endings for grid in self.run.sections for name, endings in grid_texts(grid).items()}
        return texts | ({"judged": _trial_texts("All grids", self.run.trials)} if self.run.trials else {})

    def plain(self) -> dict[str, Any]:
        """Numbers and words, ready for JSON."""
        grids = {grid.name: grid for grid in self.run.sections}
        states = ("done", "failed", "missing")
        judged = {name: trust_tables.plain(grid.trials) for name, grid in grids.items() if grid.trials}
        return {
            "page": str(self.page),
            "cells": {name: {state: getattr(grid, state) for state in states} for name, grid in grids.items()},
            "tables": {name: tables.plain(grid.table) for name, grid in grids.items() if grid.table is not None},
            **({"judged": judged} if judged else {}),
            **({"judged_together": trust_tables.plain(self.run.trials)} if self.run.trials else {}),
        }


def report_run(folder: str | Path) -> RunReport:
    """Write the tables of a run as Markdown, CSV and LaTeX, and a page with figures, into its folder."""
    folder = Path(folder)
    run = read_run(folder)
    report = RunReport(run, bench_page(run, folder / "report.html"))
    make_folder(folder / "tables")
    for name, endings in report.texts().items():
        for ending, text in endings.items():
            with whole(folder / f"{name}.{ending}") as draft:
                draft.write_text(text, encoding="utf-8")
    return report


def grid_texts(grid: Section) -> dict[str, dict[str, str]]:
    """The tables of one grid by the name and the ending of their files."""
    texts = {}
    if (table := grid.table) is not None:
        writers = {"md": tables.markdown, "csv": tables.comma_separated, "tex": tables.latex}
        texts[f"tables/{grid.name}"] = {ending: write(table) for ending, write in writers.items()}
    if grid.trials:
        texts[f"tables/{grid.name}-judged"] = _trial_texts(grid.title, grid.trials)
    return texts


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


def _trial_texts(title: str, judged: Sequence[Trial]) -> dict[str, str]:
    listing = trust_tables.listing(f"{title}: adaptations judged", judged)
    return {
        "md": tables.listing_markdown(listing),
        "csv": trust_tables.comma_separated(judged),
        "tex": tables.listing_latex(listing),
    }


def _absolute(path: str | Path | None) -> str | None:
    """As text that means the same in a worker's folder."""
    return None if path is None else str(Path(path).absolute())

"""Pages of the documentation: a grid's table in Markdown, with what was run, by which command and code, and when.

A page depends on the records alone, so that the same records give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewshift.lab.bench.features import GRIDS, FeatureGrid, load_grid
from fewshift.lab.bench.folder import RunFolder, times_of, versions_of
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.record import Record
from fewshift.lab.bench.results import Group, grouped, images_of, outcomes, table_of
from fewshift.lab.bench.told import dataset_title, networks_in, span
from fewshift.lab.bench.trust import NetworkName, home_accuracies, trials
from fewshift.lab.bench.trust_tables import listing
from fewshift.report import prose as words
from fewshift.report.tables import Listing, Table, untitled_listing, untitled_markdown, with_average

WRITTEN = "<!-- Written by `fewshift report` from records: what is changed here by hand is lost. -->"
MARKS = (
    "Bold is the best of a column and italics the second, where the lead over the next, seed by seed, exceeds its "
    "standard error."
)


def page_name(grid: str) -> str:
    """The file of a grid's page."""
    return f"{grid.replace('_', '-')}.md"


def has_results(run: RunFolder, name: str) -> bool:
    """Whether there is anything to show of a grid."""
    return any("result" in record for record in run.records_of(name))


def page_text(run: RunFolder, name: str, docs: Path) -> str:
    """The page of one grid: all of it but what is written by hand."""
    grid, records = run.grids[name], run.records_of(name)
    results = [record["result"] for record in records if "result" in record]
    if isinstance(grid, FeatureGrid):
        what, tables = _what_was_compared(grid), _distances(grid, run.records)
    else:
        finished = outcomes(grid, run.records)
        what, tables = _what_was_measured(grid, finished), _scores(grid, finished, run)
    known = networks_in(results)
    told = f"{what} Source networks: {_sources(grid)}{known and f' ({known})'}.{_papers(grid)}"
    parts = [f"# {grid.title}", WRITTEN, told, _commands(run, name, docs), _origin(run, name, records), *tables]
    return "\n\n".join(parts) + "\n"


def _what_was_compared(grid: FeatureGrid) -> str:
    images = span({cell.images for cell in grid.comparisons}, "image")
    return f"{dataset_title(grid.comparisons[0].dataset)}; {images} a sample."


def _what_was_measured(grid: Grid, finished: Group) -> str:
    """The data, the draws and the test images."""
    groups = grouped(finished, lambda outcome: outcome.column.label).values()
    draws = words.counted(len({outcome.cell.seed for outcome in finished}), "draw")
    images = span({max(images_of(outcome.result) for outcome in group) for group in groups}, "test image")
    titles = ", ".join(dict.fromkeys(dataset_title(column.dataset) for column in grid.columns))
    targets = _joined([column.label for column in grid.columns])
    if len(grid.columns) == 1:
        return f"{titles}; target {targets}; {draws}; {images}."
    return f"{titles}; targets {targets}; {draws}; {images} of each."


def _sources(grid: Grid | FeatureGrid) -> str:
    """The source networks that rows or comparisons name."""
    if isinstance(grid, FeatureGrid):
        names = [comparison.source for comparison in grid.comparisons]
    else:
        names = [row.source or grid.source for row in grid.rows]
    return _joined([f"`{name}`" for name in dict.fromkeys(names)])


def _papers(grid: Grid | FeatureGrid) -> str:
    """Whose values stand in brackets."""
    known = "" if isinstance(grid, FeatureGrid) else grid.paper_networks
    return known and f" The paper's values, in brackets, are of {known}."


def _joined(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _commands(run: RunFolder, name: str, docs: Path) -> str:
    """What makes the records and this page again; folders of a reader's own machine are in capitals."""
    folder = f"runs/{words.shell(run.name)}"
    needs = "" if _datasets(run.grids[name]) == {"digits"} else " --data-root DATA --weights NETWORKS"
    ours = GRIDS / f"{name}.toml"
    kept = run.grids[name]
    own = load_grid(ours) if ours.is_file() else None
    if isinstance(own, Grid) and isinstance(kept, Grid) and own.precision != kept.precision:
        own = replace(own, precision=kept.precision)
        needs = f" --precision {kept.precision}{needs}"
    same = own is not None and own.cells() == kept.cells()
    grid = name if same else f"{folder}/grids/{name}.toml"
    place = docs.name if docs.is_absolute() else docs.as_posix()
    return f"    fewshift bench {grid} --out {folder}{needs}\n    fewshift report {folder} --docs {words.shell(place)}"


def _datasets(grid: Grid | FeatureGrid) -> set[str]:
    return {cell.dataset for cell in grid.cells()}


def _origin(run: RunFolder, name: str, records: list[Record]) -> str:
    """When, by which code, and whether anything is missing."""
    versions = versions_of(records)
    commit = versions.pop("commit", "")
    times = times_of(records)
    date = f" on {times[-1]:%Y-%m-%d}" if times else ""
    code = f"commit {commit}" if commit else "commit not recorded"
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    cells, done = len(run.keys[name]), sum("result" in record for record in records)
    missing = f" {done:,} of {words.counted(cells, 'cell')} have a result." if done < cells else ""
    return f"Measured{date}; {', '.join(filter(None, [code, packages]))}.{missing}"


def _scores(grid: Grid, finished: Group, run: RunFolder) -> list[str]:
    """The table of scores; before it, where adaptations were judged, how the guard did."""
    table = with_average(table_of(grid, run.records))
    judged = trials(finished, _homes(run)) if any("trust" in outcome.result for outcome in finished) else []
    if not judged:
        return [_table(table)]
    heading = "## Scores of the networks that were returned"
    return [untitled_listing(listing(grid.title, judged)).rstrip("\n"), heading, _table(table)]


def _homes(run: RunFolder) -> Mapping[NetworkName, float]:
    """How good networks are at home, from whichever grid of the run has it."""
    every = [outcomes(grid, run.records) for grid in run.grids.values() if isinstance(grid, Grid)]
    return home_accuracies(outcome for group in every for outcome in group)


def _table(table: Table) -> str:
    text = words.sentence(untitled_markdown(table)).rstrip("\n")
    return f"{MARKS}\n\n{text}" if any(table.marks(column) for column in range(len(table.columns))) else text


def _distances(grid: FeatureGrid, records: Mapping[str, Record]) -> list[str]:
    """How far apart the samples of each comparison are."""
    results: list[tuple[str, Mapping[str, Any]]] = [
        (cell.label, records[cell.key]["result"]) for cell in grid.cells() if "result" in records.get(cell.key, {})
    ]
    lines = tuple((label, f"{result['gap_before']:.2f}", f"{result['gap_after']:.2f}") for label, result in results)
    header = "Distance of the samples within a class, in units of its spread, before and after the layer."
    return [untitled_listing(Listing(grid.title, header, ("comparison", "before", "after"), lines)).rstrip("\n")]

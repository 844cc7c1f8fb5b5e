"""Pages of the documentation: a grid's table in Markdown, with what was run, by which command and code, and when.

A page depends on the records alone, so that the same records give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewshift.lab.bench.features import GRIDS, FeatureGrid, load_grid
from fewshift.lab.bench.folder import RunFolder, times_of, versions_of
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.record import Record
from fewshift.lab.bench.results import grouped, images_of, outcomes, table_of
from fewshift.lab.bench.told import dataset_title, networks_in, span
from fewshift.lab.bench.trust import home_accuracies, trials
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
    told = _features(grid, run.records) if isinstance(grid, FeatureGrid) else _scores(grid, run)
    parts = [
        f"# {grid.title}",
        WRITTEN,
        _what(run, name),
        _commands(run, name, docs),
        _origin(run, name, records),
        *told,
    ]
    return "\n\n".join(parts) + "\n"


def _what(run: RunFolder, name: str) -> str:
    """The data, the draws and the networks, in a sentence or two."""
    grid = run.grids[name]
    results = [record["result"] for record in run.records_of(name) if "result" in record]
    networks = networks_in(results)
    if isinstance(grid, FeatureGrid):
        first = grid.comparisons[0]
        facts = f"{dataset_title(first.dataset)}, {span({cell.images for cell in grid.comparisons}, 'image')} a sample"
        return f"{facts}. {_networks(first.source, networks)}"
    finished = outcomes(grid, run.records)
    seeds = {outcome.cell.seed for outcome in finished}
    groups = grouped(finished, lambda outcome: outcome.column.label).values()
    images = {max(images_of(outcome.result) for outcome in group) for group in groups}
    titles = ", ".join(dict.fromkeys(dataset_title(column.dataset) for column in grid.columns))
    several = len(grid.columns) > 1
    where = f"target{'s' * several} {_joined([column.label for column in grid.columns])}"
    each = " of each" if several else ""
    facts = f"{titles}; {where}; {words.counted(len(seeds), 'draw')}; {span(images, 'test image')}{each}."
    paper = f" The paper's values, in brackets, are of {grid.paper_networks}." if grid.paper_networks else ""
    return f"{facts} {_networks(grid.source, networks)}{paper}"


def _networks(source: str, kinds: str) -> str:
    return f"Source networks: `{source}`{kinds and f' ({kinds})'}."


def _joined(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _commands(run: RunFolder, name: str, docs: Path) -> str:
    """What makes the records and this page again; folders of a reader's own machine are in capitals."""
    folder = f"runs/{words.shell(run.name)}"
    needs = "" if _datasets(run.grids[name]) == {"digits"} else " --data-root DATA --weights NETWORKS"
    ours = GRIDS / f"{name}.toml"
    same = ours.is_file() and _keys(load_grid(ours)) == _keys(run.grids[name])
    grid = name if same else f"{folder}/grids/{name}.toml"
    place = docs.name if docs.is_absolute() else docs.as_posix()
    return f"    fewshift bench {grid} --out {folder}{needs}\n    fewshift report {folder} --docs {words.shell(place)}"


def _datasets(grid: Grid | FeatureGrid) -> set[str]:
    return {cell.dataset for cell in grid.cells()}


def _keys(grid: Grid | FeatureGrid) -> set[str]:
    return {cell.key for cell in grid.cells()}


def _origin(run: RunFolder, name: str, records: list[Record]) -> str:
    """When, by which code, and whether anything is missing."""
    versions = versions_of(records)
    commit = versions.pop("commit", "")
    times = times_of(records)
    date = f" on {times[-1]:%Y-%m-%d}" if times else ""
    code = f"commit {commit}" if commit else "commit not recorded"
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    cells, done = len(_keys(run.grids[name])), sum("result" in record for record in records)
    missing = f" {done:,} of {words.counted(cells, 'cell')} have a result." if done < cells else ""
    return f"Measured{date}; {', '.join(filter(None, [code, packages]))}.{missing}"


def _scores(grid: Grid, run: RunFolder) -> list[str]:
    """The table of scores; before it, where adaptations were judged, how the guard did."""
    table = with_average(table_of(grid, run.records))
    every = {name: outcomes(each, run.records) for name, each in run.grids.items() if isinstance(each, Grid)}
    homes = home_accuracies(outcome for group in every.values() for outcome in group)
    if judged := trials(outcomes(grid, run.records), homes):
        heading = "## Scores of the networks that were returned"
        return [untitled_listing(listing(grid.title, judged)).rstrip("\n"), heading, _table(table)]
    return [_table(table)]


def _table(table: Table) -> str:
    text = words.sentence(untitled_markdown(table)).rstrip("\n")
    return f"{MARKS}\n\n{text}" if any(table.marks(column) for column in range(len(table.columns))) else text


def _features(grid: FeatureGrid, records: Mapping[str, Record]) -> list[str]:
    """How far apart the samples of each comparison are."""
    results: list[tuple[str, Mapping[str, Any]]] = [
        (cell.label, records[cell.key]["result"]) for cell in grid.cells() if "result" in records.get(cell.key, {})
    ]
    lines = tuple((label, f"{result['gap_before']:.2f}", f"{result['gap_after']:.2f}") for label, result in results)
    header = "Distance of the samples within a class, in units of its spread, before and after the layer."
    return [untitled_listing(Listing(grid.title, header, ("comparison", "before", "after"), lines)).rstrip("\n")]

"""What the page of a run shows: its progress, its tables and its figures."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fewshift.lab.bench.cell import Experiment, FeatureCell
from fewshift.lab.bench.classes import classes_of, scenes_of
from fewshift.lab.bench.features import FeatureGrid
from fewshift.lab.bench.folder import open_run, times_of, versions_of
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.pictures import clouds, pictures_of
from fewshift.lab.bench.record import Record
from fewshift.lab.bench.record_format import is_features
from fewshift.lab.bench.results import Outcome, grouped, outcomes, table_of
from fewshift.lab.bench.trust import NetworkName, home_accuracies, trials
from fewshift.lab.bench.trust_pictures import trust_pictures
from fewshift.lab.bench.trust_tables import listing
from fewshift.report.pages import Failure, Run, Section
from fewshift.report.tables import with_average

EXAMPLES = 3  # of the cells behind one error


def read_run(folder: Path) -> Run:
    """The run in a folder: one section for each grid that was run into it."""
    opened = open_run(folder)
    records, grids, name = opened.records, opened.grids, opened.name
    ours = opened.records_of(*grids)
    times = times_of(ours)
    finished = {stem: outcomes(grid, records) for stem, grid in grids.items() if isinstance(grid, Grid)}
    homes = home_accuracies(outcome for group in finished.values() for outcome in group)
    sections = [_section(stem, grid, records, finished.get(stem, []), homes) for stem, grid in grids.items()]
    judged = [finished[section.name] for section in sections if section.trials]
    together = trials((outcome for group in judged for outcome in group), homes) if len(judged) > 1 else []
    return Run(
        name,
        sections,
        cells=len(frozenset[str]().union(*opened.keys.values())),
        done=sum("result" in record for record in ours),
        began=_date(times[0]) if times else "",
        ended=_date(times[-1]) if times else "",
        seconds=sum(record.get("seconds", 0.0) for record in ours),
        versions=versions_of(ours),
        resume=f"fewshift bench {shlex.quote(name)}/grids/*.toml --out {shlex.quote(name)}",
        unreadable=opened.unreadable,
        trials=together,
        together=listing("All grids: adaptations judged", together) if together else None,
    )


def _section(
    name: str,
    grid: Grid | FeatureGrid,
    records: Mapping[str, Record],
    finished: Sequence[Outcome],
    homes: Mapping[NetworkName, float],
) -> Section:
    cells = list({cell.key: cell for cell in grid.cells()}.values())
    results = {cell.key: records[cell.key]["result"] for cell in cells if "result" in records.get(cell.key, {})}
    section = Section(name, grid.title, cells=len(cells), done=len(results), failures=_failures(cells, records))
    key = f"{name}-"
    if isinstance(grid, FeatureGrid):
        compared = [(cell, results[cell.key]) for cell in grid.cells() if is_features(results.get(cell.key, {}))]
        gaps = [(cell.label, result["gap_before"], result["gap_after"]) for cell, result in compared]
        return replace(section, pictures=clouds(compared, key), gaps=gaps)
    judged = trials(finished, homes)
    plain = [outcome for outcome in finished if "trust" not in outcome.result]  # the listing has the others
    return replace(
        section,
        table=with_average(table_of(grid, records)),
        trials=judged,
        listing=listing("Adaptations judged", judged) if judged else None,
        seeds=len(grid.seeds),
        pictures=pictures_of(grid, plain, key) + trust_pictures(judged, key),
        classes=classes_of(grid, plain, key),
        scenes=scenes_of(grid, plain, key),
    )


def _failures(cells: Iterable[Experiment], records: Mapping[str, Record]) -> list[Failure]:
    """Failed cells, grouped by their error."""
    failed = grouped((cell for cell in cells if _error(cell, records)), lambda cell: _error(cell, records))
    return [Failure(error, len(group), list(map(_cell_words, group[:EXAMPLES]))) for error, group in failed.items()]


def _error(cell: Experiment, records: Mapping[str, Record]) -> str:
    return str(records.get(cell.key, {}).get("error", ""))


def _cell_words(cell: Experiment) -> str:
    if isinstance(cell, FeatureCell):
        return cell.label
    shots = "" if cell.shots is None else f", k = {cell.shots}"
    mistakes = "".join(f", {word}" for word in (cell.corruption, cell.damage) if word)
    return f"{cell.method} from {cell.source} to {cell.target}{shots}{mistakes}, seed {cell.seed}"


def _date(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"

"""The folder of a run, read: its grids, its records, and what these say about when and with what they were made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fewshift.errors import FewshiftError
from fewshift.files.shapes import is_text, table_of
from fewshift.lab.bench.features import FeatureGrid, load_grid
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.record import Record, Records


@dataclass(frozen=True)
class RunFolder:
    """Everything that `bench` left in a folder."""

    name: str
    grids: Mapping[str, Grid | FeatureGrid]
    keys: Mapping[str, frozenset[str]]  # of the cells of each grid; grids may share cells
    records: Mapping[str, Record]
    unreadable: int  # lines of the file of records

    def records_of(self, *names: str) -> list[Record]:
        """The records of some grids, each once."""
        keys = frozenset[str]().union(*(self.keys[name] for name in names))
        return [record for key, record in self.records.items() if key in keys]


def open_run(folder: str | Path) -> RunFolder:
    """Read a folder that `bench` wrote."""
    folder = Path(folder)
    if not (folder / "records.jsonl").is_file() or not (files := Records(folder).grids()):
        raise FewshiftError(f"there is no run in {folder}: give the folder that `fewshift bench` named")
    stored = Records(folder)
    records = stored.read()
    grids = {file.stem: load_grid(file) for file in files}
    keys = {name: frozenset(cell.key for cell in grid.cells()) for name, grid in grids.items()}
    return RunFolder(folder.resolve().name, grids, keys, records, stored.unreadable)


def versions_of(records: Iterable[Record]) -> dict[str, str]:
    """The versions of each package that made these records."""
    versions: dict[str, set[str]] = {}
    for record in records:
        known = record.get("result", {}).get("versions")
        for name, version in known.items() if table_of(is_text)(known) else ():
            versions.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(versions[name])) for name in sorted(versions)}


def times_of(records: Iterable[Record]) -> list[datetime]:
    """When the cells of these records began, the oldest first."""
    return sorted(datetime.fromtimestamp(record["began"], UTC) for record in records if "began" in record)

"""Records of cells, and the grids that they belong to, in the folder of a run."""

from __future__ import annotations

from pathlib import Path

from fewshift.core._files import make_folder, whole
from fewshift.jobs.ledger import Ledger, Record
from fewshift.lab.bench.cell import current_key
from fewshift.lab.bench.grid_format import with_precision
from fewshift.lab.bench.record_format import is_cell_record

__all__ = ["Record", "Records"]


class Records(Ledger):
    """The ledger of a run. Records of older versions are found under the key that their cell has now."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, current_key, shape=is_cell_record)

    def keep_grid(self, grid: Path, precision: str | None = None) -> None:
        """Copy a grid file beside its records, so that the folder alone can be reported on.

        `precision` takes the place of the grid's own.
        """
        folder = make_folder(self.folder / "grids")
        text = grid.read_text(encoding="utf-8")
        with whole(folder / f"{grid.stem}.toml") as draft:
            draft.write_text(text if precision is None else with_precision(text, precision), encoding="utf-8")

    def grids(self) -> list[Path]:
        """The grid files that were run into this folder."""
        return sorted((self.folder / "grids").glob("*.toml"))

"""Records of cells, and the grids that they belong to, in the folder of a run."""

from __future__ import annotations

from pathlib import Path

from fewshift.core._files import make_folder, whole
from fewshift.jobs.ledger import Ledger, Record
from fewshift.lab.bench.cell import current_key
from fewshift.lab.bench.record_format import is_cell_record

__all__ = ["Record", "Records"]


class Records(Ledger):
    """The ledger of a run. Records of older versions are found under the key that their cell has now."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, current_key, shape=is_cell_record)

    def keep_grid(self, grid: Path) -> None:
        """Copy a grid file beside its records, so that the folder alone can be reported on."""
        folder = make_folder(self.folder / "grids")
        with whole(folder / f"{grid.stem}.toml") as draft:
            draft.write_bytes(grid.read_bytes())

    def grids(self) -> list[Path]:
        """The grid files that were run into this folder."""
        return sorted((self.folder / "grids").glob("*.toml"))

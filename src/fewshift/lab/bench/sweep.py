"""A sweep over cells: the jobs of `fewshift.jobs`, with networks and images that cells share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fewshift.jobs import sweep as jobs
from fewshift.jobs.sweep import Listener, missing
from fewshift.lab.bench.cell import Experiment, FeatureCell
from fewshift.lab.bench.features import embed
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.run import run

__all__ = ["missing", "sweep"]

Make = Callable[..., Materials]  # called once in each worker, with plain arguments that travel


def sweep(
    cells: Sequence[Experiment],
    folder: str | Path,
    make: Make,
    arguments: tuple[Any, ...],
    *,
    workers: int,
    tell: Listener,
    engine: str = "local",
    address: str | None = None,
) -> None:
    """Run the missing cells, on this machine or with `engine` "ray"; `tell` gets each record once it is written."""
    plan = jobs.WorkPlan(make, arguments, run_cell, "cell")
    jobs.sweep(cells, Records(folder), plan, workers=workers, tell=tell, engine=engine, address=address)


def run_cell(cell: Experiment, materials: Materials) -> dict[str, Any]:
    """The result of one cell."""
    return embed(cell, materials) if isinstance(cell, FeatureCell) else run(cell, materials)

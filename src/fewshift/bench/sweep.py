"""Sweep: run the cells that are missing, in this process or in several, and go on when one fails."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fewshift.bench.cell import Cell
from fewshift.bench.record import Record, Records
from fewshift.bench.run import Workshop, run
from fewshift.errors import FewshiftError

Make = Callable[..., Workshop]  # called once in each worker, with plain arguments that travel
Listener = Callable[[Record], None]


def missing(cells: Iterable[Cell], records: Records) -> list[Cell]:
    """The cells without a result; failed ones are tried again."""
    done = {key for key, record in records.read().items() if "result" in record}
    return list({cell.key: cell for cell in cells if cell.key not in done}.values())


def shared(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups of cells that differ in nothing but the stream, and so may share a fit, in the order of their first."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.fit_key, []).append(cell)
    return list(groups.values())


def work_on(cell: Cell, records: Records, workshop: Workshop) -> Record | None:
    """Run one cell and write its record; None if another process has it, or has done it meanwhile."""
    with records.claim(cell.key) as mine:
        if not mine or not missing([cell], records):
            return None
        began = time.time()
        record: Record = {"key": cell.key, "cell": cell.to_json(), "began": began}
        try:
            record["result"] = run(cell, workshop)
        except FewshiftError as error:
            record["error"] = str(error)
        except Exception as error:  # a sweep goes on, and the record tells
            record["error"] = f"{type(error).__name__}: {error}"
            record["traceback"] = traceback.format_exc()
        record["seconds"] = time.time() - began
        records.append(record)
        return record


def sweep(
    cells: Sequence[Cell], folder: str | Path, make: Make, arguments: tuple[Any, ...], *, workers: int, tell: Listener
) -> None:
    """Run what is missing on this machine; `tell` hears of every record as it is written."""
    records = Records(folder)
    left = missing(cells, records)
    if workers <= 1:
        workshop = make(*arguments)
        for cell in itertools.chain.from_iterable(shared(left)):
            record = work_on(cell, records, workshop)
            if record is not None:
                tell(record)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_open_workshop, initargs=(make, arguments)) as pool:
        futures = [pool.submit(_work, group, str(folder)) for group in shared(left)]
        for future in as_completed(futures):
            for record in future.result():
                tell(record)


_workshop: Workshop | None = None


def _open_workshop(make: Make, arguments: tuple[Any, ...]) -> None:
    global _workshop  # noqa: PLW0603  (one per worker process, made once)
    torch.set_num_threads(1)
    _workshop = make(*arguments)


def _work(cells: Sequence[Cell], folder: str) -> list[Record]:
    assert _workshop is not None  # the pool opens it first
    done = (work_on(cell, Records(folder), _workshop) for cell in cells)
    return [record for record in done if record is not None]

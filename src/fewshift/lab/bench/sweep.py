"""Sweep: run the cells that are missing, in this process, in several or on a cluster, and go on when one fails."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from fewshift.errors import FewshiftError
from fewshift.lab.bench.features import Experiment, FeatureCell, embed
from fewshift.lab.bench.record import Record, Records
from fewshift.lab.bench.run import Workshop, run

Make = Callable[..., Workshop]  # called once in each worker, with plain arguments that travel
Listener = Callable[[Record], None]

TRIES = 3  # workers that may die in a cell
DIED = "the worker process died three times in this cell (out of memory?): give it more memory, or fewer workers"


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
    """Run what is missing, on this machine or with `engine` "ray"; `tell` hears of every record as it is written."""
    if engine == "ray":
        from fewshift.lab.bench.on_ray import sweep_on_ray

        sweep_on_ray(cells, folder, make, arguments, workers=workers, address=address, tell=tell)
        return
    if engine != "local":
        raise FewshiftError(f"there is no engine '{engine}': choose local or ray")
    if address is not None:
        raise FewshiftError(f"the local engine knows no address, '{address}' is given: choose the engine ray")
    if workers <= 1:
        work_through(cells, folder, _Here(make(*arguments)), tell)
        return
    with closing(_Processes(make, arguments, workers)) as processes:
        work_through(cells, folder, processes, tell)


def missing(cells: Iterable[Experiment], records: Records) -> list[Experiment]:
    """The cells without a result; failed ones are tried again."""
    done = {key for key, record in records.read().items() if "result" in record}
    return list({cell.key: cell for cell in cells if cell.key not in done}.values())


def shared(cells: Iterable[Experiment]) -> list[list[Experiment]]:
    """Groups of cells that differ in nothing but the stream, and so may share a fit, in the order of their first."""
    groups: dict[str, list[Experiment]] = {}
    for cell in cells:
        groups.setdefault(cell.fit_key, []).append(cell)
    return list(groups.values())


def record_of(cell: Experiment, workshop: Workshop) -> Record:
    """Run one cell: its result, or why there is none."""
    began = time.time()
    try:
        result = embed(cell, workshop) if isinstance(cell, FeatureCell) else run(cell, workshop)
        return _record(cell, began, {"result": result})
    except FewshiftError as error:
        return _record(cell, began, {"error": str(error)})
    except Exception as error:  # a sweep goes on, and the record tells
        facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        return _record(cell, began, facts)


def _record(cell: Experiment, began: float, facts: Record) -> Record:
    return {"key": cell.key, "cell": cell.to_json(), "began": began, **facts, "seconds": time.time() - began}


@dataclass(eq=False)
class Group:
    """Cells that share a fit, for one worker, in their order: the first is the one that is being run."""

    cells: list[Experiment]
    began: float = 0.0  # the first, or its first try
    deaths: int = 0  # of workers in the first
    claims: ExitStack = field(default_factory=ExitStack)

    def claim(self, records: Records) -> bool:
        """Keep the cells that no other process has, or has done meanwhile; False if none are left."""
        mine = [cell for cell in self.cells if self.claims.enter_context(records.claim(cell.key))]
        self.cells = missing(mine, records)
        self.began = time.time()
        if not self.cells:
            self.claims.close()
        return bool(self.cells)

    def next(self) -> None:
        """The first has its record."""
        del self.cells[0]
        self.began, self.deaths = time.time(), 0


class Crew(Protocol):
    """Who computes: this process, processes beside it, or a cluster. Claims and records are not its business."""

    @property
    def size(self) -> int:
        """Groups it takes at once."""

    def begin(self, group: Group) -> None:
        """Hand over the cells of a group."""

    def news(self) -> tuple[Group, Record | None]:
        """Wait for the next record of a group that was begun, or None: its worker died."""


def work_through(cells: Iterable[Experiment], folder: str | Path, crew: Crew, tell: Listener) -> None:
    """Let a crew run what is missing; a group is claimed when the crew has room for it, and no earlier."""
    records = Records(folder)
    waiting = deque(map(Group, shared(missing(cells, records))))
    busy: set[Group] = set()
    try:
        while waiting or busy:
            while waiting and len(busy) < crew.size:
                group = waiting.popleft()
                if group.claim(records):
                    busy.add(group)
                    crew.begin(group)
            if busy:
                _hear(crew, records, busy, tell)
    finally:
        for group in busy:
            group.claims.close()


def _hear(crew: Crew, records: Records, busy: set[Group], tell: Listener) -> None:
    group, record = crew.news()
    died = record is None
    group.deaths += died
    if group.deaths == TRIES:
        record = _record(group.cells[0], group.began, {"error": DIED})
    if record is not None:
        records.append(record)
        group.next()
        tell(record)
    if not group.cells:
        busy.remove(group)
        group.claims.close()
    elif died:
        crew.begin(group)


@dataclass
class _Here:
    """This process."""

    workshop: Workshop
    size: int = 1

    def begin(self, group: Group) -> None:
        self.group = group

    def news(self) -> tuple[Group, Record]:
        return self.group, record_of(self.group.cells[0], self.workshop)


class _Processes:
    """Processes of this machine, started when there is work for them, each with a workshop of its own."""

    def __init__(self, make: Make, arguments: tuple[Any, ...], size: int) -> None:
        self.size = size
        self._plan = make, arguments
        self._processes: dict[connection.Connection, SpawnProcess] = {}
        self._groups: dict[connection.Connection, Group] = {}  # what each does, or has done: then it is free

    def begin(self, group: Group) -> None:
        free = next((wire for wire, old in self._groups.items() if not old.cells), None)
        wire = self._start() if free is None else free
        self._groups[wire] = group
        with suppress(BrokenPipeError):  # it died while it was free: the news will tell
            wire.send(group.cells)

    def news(self) -> tuple[Group, Record | None]:
        wire: Any = connection.wait([wire for wire, group in self._groups.items() if group.cells])[0]
        group = self._groups[wire]
        try:
            said = wire.recv()
        except (EOFError, OSError):
            self._end(wire)
            return group, None
        if isinstance(said, Exception):
            raise said
        return group, said

    def close(self) -> None:
        """Leave no process behind, whatever it does."""
        for wire in list(self._processes):
            self._end(wire)

    def _start(self) -> connection.Connection:
        context = get_context("spawn")
        wire, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, *self._plan))
        self._processes[wire] = process
        process.start()
        other.close()  # the worker alone has it: its end is seen here
        return wire

    def _end(self, wire: connection.Connection) -> None:
        process = self._processes.pop(wire)
        self._groups.pop(wire, None)
        if process.pid is not None:
            process.kill()
            process.join()
        wire.close()


def _serve(wire: connection.Connection, make: Make, arguments: tuple[Any, ...]) -> None:
    """In a worker: run the groups that come, cell after cell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver hears it too, and ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    torch.set_num_threads(1)
    try:
        workshop = make(*arguments)
    except Exception as error:  # no cell could be run: the driver raises it
        wire.send(error)
        return
    while True:
        for cell in wire.recv():
            wire.send(record_of(cell, workshop))


def _end_with_driver() -> None:
    driver = parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)

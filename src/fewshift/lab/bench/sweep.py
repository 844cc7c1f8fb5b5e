"""Sweep: run the missing cells in this process, in several or on a cluster; a cell that fails does not stop it."""

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
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import Experiment, FeatureCell
from fewshift.lab.bench.features import embed
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.record import Record, Records
from fewshift.lab.bench.results import grouped
from fewshift.lab.bench.run import run

Make = Callable[..., Materials]  # called once in each worker, with plain arguments that travel
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
    """Run what is missing, on this machine or with `engine` "ray"; `tell` gets each record once it is written."""
    if engine == "ray":
        from fewshift.lab.bench.on_ray import sweep_on_ray

        sweep_on_ray(cells, folder, make, arguments, workers=workers, address=address, tell=tell)
        return
    if engine != "local":
        raise FewshiftError(f"there is no engine '{engine}': choose local or ray")
    if address is not None:
        raise FewshiftError(f"the local engine takes no address ('{address}'): choose the engine ray")
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
    """Groups of cells that differ only in the stream, and so share a fit, in the order of their first cells."""
    return list(grouped(cells, lambda cell: cell.fit_key).values())


def record_of(cell: Experiment, materials: Materials) -> Record:
    """The record of one cell: its result, or its error."""
    began = time.time()
    try:
        result = embed(cell, materials) if isinstance(cell, FeatureCell) else run(cell, materials)
        return _record(cell, began, {"result": result})
    except FewshiftError as error:
        return _record(cell, began, {"error": str(error)})
    except Exception as error:  # the sweep continues, and the record has the error
        facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        return _record(cell, began, facts)


def _record(cell: Experiment, began: float, facts: Record) -> Record:
    return {"key": cell.key, "cell": cell.to_json(), "began": began, **facts, "seconds": time.time() - began}


@dataclass(eq=False)
class Group:
    """Cells that share a fit, for one worker, in order; the first is the one that is running."""

    cells: list[Experiment]
    began: float = 0.0  # when the first cell was first tried
    deaths: int = 0  # of workers that ran the first cell
    claims: ExitStack = field(default_factory=ExitStack)

    def claim(self, records: Records) -> bool:
        """Keep the cells that no other process has claimed or finished; False if none are left."""
        mine = [cell for cell in self.cells if self.claims.enter_context(records.claim(cell.key))]
        self.cells = missing(mine, records)
        self.began = time.time()
        if not self.cells:
            self.claims.close()
        return bool(self.cells)

    def next(self) -> None:
        """Move on to the next cell: the first has its record."""
        del self.cells[0]
        self.began, self.deaths = time.time(), 0


class Engine(Protocol):
    """Computes records: in this process, in processes beside it, or on a cluster. It neither claims nor writes."""

    @property
    def size(self) -> int:
        """How many groups it runs at once."""

    def start(self, group: Group) -> None:
        """Begin to run the cells of a group."""

    def wait(self) -> tuple[Group, Record | None]:
        """The next record of a started group, or None if its worker died."""


def work_through(cells: Iterable[Experiment], folder: str | Path, engine: Engine, tell: Listener) -> None:
    """Run what is missing on an engine; a group is claimed only when the engine has room for it."""
    records = Records(folder)
    waiting = deque(map(Group, shared(missing(cells, records))))
    busy: set[Group] = set()
    try:
        while waiting or busy:
            while waiting and len(busy) < engine.size:
                group = waiting.popleft()
                if group.claim(records):
                    busy.add(group)
                    engine.start(group)
            if busy:
                _record_next(engine, records, busy, tell)
    finally:
        for group in busy:
            group.claims.close()


def _record_next(engine: Engine, records: Records, busy: set[Group], tell: Listener) -> None:
    group, record = engine.wait()
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
        engine.start(group)


@dataclass
class _Here:
    """This process."""

    materials: Materials
    size: int = 1

    def start(self, group: Group) -> None:
        self.group = group

    def wait(self) -> tuple[Group, Record]:
        return self.group, record_of(self.group.cells[0], self.materials)


class _Processes:
    """Processes of this machine, started when there is work for them, each with its own materials."""

    def __init__(self, make: Make, arguments: tuple[Any, ...], size: int) -> None:
        self.size = size
        self._plan = make, arguments
        self._processes: dict[connection.Connection, ForkServerProcess] = {}
        self._groups: dict[connection.Connection, Group] = {}  # what each runs; a group without cells is done

    def start(self, group: Group) -> None:
        free = next((wire for wire, old in self._groups.items() if not old.cells), None)
        wire = self._start() if free is None else free
        self._groups[wire] = group
        with suppress(BrokenPipeError):  # it died while it was free: `wait` will find out
            wire.send(group.cells)

    def wait(self) -> tuple[Group, Record | None]:
        wire: Any = connection.wait([wire for wire, group in self._groups.items() if group.cells])[0]
        group = self._groups[wire]
        try:
            message = wire.recv()
        except (EOFError, OSError):
            self._end(wire)
            return group, None
        if isinstance(message, Exception):
            raise message
        return group, message

    def close(self) -> None:
        """Kill every process."""
        for wire in list(self._processes):
            self._end(wire)

    def _start(self) -> connection.Connection:
        # one process imports everything and the workers are forked from it: they start, and are replaced, at once
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        wire, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, *self._plan))
        self._processes[wire] = process
        process.start()
        other.close()  # the worker alone has it, so its death is seen here
        return wire

    def _end(self, wire: connection.Connection) -> None:
        process = self._processes.pop(wire)
        self._groups.pop(wire, None)
        if process.pid is not None:
            process.kill()
            process.join()
        wire.close()


def _serve(wire: connection.Connection, make: Make, arguments: tuple[Any, ...]) -> None:
    """Run the groups that arrive, cell after cell; this is the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets it too, and ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    torch.set_num_threads(1)
    try:
        materials = make(*arguments)
    except Exception as error:  # no cell can run: the driver raises it
        wire.send(error)
        return
    while True:
        for cell in wire.recv():
            wire.send(record_of(cell, materials))


def _end_with_driver() -> None:
    driver = parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)

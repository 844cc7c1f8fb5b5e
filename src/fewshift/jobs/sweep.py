"""Sweep: run the missing jobs in this process, in several or on a cluster; a job that fails does not stop it."""

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
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from fewshift.errors import FewshiftError
from fewshift.jobs.ledger import Ledger, Record

Listener = Callable[[Record], None]
ENGINES = ("local", "ray")
TRIES = 3  # workers that may die in a job


class Job(Protocol):
    """Work that is named completely."""

    @property
    def key(self) -> str:
        """The same for the same work, wherever and whenever it is named."""

    @property
    def fit_key(self) -> str:
        """The same for jobs that share a part of their work: one worker runs them, one after the other."""

    def to_json(self) -> dict[str, Any]:
        """What the record says about the job: plain numbers and words."""


AnyJob = TypeVar("AnyJob", bound=Job)


class WorkPlan(NamedTuple):
    """How jobs are run. Everything in it travels to the workers."""

    make: Callable[..., Any]  # called once in each worker, with plain arguments: what its jobs share
    arguments: tuple[Any, ...]
    run: Callable[[Any, Any], dict[str, Any]]  # the result of a job, with what its worker has made
    noun: str  # what a job is called, in its record and in sentences


def check_engine(engine: str, address: str | None) -> None:
    """One sentence for an engine that there is not, or that has no address."""
    if engine not in ENGINES:
        raise FewshiftError(f"there is no engine '{engine}': choose local or ray")
    if engine == "local" and address is not None:
        raise FewshiftError(f"the local engine takes no address ('{address}'): choose the engine ray")


def sweep(
    jobs: Sequence[Job],
    ledger: Ledger,
    plan: WorkPlan,
    *,
    workers: int,
    tell: Listener,
    engine: str = "local",
    address: str | None = None,
) -> None:
    """Run what is missing, on this machine or with `engine` "ray"; `tell` gets each record once it is written."""
    check_engine(engine, address)
    if engine == "ray":
        from fewshift.jobs.on_ray import sweep_on_ray

        sweep_on_ray(jobs, ledger, plan, workers=workers, address=address, tell=tell)
        return
    if workers <= 1:
        work_through(jobs, ledger, plan, _Here(plan, plan.make(*plan.arguments)), tell)
        return
    with closing(_Processes(plan, workers)) as processes:
        work_through(jobs, ledger, plan, processes, tell)


def missing(jobs: Iterable[AnyJob], ledger: Ledger) -> list[AnyJob]:
    """The jobs without a result; failed ones are tried again."""
    done = ledger.finished()
    return list({job.key: job for job in jobs if job.key not in done}.values())


def shared(jobs: Iterable[Job]) -> list[list[Job]]:
    """Groups of jobs that share a part of their work, in the order of their first jobs."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.fit_key, []).append(job)
    return list(groups.values())


def record_of(job: Job, plan: WorkPlan, materials: Any) -> Record:
    """The record of one job: its result, or its error."""
    began = time.time()
    try:
        return _record(job, plan, began, {"result": plan.run(job, materials)})
    except FewshiftError as error:
        return _record(job, plan, began, {"error": str(error)})
    except Exception as error:  # the sweep continues, and the record has the error
        facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        return _record(job, plan, began, facts)


def _record(job: Job, plan: WorkPlan, began: float, facts: Record) -> Record:
    return {"key": job.key, plan.noun: job.to_json(), "began": began, **facts, "seconds": time.time() - began}


@dataclass(eq=False)
class Group:
    """Jobs that share work, for one worker, in order; the first is the one that is running."""

    jobs: list[Job]
    began: float = 0.0  # when the first job was first tried
    deaths: int = 0  # of workers that ran the first job
    claims: ExitStack = field(default_factory=ExitStack)

    def claim(self, ledger: Ledger) -> bool:
        """Keep the jobs that no other process has claimed or finished; False if none are left."""
        mine = [job for job in self.jobs if self.claims.enter_context(ledger.claim(job.key))]
        self.jobs = missing(mine, ledger)
        self.began = time.time()
        if not self.jobs:
            self.claims.close()
        return bool(self.jobs)

    def next(self) -> None:
        """Move on to the next job: the first has its record."""
        del self.jobs[0]
        self.began, self.deaths = time.time(), 0


class Engine(Protocol):
    """Computes records: in this process, in processes beside it, or on a cluster. It neither claims nor writes."""

    @property
    def size(self) -> int:
        """How many groups it runs at once."""

    def start(self, group: Group) -> None:
        """Begin to run the jobs of a group."""

    def wait(self) -> tuple[Group, Record | None]:
        """The next record of a started group, or None if its worker died."""


def work_through(jobs: Iterable[Job], ledger: Ledger, plan: WorkPlan, engine: Engine, tell: Listener) -> None:
    """Run what is missing on an engine; a group is claimed only when the engine has room for it."""
    waiting = deque(map(Group, shared(missing(jobs, ledger))))
    busy: set[Group] = set()
    try:
        while waiting or busy:
            while waiting and len(busy) < engine.size:
                group = waiting.popleft()
                if group.claim(ledger):
                    busy.add(group)
                    engine.start(group)
            if busy:
                _record_next(engine, ledger, plan, busy, tell)
    finally:
        for group in busy:
            group.claims.close()


def _record_next(engine: Engine, ledger: Ledger, plan: WorkPlan, busy: set[Group], tell: Listener) -> None:
    group, record = engine.wait()
    died = record is None
    group.deaths += died
    if group.deaths == TRIES:
        error = (
            f"the worker process died three times in this {plan.noun} (out of memory?): give it more memory, or fewer "
            "workers"
        )
        record = _record(group.jobs[0], plan, group.began, {"error": error})
    if record is not None:
        ledger.append(record)
        group.next()
        tell(record)
    if not group.jobs:
        busy.remove(group)
        group.claims.close()
    elif died:
        engine.start(group)


@dataclass
class _Here:
    """This process."""

    plan: WorkPlan
    materials: Any
    size: int = 1

    def start(self, group: Group) -> None:
        self.group = group

    def wait(self) -> tuple[Group, Record]:
        return self.group, record_of(self.group.jobs[0], self.plan, self.materials)


class _Processes:
    """Processes of this machine, started when there is work for them, each with its own materials."""

    def __init__(self, plan: WorkPlan, size: int) -> None:
        self.size = size
        self._plan = plan
        self._processes: dict[connection.Connection, ForkServerProcess] = {}
        self._groups: dict[connection.Connection, Group] = {}  # what each runs; a group without jobs is done

    def start(self, group: Group) -> None:
        free = next((wire for wire, old in self._groups.items() if not old.jobs), None)
        wire = self._start() if free is None else free
        self._groups[wire] = group
        with suppress(BrokenPipeError):  # it died while it was free: `wait` will find out
            wire.send(group.jobs)

    def wait(self) -> tuple[Group, Record | None]:
        wire: Any = connection.wait([wire for wire, group in self._groups.items() if group.jobs])[0]
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
        context.set_forkserver_preload([self._plan.run.__module__])
        wire, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self._plan))
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


def _serve(wire: connection.Connection, plan: WorkPlan) -> None:
    """Run the groups that arrive, job after job; this is the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets it too, and ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    torch.set_num_threads(1)
    try:
        materials = plan.make(*plan.arguments)
    except Exception as error:  # no job can run: the driver raises it
        wire.send(error)
        return
    while True:
        for job in wire.recv():
            wire.send(record_of(job, plan, materials))


def _end_with_driver() -> None:
    driver = parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)

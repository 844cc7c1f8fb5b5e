"""A sweep on Ray: workers on any node compute; only the driver writes into the ledger."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import torch

from fewshift.errors import FewshiftError
from fewshift.jobs.ledger import Ledger, Record
from fewshift.jobs.sweep import Group, Job, Listener, WorkPlan, missing, record_of, work_through

STDERR = 2  # the file descriptor
STORE = 2**27  # bytes of a local object store: records are small


def sweep_on_ray(
    jobs: Sequence[Job],
    ledger: Ledger,
    plan: WorkPlan,
    *,
    workers: int,
    address: str | None = None,
    tell: Listener,
) -> None:
    """Run what is missing on the Ray cluster at `address`, or on a local one with `workers` processors.

    Every node needs fewshift, and the files at the paths in the plan's arguments. An open connection to Ray is used
    and left open.
    """
    if not missing(jobs, ledger):
        return
    with connected(workers, address) as ray, closing(_Cluster(ray, plan, workers)) as cluster:
        work_through(jobs, ledger, plan, cluster, tell)


@contextmanager
def connected(workers: int, address: str | None, store: int = STORE) -> Iterator[Any]:
    """The module `ray`, connected and quiet; a connection that was opened here is closed at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else the death of a worker is printed to stdout
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else Ray prints what it thinks of its own actors
    if address is not None:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # of 40 seconds: twenty are the default
    try:
        import ray
    except ImportError as error:
        raise FewshiftError('Ray is not installed: pip install "fewshift[ray]"') from error
    if ray.is_initialized():
        yield ray
        return
    if address is not None and address.startswith("ray://"):
        raise FewshiftError(
            f"Ray Client ('{address}') cannot stream records: run inside the cluster with --address auto"
        )
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": store}
    try:
        with _silenced():
            ray.init("local", **local, **quiet) if address is None else ray.init(address, **quiet)
    except Exception as error:  # of many kinds, down to the plain one
        why = str(error).strip().partition("\n")[0]
        if address is None:
            raise FewshiftError(
                f"Ray did not start ({why}): start fewer workers, or choose the engine local"
            ) from error
        advice = "start one, set RAY_AUTH_MODE=token if it needs a token, or leave the address out"
        raise FewshiftError(f"cannot join a Ray cluster at '{address}' ({why}): {advice}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _silenced() -> Iterator[None]:
    """Within the block nothing reaches stderr: Ray's core says there, past Python, that it was told to be silent."""
    kept, nowhere = os.dup(STDERR), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, STDERR)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)
        os.close(nowhere)


class _Cluster:
    """The workers of a Ray cluster, one processor each."""

    def __init__(self, ray: Any, plan: WorkPlan, workers: int) -> None:
        self._ray = ray
        self._plan = ray.put(plan)  # once: a network may be in it
        self._workers = workers
        # the driver retries: Ray would retry for ever when memory runs out, finished jobs included
        self._task = ray.remote(num_cpus=1, max_retries=0)(_compute)
        self._groups: dict[Any, Group] = {}  # by the stream of their records

    @property
    def size(self) -> int:
        """The processors there are now, or `workers` if that is more: some clusters grow on demand."""
        return max(self._workers, int(self._ray.cluster_resources().get("CPU", 0)))

    def start(self, group: Group) -> None:
        self._groups[self._task.remote(list(group.jobs), self._plan)] = group

    def wait(self) -> tuple[Group, Record | None]:
        trouble = self._ray.exceptions
        (stream,), _ = self._ray.wait(list(self._groups), num_returns=1)
        group = self._groups[stream]
        try:
            record: Record = self._ray.get(next(stream))
        except (
            trouble.WorkerCrashedError,
            trouble.OutOfMemoryError,
            trouble.NodeDiedError,
            trouble.LocalRayletDiedError,
            trouble.ObjectLostError,
        ):
            del self._groups[stream]
            return group, None
        except trouble.RayTaskError as error:
            if isinstance(error.cause, FewshiftError):
                raise error.cause from None
            raise FewshiftError(f"a Ray worker cannot start ({error.cause}): install fewshift on every node") from error
        if len(group.jobs) == 1:
            del self._groups[stream]
        return group, record

    def close(self) -> None:
        """Cancel what nobody waits for."""
        for stream in self._groups:
            self._ray.cancel(stream, force=True)


def _compute(jobs: Sequence[Job], plan: WorkPlan) -> Iterator[Record]:
    materials = _materials(plan)
    for job in jobs:
        yield record_of(job, plan, materials)


@cache  # one in each worker process
def _materials(plan: WorkPlan) -> Any:
    torch.set_num_threads(1)
    return plan.make(*plan.arguments)

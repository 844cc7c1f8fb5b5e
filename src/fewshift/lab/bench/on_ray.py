"""A sweep on Ray: workers anywhere compute, and the driver alone touches the run's folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fewshift.errors import FewshiftError
from fewshift.lab.bench.features import Experiment
from fewshift.lab.bench.record import Record, Records
from fewshift.lab.bench.run import Workshop
from fewshift.lab.bench.sweep import Group, Listener, Make, missing, record_of, work_through

STORE = 2**27  # bytes of a local object store: records are small


def sweep_on_ray(
    cells: Sequence[Experiment],
    folder: str | Path,
    make: Make,
    arguments: tuple[Any, ...],
    *,
    workers: int,
    address: str | None = None,
    tell: Listener,
) -> None:
    """Run what is missing on the Ray cluster at `address`, or on a local one with `workers` processors.

    Every node needs fewshift, and the data and weights where `arguments` say. If Ray is connected already, that
    connection is used and left open.
    """
    if not missing(cells, Records(folder)):
        return
    with connected(workers, address) as ray, closing(_Cluster(ray, make, arguments, workers)) as cluster:
        work_through(cells, folder, cluster, tell)


@contextmanager
def connected(workers: int, address: str | None) -> Iterator[Any]:
    """The module `ray`, connected and quiet; what was opened here is closed at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else the death of a worker is printed to stdout
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
            f"a Ray Client cannot stream records, '{address}' is one: run in the cluster, --address auto"
        )
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": STORE}
    try:
        ray.init("local", **local, **quiet) if address is None else ray.init(address, **quiet)
    except Exception as error:  # of many kinds, down to the plain one
        why = str(error).strip().partition("\n")[0]
        if address is None:
            raise FewshiftError(
                f"Ray did not start ({why}): start fewer workers, or choose the engine local"
            ) from error
        advice = "start it, set RAY_AUTH_MODE=token if it asks for one, or leave the address out"
        raise FewshiftError(f"no Ray cluster lets us in at '{address}' ({why}): {advice}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


class _Cluster:
    """The workers of a Ray cluster, a processor each."""

    def __init__(self, ray: Any, make: Make, arguments: tuple[Any, ...], workers: int) -> None:
        self._ray = ray
        self._plan = make, arguments
        self._workers = workers
        # tried again by the driver: Ray would do so for ever when memory runs out, and with cells that are done
        self._task = ray.remote(num_cpus=1, max_retries=0)(_compute)
        self._groups: dict[Any, Group] = {}  # by the stream of their records

    @property
    def size(self) -> int:
        """As many as there are processors now, or as `workers` if a cluster grows when more is asked of it."""
        return max(self._workers, int(self._ray.cluster_resources().get("CPU", 0)))

    def begin(self, group: Group) -> None:
        self._groups[self._task.remote(list(group.cells), *self._plan)] = group

    def news(self) -> tuple[Group, Record | None]:
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
            raise FewshiftError(
                f"a Ray worker failed to start ({error.cause}): install fewshift on every node"
            ) from error
        if len(group.cells) == 1:
            del self._groups[stream]
        return group, record

    def close(self) -> None:
        """Let nobody go on with what is not waited for."""
        for stream in self._groups:
            self._ray.cancel(stream, force=True)


def _compute(cells: Sequence[Experiment], make: Make, arguments: tuple[Any, ...]) -> Iterator[Record]:
    workshop = _workshop(make, arguments)
    for cell in cells:
        yield record_of(cell, workshop)


@cache  # one in each worker process
def _workshop(make: Make, arguments: tuple[Any, ...]) -> Workshop:
    torch.set_num_threads(1)
    return make(*arguments)

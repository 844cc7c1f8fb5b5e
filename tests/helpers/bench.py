"""Tiny materials for cells, and processes that sweep them, get stuck and die."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.sweep import sweep
from tests.helpers.networks import make_support, make_tiny

PATIENCE = 300  # seconds, on a busy machine
ROOT = Path(__file__).parents[2]
Driver = BaseProcess | subprocess.Popen[bytes]
DEADLY, TRAP = 7, 9  # batch sizes


@dataclass
class Held:
    """A domain in memory."""

    pictures: Tensor
    labels: Tensor
    classes: tuple[str, ...] = ("ant", "bee", "cat")
    skip_rare: bool = False

    def images(self, indices: Tensor) -> Tensor:
        return self.pictures[indices]

    def batches(self, batches):
        return (self.images(batch) for batch in batches)


DOMAIN = Held(make_support(30).images, make_support(30).labels)
CELL = Cell("toy", "tiny", "place", "lccs", {"epochs": 2, "grid": 3}, shots=5, largest_support=5)
CELLS = [replace(CELL, method="adabn", settings={}, seed=seed) for seed in range(4)]  # quick in a fresh process


def with_batches_of(size: int, cell: Cell = CELLS[0]) -> Cell:
    return replace(cell, condition=Condition(batch_size=size))


TRAPPED_CELLS = [*CELLS, *(with_batches_of(TRAP, cell) for cell in CELLS)]


def tiny_materials(pause: float = 0.0) -> Materials:
    def network(cell: Cell):
        time.sleep(pause)
        if cell.source == "broken":
            raise RuntimeError("no such network")
        return make_tiny()

    return Materials(network, lambda cell: DOMAIN)


def no_materials() -> Materials:
    raise FewshiftError("there are no materials: build some")


class Trapped(Materials):
    """Materials that kill or hold a process, by the batch size of the cell."""

    def __init__(self, trap: str) -> None:
        super().__init__(lambda cell: make_tiny(), lambda cell: DOMAIN)
        self.trap = Path(trap)

    def network(self, cell: Cell):
        if cell.condition.batch_size == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if cell.condition.batch_size == TRAP and self.trap.exists():
            with self.trap.open("w") as pipe:  # open as long as this process lives
                print(os.getpid(), file=pipe, flush=True)
                threading.Event().wait()
        return super().network(cell)


def set_trap(folder: Path) -> Path:
    """A named pipe into which a trapped process writes its id."""
    os.mkfifo(folder / "trap")
    return folder / "trap"


def kill_the_first(trap: Path) -> None:
    """Wait for a trapped process in the background and kill it; later ones pass."""

    def kill() -> None:
        with trap.open() as pipe:
            process = int(pipe.readline())
            trap.unlink()
            os.kill(process, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def forked(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that starts at once: everything is imported already where it is forked."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["fewshift.lab.bench.sweep"])
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def sweeping(folder: str, make: Callable[..., Materials], arguments: tuple[Any, ...], file: str, **how: Any) -> None:
    """Sweep in a process of its own; a line of `file` for each record."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
    with Path(file).open("a") as lines:

        def tell(record) -> None:
            print("one", file=lines, flush=True)

        cells = TRAPPED_CELLS if make is Trapped else CELLS
        sweep(cells, folder, make, arguments, tell=tell, **how)


@contextmanager
def trapped_driver(folder: Path, engine: str = "local", address: str = "") -> Iterator[tuple[Driver, TextIO]]:
    """A driver whose two workers did a cell each and are trapped in the next, and a pipe they hold while they live."""
    trap = set_trap(folder)
    arguments = str(folder), str(trap), str(folder / "heard"), engine, address
    # Ray wants an interpreter of its own, whose workers find the tests where this one does
    driver: Driver = fresh(TRAPPING, *arguments) if engine == "ray" else forked(trapped_sweep, *arguments)
    try:
        wait_for(lambda: lines_of(folder / "heard") == 2, driver)  # in the middle of their groups
        with trap.open() as pipe:
            assert pipe.readline() != pipe.readline()
            trap.unlink()
            yield driver, pipe
    finally:
        driver.kill()
        driver.wait() if isinstance(driver, subprocess.Popen) else driver.join()


TRAPPING = """
import sys
from tests.helpers.bench import trapped_sweep

if __name__ == "__main__":
    trapped_sweep(*sys.argv[1:])
"""


def fresh(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A new interpreter that runs the code and imports from where this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, cwd=ROOT)


def trapped_sweep(folder: str, trap: str, file: str, engine: str, address: str) -> None:
    """A driver with two workers; a function at the top of a module, so that it can be named to another process."""
    sweeping(folder, Trapped, (trap,), file, workers=2, engine=engine, address=address or None)


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(condition: Callable[[], bool], process: Driver) -> None:
    """Until something is true that a living process brings about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        ended = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
        assert ended is None, f"it ended with {ended}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_gone(pipe: TextIO) -> bool:
    """Whether everybody who had the pipe open ends in time."""
    return bool(select.select([pipe], [], [], PATIENCE)[0]) and not pipe.read()

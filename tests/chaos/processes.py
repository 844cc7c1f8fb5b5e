"""Processes that are killed when they have computed for so long: processor time, because a busy machine has its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).parents[2]
PAUSE = 0.005  # seconds between two looks
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 1800.0  # seconds for a run to its end
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def start(words: list[str], here: Path, **streams: Any) -> subprocess.Popen[str]:
    """A command in a group of its own, with one thread."""
    path = os.pathsep.join([str(HOME / "src"), str(HOME), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "fewshift.cli", *words],
        cwd=here,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
        start_new_session=True,
        text=True,
        **streams,
    )


def computed(group: int) -> float:
    """Seconds of processor time of all processes of a group."""
    ticks = 0
    for place in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))  # its own, and those of its children that have ended
    return ticks / TICKS


def kill(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started, without a word."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Effort(NamedTuple):
    """Seconds of processor time until a command wrote something, and in all."""

    first: float
    whole: float


def run(words: list[str], here: Path) -> Effort:
    """Run a command to its end."""
    process = start(words, here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    first, spent, deadline = None, 0.0, time.monotonic() + PATIENCE
    try:
        while process.poll() is None and time.monotonic() < deadline:
            spent = max(spent, computed(process.pid))
            first = spent if first is None and any(here.iterdir()) else first
            time.sleep(PAUSE)
        said = process.communicate(timeout=PAUSE)[0] if process.poll() is not None else "it did not end"
    finally:
        kill(process)
    if process.returncode not in (0, 3):  # 3: an adaptation was rejected
        raise RuntimeError(f"fewshift {' '.join(words)} ended with {process.returncode}: {said}")
    return Effort(spent if first is None else first, spent)


def run_until(words: list[str], here: Path, moment: float) -> bool:
    """Run a command and kill it after so many seconds of processor time; False if it ended before."""
    process = start(words, here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and computed(process.pid) < moment:
            time.sleep(PAUSE)
        return process.poll() is None
    finally:
        kill(process)

"""A process of its own for every task: it can be followed and stopped, and its crash is a sentence.

Processes are forked from a server that has imported everything and computed nothing, so that they start at once and
share no threads with the page.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fewshift.errors import FewshiftError
from fewshift.report.remaining import Remaining
from fewshift.studio.tasks import StudioTask

RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"
POLITE = 5  # how much less urgent than the page a task is
PATIENCE = 5.0  # seconds for a process to end

Hear = Callable[[tuple[Any, ...]], None]

_context = multiprocessing.get_context("forkserver")
PRELOADED = ("fewshift.api", "fewshift.report.pages", "fewshift.studio.adapt_task")


def preload(model: nn.Module) -> None:
    """Let the server of processes import what this network is made of, before the first process starts."""
    modules = {type(layer).__module__ for layer in model.modules()} - {"__main__"}
    _context.set_forkserver_preload([*PRELOADED, *sorted(modules)])


class Job:
    """One task under way, or what became of it."""

    def __init__(self, what: str, task: StudioTask, hear: Hear | None = None, log: Path | None = None) -> None:
        self.what, self.state, self.sentence, self.stage = what, RUNNING, "", ""
        self.result: dict[str, Any] | None = None
        self.remaining = Remaining()
        self._hear, self._log, self._stopped = hear, log, False
        receiver, sender = _context.Pipe(duplex=False)
        self._process = _context.Process(
            target=_run, args=(task, sender, torch.get_num_threads()), daemon=True, name=f"fewshift {what}"
        )
        self._process.start()
        sender.close()
        self._thread = threading.Thread(target=self._listen, args=(receiver,), daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    def stop(self) -> None:
        """End the process, and wait until it has ended."""
        self._stopped = True
        self._process.terminate()
        self._thread.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._thread.join(PATIENCE)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the process has ended, and everything it sent was heard."""
        self._thread.join(seconds)

    def to_json(self) -> dict[str, Any]:
        """How far it is."""
        seconds = self.remaining.seconds if self.state == RUNNING else None
        return {
            "what": self.what,
            "state": self.state,
            "sentence": self.sentence,
            "stage": self.stage,
            "share": round(self.remaining.share, 4),
            "seconds_left": None if seconds is None else round(seconds, 1),
            "has_result": self.result is not None,
        }

    def _listen(self, receiver: Connection) -> None:
        refusal = ""
        with suppress(EOFError, OSError):
            while True:
                message = receiver.recv()
                word, *facts = message
                if word == "refused":
                    refusal = facts[0]
                elif word == "crashed":
                    refusal = f"{self.what} failed ({facts[0]}): {self._written(facts[1])}"
                else:
                    self._take(word, facts)
                    if self._hear is not None:
                        self._hear(message)
        self._process.join()
        self.sentence = refusal
        if self._stopped:
            self.state, self.sentence = STOPPED, f"{self.what} was stopped: nothing was changed"
        elif refusal:
            self.state = FAILED
        elif self._process.exitcode:
            self.state, self.sentence = FAILED, f"{self.what} ended unexpectedly: {_cause(self._process.exitcode)}"
        else:
            self.state = DONE

    def _take(self, word: str, facts: list[Any]) -> None:
        if word == "share":
            self.remaining((facts[0], facts[1]))
        elif word == "stage":
            self.stage = facts[0]
        elif word == "result":
            self.result = facts[0]

    def _written(self, details: str) -> str:
        if self._log is None:
            return "try again"
        with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(details + "\n")
        return f"the details are in {self._log}"


def _cause(code: int) -> str:
    """What an exit code says, and what to do."""
    if code == -signal.SIGKILL:
        return "the system ended it, which happens when memory runs out: close other programs and try again"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"its process ended with {name}: try again"


def _run(task: StudioTask, connection: Connection, threads: int) -> None:
    """The work of the process; whatever goes wrong is sent as a message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the page, which then stops this
    with suppress(OSError):
        os.nice(POLITE)
    torch.set_num_threads(threads)
    try:
        task.work(connection.send)
    except BrokenPipeError:
        pass  # the page is gone, and nobody waits for an answer
    except FewshiftError as error:
        connection.send(("refused", str(error)))
    except Exception as error:  # a crash is a sentence on the page
        line = str(error).splitlines()[0] if str(error) else ""
        connection.send(("crashed", f"{type(error).__name__}: {line}".removesuffix(": "), traceback.format_exc()))

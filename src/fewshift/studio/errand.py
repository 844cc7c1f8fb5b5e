"""A process of its own for every task: it can be followed and stopped, and its crash is a sentence.

Processes are forked from a server that has imported everything and computed nothing, so that they start at once and
share no threads with the page.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fewshift.core._bars import Remaining
from fewshift.errors import FewshiftError
from fewshift.files.appending import append_to, disk_cure
from fewshift.studio.tasks import StudioTask

RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"
PATIENCE = 5.0  # seconds for a process to end
STARTING = 20.0  # seconds that a stop waits for a process that is still starting
UNSTARTED = 'a script that opens the studio needs if __name__ == "__main__":'

Hear = Callable[[tuple[Any, ...]], None]

_context = multiprocessing.get_context("forkserver")
PRELOADED = ("fewshift.studio.politeness", "fewshift.api", "fewshift.report.pages", "fewshift.studio.adapt_task")


def preload(model: nn.Module) -> None:
    """Let the server of processes import what this network is made of, before the first process starts."""
    modules = {type(layer).__module__ for layer in model.modules()} - {"__main__"}
    _context.set_forkserver_preload([*PRELOADED, *sorted(modules)])


class Errand:
    """One task under way, or what became of it."""

    def __init__(self, what: str, task: StudioTask, hear: Hear | None = None, log: Path | None = None) -> None:
        self.what, self.state, self.sentence, self.stage = what, RUNNING, "", ""
        self.result: dict[str, Any] | None = None
        self.remaining = Remaining()
        self._hear, self._log, self._stopped = hear, log, False
        self._process: BaseProcess | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(task,), daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The number of the process, once there is one."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the process, and wait until it has ended."""
        self._stopped = True
        if not self._started.wait(STARTING):
            return  # the process ends as soon as it has started
        if self._process is not None:
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

    def _live(self, task: StudioTask) -> None:
        """Start the process, which takes seconds the first time, and hear it to its end."""
        receiver, sender = _context.Pipe(duplex=False)
        arguments = (task, sender, torch.get_num_threads())
        process = _context.Process(target=_run, args=arguments, daemon=True, name=f"fewshift {self.what}")
        try:
            process.start()
            self._process = process
            if self._stopped:
                process.terminate()
        except (OSError, EOFError, RuntimeError) as error:
            self.state, self.sentence = FAILED, f"{self.what} cannot start ({error}): {UNSTARTED}"
            return
        finally:
            sender.close()
            self._started.set()
        self._listen(receiver, process)

    def _listen(self, receiver: Connection, process: BaseProcess) -> None:
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
        process.join()
        if self._stopped:
            self.state, self.sentence = STOPPED, f"{self.what} was stopped: nothing was changed"
        elif refusal:
            self.state, self.sentence = FAILED, refusal
        elif process.exitcode:
            self.state, self.sentence = FAILED, f"{self.what} ended unexpectedly: {_cause(process.exitcode)}"
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
        try:
            append_to(self._log, (details + "\n").encode(errors="backslashreplace"))
        except OSError as error:
            return f"the details cannot be written ({error.strerror}): {disk_cure(error, 'try again')}"
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

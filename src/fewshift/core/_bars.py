"""One bar for the whole of a call: in a notebook, in a terminal, or a line now and then where there is neither."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape

NOTEBOOK_PAUSE = 0.1  # seconds between two pictures of the bar
LINE_PAUSE = 5.0  # seconds between two lines
BAR_WIDTH = 20  # letters: in a terminal of 80, there is room for the words
ENOUGH_DONE = 0.01  # of the work, to say how long the rest takes


class Remaining:
    """How much of the work is done, and how long the rest takes if it goes on at the same pace."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._found = 0.0  # done before the clock began
        self._told = self._done = self._then = self._shown = 0.0

    def __call__(self, share: tuple[float, float]) -> None:
        """Hear how much is done, and how much will be after the step at hand."""
        self._told = self._clock()
        if self._began is None:
            self._began, self._found = self._told, share[0]
        self._done, self._then = share

    @property
    def share(self) -> float:
        """The share that is done; within a step, what its pace so far makes likely, but no more than the step."""
        if self._began is None or self._told == self._began:
            return self._done
        pace = (self._done - self._found) / (self._told - self._began)
        return min(self._done + pace * (self._clock() - self._told), self._then)

    @property
    def seconds(self) -> float | None:
        """The time that is left; None while too little is done to tell."""
        share = self.share
        if self._began is None or share - self._found < ENOUGH_DONE:
            return None
        return (self._clock() - self._began) * (1 - share) / (share - self._found)

    def __str__(self) -> str:
        seconds = self.seconds
        self._shown = max(self._shown, self.share)  # a step that began slowly takes nothing back
        left = "time left not known yet" if seconds is None else f"about {_duration(seconds)} left"
        return f"{int(100 * self._shown)} %, {left}"


class Bar:
    """What a bar shows: how much of the whole is done, and the stage at hand."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.remaining = Remaining()
        self.stage = ""
        self.changed: Callable[[], None] = lambda: None

    def hear(self, what: str, done: int, total: int) -> None:
        """A stage is so far."""
        self.stage = f"{what}, {done} of {total}"
        self.changed()

    def watch(self, share: tuple[float, float]) -> None:
        """The whole is so far."""
        self.remaining(share)
        self.changed()

    def count(self, what: str, done: int, total: int, note: str = "") -> None:
        """The whole is `done` of `total`; a note stands beside it."""
        self.stage = ", ".join(filter(None, (f"{done} of {total} {what}", note)))
        self.watch((done / total, min(1.0, (done + 1) / total)) if total else (1.0, 1.0))


@contextmanager
def shown(doing: str, *, line_pause: float | None = None, staged_lines: bool = False) -> Iterator[Bar]:
    """A bar where the user looks, until the block ends; `staged_lines` name the stage too."""
    bar = Bar(doing)
    if _in_notebook():
        showing = _in_cell(bar)
    elif sys.stderr.isatty():
        showing = _in_terminal(bar)
    else:
        showing = _as_lines(bar, LINE_PAUSE if line_pause is None else line_pause, staged_lines)
    with showing:
        yield bar


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def _in_cell(bar: Bar) -> Iterator[None]:
    from IPython.display import HTML, display  # type: ignore[import-not-found]

    handle = display(HTML(""), display_id=True)
    last = -NOTEBOOK_PAUSE

    def draw() -> None:
        nonlocal last
        if time.monotonic() - last >= NOTEBOOK_PAUSE:
            last = time.monotonic()
            words = escape(f"{bar.doing}: {bar.remaining}  {bar.stage}")
            handle.update(HTML(f'<div><progress max="1" value="{bar.remaining.share:.3f}"></progress> {words}</div>'))

    bar.changed = draw
    try:
        yield
    finally:
        handle.update(HTML(""))


@contextmanager
def _in_terminal(bar: Bar) -> Iterator[None]:
    """A bar that is drawn anew several times a second, and disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task
    from rich.table import Column
    from rich.text import Text

    class Words(ProgressColumn):
        max_refresh = None

        def render(self, task: Task) -> Text:
            task.completed = max(task.completed, bar.remaining.share)
            return Text(f"{bar.remaining}  {bar.stage}")

    words = Words(table_column=Column(no_wrap=True, overflow="ellipsis"))  # one line, however narrow
    columns = ("{task.description}", BarColumn(bar_width=BAR_WIDTH), words)
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=False) as drawn:
        drawn.add_task(bar.doing, total=1.0)
        yield


@contextmanager
def _as_lines(bar: Bar, pause: float, staged: bool) -> Iterator[None]:
    """A line every few seconds, also while a step takes long."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(pause):
            stage = f", {bar.stage}" if staged and bar.stage else ""
            print(f"{bar.doing}: {bar.remaining}{stage}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"

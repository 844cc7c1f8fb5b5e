"""Bars for progress=True: in a notebook, in a terminal, or as a line now and then where there is neither."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

NOTEBOOK_PAUSE = 0.1  # seconds between two pictures of the bars
LINE_PAUSE = 5.0  # seconds between two lines
LISTENER = Callable[[str, int, int], None]


@contextmanager
def bars() -> Iterator[LISTENER]:
    """A listener that shows what it hears, where the user looks."""
    if _in_notebook():
        with _notebook_bars() as listener:
            yield listener
    elif sys.stderr.isatty():
        with _terminal_bars() as listener:
            yield listener
    else:
        yield _lines()


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def _notebook_bars() -> Iterator[LISTENER]:
    from IPython.display import HTML, display  # type: ignore[import-not-found]

    tasks: dict[str, tuple[int, int]] = {}
    handle = display(HTML(""), display_id=True)
    shown = -NOTEBOOK_PAUSE

    def listen(what: str, done: int, total: int) -> None:
        nonlocal shown
        tasks[what] = done, total
        if done >= total:
            del tasks[what]
        if time.monotonic() - shown >= NOTEBOOK_PAUSE:
            shown = time.monotonic()
            handle.update(HTML("".join(_element(name, *count) for name, count in tasks.items())))

    try:
        yield listen
    finally:
        handle.update(HTML(""))


def _element(what: str, done: int, total: int) -> str:
    return f'<div><progress max="{total}" value="{done}"></progress> {escape(what)}, {done} of {total}</div>'


@contextmanager
def _terminal_bars() -> Iterator[LISTENER]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:

        def listen(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done, total=total)
            if done >= total:
                shown.remove_task(tasks.pop(what))

        yield listen


def _lines() -> LISTENER:
    last = time.monotonic()

    def listen(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_PAUSE:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr)

    return listen

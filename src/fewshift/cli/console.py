"""What commands print, and where they may write."""

from __future__ import annotations

import difflib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import typer

from fewshift.errors import FewshiftError


class MisuseError(FewshiftError):
    """A mistake in the words of a command, noticed before the work begins: exit code 2."""


@contextmanager
def reading_words() -> Iterator[None]:
    """Within the block, a mistake is one of the command's words."""
    try:
        yield
    except FewshiftError as error:
        raise MisuseError(str(error)) from error


def refuse_missing(path: Path) -> None:
    """One sentence for a path that does not exist, with the name beside it that looks most like it."""
    if path.exists():
        return
    folder = path.parent
    if not folder.is_dir():
        raise MisuseError(f"{path} does not exist, nor does the folder {folder}: check the path")
    names = sorted(entry.name for entry in folder.iterdir())
    close = difflib.get_close_matches(path.name, names, 1)
    raise MisuseError(
        f"{path} does not exist: " + (f"did you mean {folder / close[0]}?" if close else "check the path")
    )


def refuse_overwriting(outputs: Sequence[Path | None], inputs: Sequence[Path | None]) -> None:
    """One sentence when a file is named twice, or is read as well; links and other spellings are seen through."""
    taken = {path.resolve() for path in inputs if path is not None}
    for path in (path for path in outputs if path is not None):
        if path.resolve() in taken:
            raise MisuseError(f"{path} is named twice, or is read as well: choose different files")
        taken.add(path.resolve())


def check_outputs(outputs: Sequence[Path | None], inputs: Sequence[Path | None]) -> None:
    """One sentence, before the work begins, when an output cannot be written or would be written over an input."""
    refuse_overwriting(outputs, inputs)
    for path in outputs:
        if path is None:
            continue
        try:
            if path.exists() and not path.is_file():
                raise MisuseError(f"cannot write {path}: it is not an ordinary file: choose another path")
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
        except OSError as error:
            raise MisuseError(
                f"cannot write {path}: {error.strerror}: choose a file in a folder that exists and is writable"
            ) from error


class Tell(Protocol):
    """Hears how far the work is."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total`; a note stands beside the name."""


@contextmanager
def progress_bar() -> Iterator[Tell]:
    """Bars on stderr for work that takes more than a moment; where it is no terminal, a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fewshift.api import told_to

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int, note: str = "") -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total, description=f"{what}, {note}" if note else what)
            if done >= total:
                bar.remove_task(tasks.pop(what))

        with told_to(tell):
            yield tell


class Lines:
    """Progress of long work in a log file: a line now and then, with the time that is left."""

    def __init__(self, every: float = 30.0) -> None:
        self._every = every
        self._began = self._last = time.monotonic()

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Print if it is time."""
        now = time.monotonic()
        if done and now - self._last >= self._every:
            self._last = now
            left = (now - self._began) / done * (total - done)
            beside = f", {note}" if note else ""
            typer.echo(f"{done} of {total} {what}{beside}, about {_duration(left)} left", err=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else "less than a minute"
    )


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on stdout, as wide as it needs to be when it goes into a file."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_facts(title: str, facts: Mapping[str, str]) -> None:
    """A title and one line for each fact on stdout; long values go on below where they began."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not sys.stdout.isatty():
        width = max(map(len, facts))
        typer.echo("\n".join([title, *(f"  {name:{width}}  {value}" for name, value in facts.items())]))
        return
    console = Console()
    console.print(title, style="bold", highlight=False)
    table = Table.grid(padding=(0, 2), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    console.print(table, highlight=False)


def _is_number(text: str) -> bool:
    return text in {"-", "?"} or text.replace(".", "").replace(",", "").replace("-", "").replace("+", "").isdigit()


def number(value: Any) -> str:
    """A common value, or that there is none."""
    return f"{value:.1f}" if isinstance(value, float) else "one per layer"


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(value, indent=1))


def print_written(files: Mapping[str, Path | None]) -> None:
    """One line for each file that was written."""
    for what, file in files.items():
        if file is not None:
            typer.echo(f"{what}: {file} ({file.stat().st_size:,} bytes)")


def one_thread() -> None:
    """Small networks on small images are fastest on one thread."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def leaks_on_stderr() -> Iterator[None]:
    """Within the block, a warning about similar images is one sentence on stderr."""
    from fewshift import LeakWarning

    with warnings.catch_warnings():
        warnings.simplefilter("always", LeakWarning)
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, LeakWarning):
                typer.echo(f"warning: {message}", err=True)
            else:
                before(message, category, *where, **more)

        warnings.showwarning = show
        yield

"""What commands print, and where they may write."""

from __future__ import annotations

import difflib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from fewshift.errors import FewshiftError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from fewshift.api import Listener

DOING = {
    "adapt": "adapting",
    "predict": "predicting",
    "evaluate": "evaluating",
    "export": "exporting",
    "compare": "comparing",
    "shift": "measuring the shift",
    "learning_curve": "measuring the learning curve",
    "demo": "adapting",
    "train": "training",
    "bench": "running cells",
}
running: ContextVar[str] = ContextVar("fewshift_command", default="")  # the name of the command
SPACES = "\n\t\xa0"  # which are printed as they are
LINE_PAUSE = 30.0  # seconds between two lines of a command that takes hours


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
    if path.is_symlink():
        raise MisuseError(f"{path} is a link to {path.readlink()}, which does not exist: mend the link")
    if not folder.is_dir():
        raise MisuseError(f"{path} does not exist, nor does the folder {folder}: check the path")
    names = sorted(entry.name for entry in folder.iterdir())
    close = difflib.get_close_matches(path.name, names, 1)
    raise MisuseError(
        f"{path} does not exist: " + (f"did you mean {folder / close[0]}?" if close else "check the path")
    )


def refuse_overwriting(outputs: Sequence[Path | None], inputs: Sequence[Path | None]) -> None:
    """One sentence when a file is named twice, or is read as well; links and other spellings are seen through.

    Of a folder that is read, its images are.
    """
    from fewshift.api import looks_like_an_image

    taken = {path.resolve() for path in inputs if path is not None}
    for path in (path for path in outputs if path is not None):
        within = looks_like_an_image(path) and not taken.isdisjoint(path.resolve().parents)
        if path.resolve() in taken or within:
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
def progress_bar() -> Iterator[Listener]:
    """One bar on stderr for the whole command: stages tell how far it is, as they are planned."""
    from fewshift.api import told_to

    with told_to(True, _doing()) as tell:
        assert tell is not None  # a bar listens
        yield tell


def counting_bar() -> AbstractContextManager[Tell]:
    """A bar for a command that counts its steps itself, for hours: lines in a log are rarer, and say more."""
    from fewshift.api import counted

    return counted(_doing(), LINE_PAUSE)


def _doing() -> str:
    return DOING.get(running.get(), "working")


def say(text: object = "", *, err: bool = False) -> None:
    """Lines on stdout or stderr. Names come from files that anybody made: they do not command the terminal."""
    typer.echo(printable(str(text), SPACES), err=err)


def _console() -> Console:
    """Where tables are printed: words are those of users, so [brackets] and :colons: mean nothing."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on stdout, as wide as it needs to be when it goes into a file."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = _console()
    console.print(printable(title, SPACES), style="bold", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(printable(column, SPACES), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(printable(cell, SPACES) for cell in row))
    console.print(table)


def print_facts(title: str, facts: Mapping[str, str]) -> None:
    """A title and one line for each fact on stdout; long values go on below where they began."""
    from rich.table import Table
    from rich.text import Text

    if not sys.stdout.isatty():
        width = max(map(len, facts))
        say("\n".join([title, *(f"  {name:{width}}  {value}" for name, value in facts.items())]))
        return
    console = _console()
    console.print(printable(title, SPACES), style="bold", highlight=False)
    table = Table.grid(padding=(0, 2), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(printable(name, SPACES), Text(printable(value, SPACES)))
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
            say(f"{what}: {file} ({file.stat().st_size:,} bytes)")


def print_left_out(*sources: Path | str | None, warned: bool = False) -> None:
    """A line on stderr for each folder or list with files that are not read, or images that have no label.

    `warned` if a warning names the images that cannot be read: the line is about the other files then.
    """
    import fewshift
    from fewshift.report.left_out import not_warned_of, passed_over

    for source in (source for source in sources if source is not None and Path(source).exists()):
        files = fewshift.left_out(source)
        files = not_warned_of(files) if warned and files is not None else files
        if files is not None:
            say(f"left out of {source}: {passed_over(files)}", err=True)


def use_threads(count: int) -> None:
    """Let PyTorch compute with so many threads."""
    import torch

    torch.set_num_threads(count)


def one_thread() -> None:
    """Small networks on small images are fastest on one thread."""
    use_threads(1)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Within the block, a warning of ours is one sentence on stderr."""
    from fewshift import CautionWarning, LeakWarning

    with warnings.catch_warnings():
        warnings.simplefilter("always", LeakWarning)
        warnings.simplefilter("always", CautionWarning)
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, (LeakWarning, CautionWarning)):
                say(f"warning: {message}", err=True)
            else:
                before(message, category, *where, **more)

        warnings.showwarning = show
        yield

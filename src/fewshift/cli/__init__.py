"""The command line. Results go to stdout, progress to stderr; heavy imports happen inside the commands."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from importlib import import_module

import typer

from fewshift.cli.console import MisuseError
from fewshift.cli.options import app
from fewshift.errors import NO_ROOM, FewshiftError, printable

__all__ = ["app", "main"]

COMMANDS = (  # in the order in which help lists them
    "adapt",
    "predict",
    "evaluate",
    "shift",
    "show",
    "studio",
    "sites",
    "merge",
    "export",
    "demo",
    "inspect_",
    "compare",
    "learning_curve",
    "list",
    "card",
    "train",
    "bench",
    "report",
)
for command in COMMANDS:
    import_module(f"fewshift.cli.{command}")  # which registers it


LONGEST_SHOWN = 200  # letters of a path in a sentence


def main() -> None:
    """The entry point: a mistake is one sentence on stderr; exit code 2 if the command itself is wrong, otherwise 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may hold bytes that are no text
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here a full disk is still a sentence
    except FewshiftError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, MisuseError) else 1)
    except OSError as error:
        if error.errno not in NO_ROOM:
            if error.filename is None:
                raise
            name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
            shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..."
            typer.echo(printable(f"error: {shown}: {error.strerror}: check the path and who may use it"), err=True)
            sys.exit(1)
        what = "the output" if error.filename is None else error.filename
        typer.echo(f"error: cannot write {what}: {error.strerror}: free some space", err=True)
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it is not tried again
        sys.exit(1)

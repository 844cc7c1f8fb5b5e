"""The command line. Results go to stdout, progress to stderr; heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from fewshift.cli.console import MisuseError
from fewshift.cli.options import app
from fewshift.errors import FewshiftError

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


def main() -> None:
    """The entry point: a mistake is one sentence on stderr; exit code 2 if the command itself is wrong, otherwise 1."""
    try:
        app()
    except FewshiftError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, MisuseError) else 1)

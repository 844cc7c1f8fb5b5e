"""The command line. Results go to stdout, progress to stderr; heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from fewshift.cli.options import app
from fewshift.errors import FewshiftError

__all__ = ["app", "main"]

COMMANDS = (  # in the order in which help lists them
    "demo",
    "inspect_",
    "adapt",
    "predict",
    "evaluate",
    "compare",
    "shift",
    "learning_curve",
    "merge",
    "card",
    "train",
    "bench",
    "report",
    "list",
)
for command in COMMANDS:
    import_module(f"fewshift.cli.{command}")  # which registers it


def main() -> None:
    """The entry point: a user's mistake is one sentence on stderr and exit code 1."""
    try:
        app()
    except FewshiftError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)

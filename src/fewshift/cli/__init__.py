"""The command line. Results go to stdout, progress to stderr; heavy imports happen inside the commands."""

from __future__ import annotations

import sys

import typer

from fewshift.cli import comparison, curve, networks, sweeps, train, trust
from fewshift.cli.app import app
from fewshift.errors import FewshiftError

__all__ = ["app", "comparison", "curve", "main", "networks", "sweeps", "train", "trust"]


def main() -> None:
    """The entry point: a user's mistake is one sentence on stderr and exit code 1."""
    try:
        app()
    except FewshiftError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)

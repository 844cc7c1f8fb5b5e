"""`fewshift list`: what there is to choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fewshift.cli.console import print_json, print_table, say
from fewshift.cli.options import CLOSER, Json, command

COLUMNS = {  # of the tables on a terminal; --json has everything
    "methods": ("name", "looks at", "returns", "paper", "settings"),
    "algorithms": ("name", "what it does", "paper", "settings"),
    "recipes": ("name", "dataset", "settings"),
    "datasets": ("name", "title", "domains", "classes", "images", "metric", "where"),
    "grids": ("name", "title", "cells"),
}
NOTES = {
    "recipes": " (--json has all settings, not only the unusual ones)",
    "datasets": " (--json has splits, recipes and licences too)",
}


@command(
    "list",
    panel=CLOSER,
    examples="""
    fewshift list methods
    fewshift list models --filter resnet18
    """,
)
def list_(
    what: Annotated[
        Literal["methods", "models", "datasets", "grids", "algorithms", "recipes"],
        typer.Argument(show_choices=False, help="methods, models, datasets, grids, algorithms or recipes."),
    ],
    contains: Annotated[str, typer.Option("--filter", help="Only names that contain this.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Folder of grid files; the package's own by default.")] = None,
    as_json: Json = False,
) -> None:
    """List what there is to choose from."""
    from fewshift.lab.bench.choices import choices, unusual

    rows = choices(what, contains, folder)
    if as_json:
        print_json({what: rows})
    elif what == "models":
        say("\n".join(row["name"] for row in rows))
    else:
        shown = [unusual(row) for row in rows] if what == "recipes" else rows
        columns = list(COLUMNS[what]) if rows else []
        print_table(f"{what}{NOTES.get(what, '')}", columns, [[_text(row[name]) for name in columns] for row in shown])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "-"
    return ", ".join(value) if isinstance(value, list) else str(value)

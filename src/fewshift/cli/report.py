"""`fewshift report`: tables and a page from the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import print_json, print_table
from fewshift.cli.options import Json, command


@command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/smoke.")],
    as_json: Json = False,
) -> None:
    """Print the tables of a run. Write them as Markdown, CSV and LaTeX, and a page with figures, into its folder."""
    from fewshift.lab.bench.runs import report_run

    made = report_run(run)
    if made.unreadable:
        typer.echo(f"{run} has {made.unreadable} lines that are no records: they were skipped", err=True)
    if as_json:
        print_json(made.plain())
        return
    for grid in made.grids:
        if grid.table is None:
            rows = [[label, f"{before:.2f}", f"{after:.2f}"] for label, before, after in grid.gaps]
            title = f"{grid.title}: distance within a class, in spreads"
            print_table(title, ["comparison", "before", "after"], rows)
        for texts in grid.texts().values():
            typer.echo(texts["md"])
        if grid.counts["failed"] or grid.counts["missing"]:
            counts = ", ".join(f"{count} {state}" for state, count in grid.counts.items())
            typer.echo(f"{grid.name}: {counts}", err=True)
    if made.together:
        typer.echo(made.texts()["judged"]["md"])
    typer.echo(f"tables: {run / 'tables'}, page: {made.page}")

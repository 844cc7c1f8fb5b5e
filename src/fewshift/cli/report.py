"""`fewshift report`: tables and a page from the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import print_json, print_table
from fewshift.cli.options import RESEARCH, Json, command


@command(
    panel=RESEARCH,
    examples="""
    fewshift report runs/smoke
    """,
)
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/smoke.")],
    as_json: Json = False,
) -> None:
    """Print the tables of a run. Write them as Markdown, CSV and LaTeX, and a page with figures, into its folder."""
    from fewshift.lab.bench.runs import grid_texts, report_run

    made = report_run(run)
    if made.run.unreadable:
        typer.echo(f"{run} has {made.run.unreadable} lines that are no records: they were skipped", err=True)
    if as_json:
        print_json(made.plain())
        return
    for grid in made.run.sections:
        if grid.table is None:
            rows = [[label, f"{before:.2f}", f"{after:.2f}"] for label, before, after in grid.gaps]
            title = f"{grid.title}: distance within a class, in spreads"
            print_table(title, ["comparison", "before", "after"], rows)
        for texts in grid_texts(grid).values():
            typer.echo(texts["md"])
        if grid.done < grid.cells:
            typer.echo(f"{grid.name}: {grid.done} done, {grid.failed} failed, {grid.missing} missing", err=True)
    if made.run.trials:
        typer.echo(made.texts()["judged"]["md"])
    typer.echo(f"tables: {run / 'tables'}, page: {made.page}")

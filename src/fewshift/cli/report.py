"""`fewshift report`: tables and pages from the records of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewshift.cli.console import print_json, print_table, say
from fewshift.cli.options import RESEARCH, Json, command

if TYPE_CHECKING:
    from fewshift.lab.bench.runs import RunReport


@command(
    panel=RESEARCH,
    examples="""
    fewshift report runs/smoke
    fewshift report runs/pacs runs/trust --docs docs/results
    """,
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, such as runs/smoke.")],
    docs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of documentation: write a Markdown page for each table and figures beside the paper's curves; "
            "what was written by hand into its pages is kept."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the tables of runs. Write them as Markdown, CSV and LaTeX, and a page with figures, into their folders."""
    from fewshift.lab.bench.result_docs import write_docs
    from fewshift.lab.bench.runs import report_run

    reports = {run: report_run(run) for run in runs}
    written = None if docs is None else write_docs(runs, docs)
    for run, made in reports.items():
        if made.run.unreadable:
            say(f"{run} has {made.run.unreadable} lines that are no records: they were skipped", err=True)
        if not as_json:
            _print_run(run, made)
    files = {} if written is None else {"pages": written.pages, "figures": written.figures}
    if as_json:
        paths_by_kind: dict[str, Any] = {what: list(map(str, paths)) for what, paths in files.items()}
        plain = [made.plain() for made in reports.values()]
        print_json((plain[0] if len(plain) == 1 else {"runs": plain}) | paths_by_kind)
    for paths in () if as_json else files.values():
        for path in paths:
            say(f"wrote {path}")


def _print_run(run: Path, made: RunReport) -> None:
    from fewshift.lab.bench.runs import grid_texts

    for grid in made.run.sections:
        if grid.table is None:
            rows = [[label, f"{before:.2f}", f"{after:.2f}"] for label, before, after in grid.gaps]
            title = f"{grid.title}: distance within a class, in spreads"
            print_table(title, ["comparison", "before", "after"], rows)
        for texts in grid_texts(grid).values():
            say(texts["md"])
        if grid.done < grid.cells:
            say(f"{grid.name}: {grid.done} done, {grid.failed} failed, {grid.missing} missing", err=True)
    if made.run.trials:
        say(made.texts()["judged"]["md"])
    say(f"tables: {run / 'tables'}, page: {made.page}")

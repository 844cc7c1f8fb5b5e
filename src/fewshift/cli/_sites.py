"""`fewshift adapt --sites`: many places, one table and one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fewshift.cli.console import (
    MisuseError,
    check_outputs,
    counting_bar,
    print_json,
    print_table,
    print_written,
    say,
    warnings_on_stderr,
)
from fewshift.cli.options import NetworkOptions

if TYPE_CHECKING:
    from fewshift import Fleet

PAGE = "report.html"  # in the folder of deltas
SOME_FAILED, SOME_REJECTED = 1, 3  # exit codes


def adapt_to_sites(
    network: NetworkOptions, sites: Path, out: Path, report: Path | None, *, as_json: bool, **options: Any
) -> None:
    """Adapt to every place, print the table and write the page; the exit code tells what became of them."""
    import fewshift

    if out.resolve().is_relative_to(sites.resolve()):
        raise MisuseError(f"{out} lies among the places: choose another --out")
    check_outputs([report], network.files)
    model = network.load()
    so_far = (0, 0)
    with counting_bar() as tell, warnings_on_stderr():

        def show(what: str, done: int, total: int) -> None:
            nonlocal so_far
            so_far = done, total
            tell(what, done, total)

        steps, names = network.steps_of(model), network.names
        try:
            fleet = fewshift.adapt_sites(model, sites, out, preprocess=steps, classes=names, progress=show, **options)
        except KeyboardInterrupt:
            say(f"stopped after {so_far[0]} of {so_far[1]} places: run it again to continue", err=True)
            raise
    page = fleet.report(report or out / PAGE)
    if as_json:
        print_json(fleet.to_json() | {"report": str(page)})
    else:
        _print(fleet, page)
    if fleet.failed:
        raise typer.Exit(SOME_FAILED)
    if fleet.rejected:
        raise typer.Exit(SOME_REJECTED)


def _print(fleet: Fleet, page: Path) -> None:
    rows = fleet.table()
    print_table(f"{fleet.title}: {fleet.words}", list(rows[0]), [list(row.values()) for row in rows])
    left = len(fleet.rows) - fleet.fresh
    if left:
        say(f"{left} of {len(fleet.rows)} were done already: network, options and images are the same")
    say(f"deltas: {fleet.folder}")
    print_written({"report": page})

"""`fewshift bench`: run grids of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import counting_bar, one_thread, print_json, say
from fewshift.cli.options import RESEARCH, Json, command


@command(
    panel=RESEARCH,
    examples="""
    fewshift bench smoke
    fewshift bench few_shot_pacs --data-root data/ -w networks/ -j 2
    """,
)
def bench(
    names: Annotated[list[str], typer.Argument(metavar="GRIDS...", help="Names (see `fewshift list grids`) or files.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME of the first grid by default.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; FEWSHIFT_DATA by default.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Folder of the source networks, SOURCE.safetensors each.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
    engine: Annotated[str, typer.Option(help="local, or ray for a Ray cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, or auto; a local one is started by default.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="float32 or bfloat16: what networks compute in, instead of the grids' own. bfloat16 is two to four "
            "times as fast on processors that have it, and slower on others."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the cells of grids that have no result yet. Run it again to continue where it stopped."""
    one_thread()
    from fewshift.lab.bench.runs import run_grids

    so_far = (0, 0)
    with counting_bar() as tell:

        def show(done: int, total: int, failed: int) -> None:
            nonlocal so_far
            so_far = done, total
            tell("cells", done, total, f"{failed} failed")

        try:
            folders = {"data_root": data_root, "weights": weights}
            summary = run_grids(
                names, out, **folders, workers=workers, engine=engine, address=address, precision=precision, tell=show
            )
        except KeyboardInterrupt:
            say(f"stopped after {so_far[0]} of {so_far[1]} cells: run it again to continue", err=True)
            raise
    done = summary.cells - summary.missing
    if as_json:
        print_json(summary.plain())
    else:
        say(f"{done} of {summary.cells} cells have a result, {summary.run} were run now: {summary.folder}")
        if not summary.missing:
            say(f"see it: fewshift report {summary.folder}")
    for sentence in sorted(set(summary.errors)):
        times = summary.errors.count(sentence)
        say(f"failed: {sentence}" + (f" ({times} cells)" if times > 1 else ""), err=True)
    if summary.lost:
        say(f"{summary.lost} cells were run, but {summary.folder} lost their results: run it again", err=True)
    elsewhere = summary.missing - len(summary.errors) - summary.lost
    if elsewhere > 0:
        say(f"{elsewhere} cells have no result: another process claimed them", err=True)
    if summary.unreadable:
        say(f"{summary.folder} has {summary.unreadable} lines that are no records: they were skipped", err=True)
    if summary.missing:
        raise typer.Exit(1)

"""The command that compares methods on the same held-out images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewshift.cli.app import LABELLED, Classes, Crop, Json, Mean, Model, Resize, Std, Weights, app
from fewshift.cli.console import check_outputs, print_json, print_table, progress_bar
from fewshift.cli.loading import load_network, read_support, steps_of

if TYPE_CHECKING:
    from fewshift.trust.comparison import Comparison


@app.command()
def compare(
    support: Annotated[Path, typer.Option(help=LABELLED)],
    unlabelled: Annotated[Path | None, typer.Option(help="A folder of images without labels.")] = None,
    model: Model = None,
    weights: Weights = None,
    methods: Annotated[
        str, typer.Option(help="Names separated by commas, see `fewshift list methods`.")
    ] = "source,adabn,lp-ft,lccs",
    select: Annotated[
        str | None, typer.Option(help="best (least held-out cross-entropy), or clear (only if clearly a gain).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
    shots: Annotated[
        int | None,
        typer.Option(min=1, help="Use this many images per class (with pixel labels: in all), drawn with --seed."),
    ] = None,
    validate: Annotated[
        str, typer.Option(help="Where the evidence comes from: cv, loo, or a folder of other labelled images.")
    ] = "cv",
    head: Annotated[str | None, typer.Option(help="The name of the last linear layer, if it is not found.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Several methods on the same held-out images: paired gains over the source network, with intervals."""
    import fewshift
    from fewshift.api import method_of

    names = [it.strip() for it in methods.split(",") if it.strip()]
    for name in names:
        method_of(name)  # a mistake is told before anything is read
    check_outputs([report], [weights])
    loaded = load_network(model, weights, classes, resize, crop, mean, std)
    labelled = read_support(support, loaded, shots, seed)
    with progress_bar() as tell:
        found = fewshift.compare(
            loaded.model,
            labelled,
            names,
            unlabelled=unlabelled,
            preprocess=steps_of(loaded),
            validate=validate,
            select=select,
            head=head,
            seed=seed,
            progress=tell,
        )
    page = None if report is None else found.report(report)
    if as_json:
        print_json(found.to_json() | {"report": None if page is None else str(page)})
        return
    _tell(found)
    if page is not None:
        typer.echo(f"report: {page} ({page.stat().st_size:,} bytes)")


def _tell(found: Comparison) -> None:
    from fewshift.report.prose import counted

    table = found.table()
    print_table(
        f"{counted(len(table), 'method')} on the same images, gains over the source network in points of accuracy",
        list(table[0]),
        [list(row.values()) for row in table],
    )
    for row in found.rows:
        if row.reason:
            typer.echo(f"{row.label} has no numbers: {row.reason}")
    typer.echo(found.words)
    if found.rule:
        typer.echo(f"rule: {found.rule}")
        typer.echo(f"selected: {found.selected or 'nothing'}")
    if found.selected_gain:
        typer.echo(
            f"what selecting is worth, each image answered by what the others select: {found.selected_gain.words}"
        )

"""The command that tells how many labels are worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.app import LABELLED, Classes, Crop, Json, Mean, Model, Resize, Std, Weights, app
from fewshift.cli.console import check_outputs, print_json, print_table, progress_bar
from fewshift.cli.loading import load_network, method_named, read_support, steps_of


@app.command()
def learning_curve(
    support: Annotated[Path, typer.Option(help=LABELLED)],
    labelled: Annotated[
        Path | None, typer.Option(help="Other labelled images to judge by; otherwise some of the support are left out.")
    ] = None,
    unlabelled: Annotated[Path | None, typer.Option(help="A folder of images without labels.")] = None,
    model: Model = None,
    weights: Weights = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
    method: Annotated[str, typer.Option(help="See `fewshift list methods`.")] = "lccs",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the method, such as --set epochs=20.")
    ] = None,
    shots: Annotated[
        str | None,
        typer.Option(
            help="Images per class (with pixel labels: in all) to try, such as 1,2,5; 1, 2, 3, 5, 10 ... by default."
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="How often images are drawn for each of them.")] = 5,
    head: Annotated[str | None, typer.Option(help="The name of the last linear layer, if it is not found.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """How much adaptation gains from 1, 2, 5 ... labelled images per class, and whether more are worth it."""
    import fewshift

    chosen = method_named(method, setting or [])
    wanted = None if shots is None else _counts(shots)
    check_outputs([report], [weights])
    loaded = load_network(model, weights, classes, resize, crop, mean, std)
    given = read_support(support, loaded, None, seed)
    others = None if labelled is None else read_support(labelled, loaded, None, seed)
    with progress_bar() as tell:
        found = fewshift.learning_curve(
            loaded.model,
            given,
            method=chosen,
            shots=wanted,
            draws=draws,
            labelled=others,
            unlabelled=unlabelled,
            preprocess=steps_of(loaded),
            head=head,
            seed=seed,
            progress=tell,
        )
    page = None if report is None else found.report(report)
    if as_json:
        print_json(found.to_json() | {"report": None if page is None else str(page)})
        return
    table = found.table()
    print_table(
        f"gain of {method} in points of accuracy over the source network, which has {found.source:.1f} % right; "
        f"k {found.unit}, {draws} draw{'' if draws == 1 else 's'}, judged by {found.images} images",
        list(table[0]),
        [list(row.values()) for row in table],
    )
    typer.echo(found.words)
    typer.echo(found.luck)
    if page is not None:
        typer.echo(f"report: {page} ({page.stat().st_size:,} bytes)")


def _counts(text: str) -> list[int]:
    try:
        return [int(it) for it in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"'{text}' is no list of numbers: write it like 1,2,5", param_hint="--shots") from None

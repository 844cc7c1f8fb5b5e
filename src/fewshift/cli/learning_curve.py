"""`fewshift learning-curve`: how many labels are worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli import options
from fewshift.cli.console import MisuseError, check_outputs, print_json, print_table, print_written, reading_words, say


@options.command(
    panel=options.CLOSER,
    examples="""
    fewshift learning-curve -m timm:resnet18 -w w.pt -s photos/
    fewshift learning-curve -m timm:resnet18 -w w.pt -s photos/ --shots 1,2,5
    """,
)
def learning_curve(
    support: options.Support,
    network: options.NetworkOptions,
    labelled: Annotated[
        Path | None, typer.Option(help="Other labelled images to judge by; otherwise some of the support are left out.")
    ] = None,
    unlabelled: options.Unlabelled = None,
    report: options.Report = None,
    method: options.MethodName = "auto",
    setting: options.Setting = None,
    shots: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Images per class (with pixel labels: in all) to try, such as 1,2,5; 1, 2, 3, 5, 10 ... by default.",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="How often images are drawn for each of them.")] = 5,
    head: options.Head = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """How much adaptation gains from 1, 2, 5 ... labelled images per class, and whether more are worth it."""
    import fewshift
    from fewshift.api import method_from_words

    with reading_words():
        chosen, ks = method_from_words(method, setting or []), _counts(shots)
    check_outputs([report], network.files)
    with network.opened() as (model, arguments):
        curve = fewshift.learning_curve(
            model, support, method=chosen, shots=ks, draws=draws, labelled=labelled, unlabelled=unlabelled,
            **arguments, head=head, seed=seed,
        )  # fmt: skip
    page = None if report is None else curve.report(report)
    if as_json:
        print_json(curve.to_json() | {"report": page and str(page)})
        return
    table = curve.table()
    print_table(curve.title, list(table[0]), [list(row.values()) for row in table])
    say(curve.words)
    say(curve.luck)
    print_written({"report": page})


def _counts(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise MisuseError(f"--shots {text} is no list of numbers: write it like 1,2,5") from None

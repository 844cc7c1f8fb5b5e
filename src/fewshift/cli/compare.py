"""`fewshift compare`: several methods on the same held-out images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fewshift.cli.console import MisuseError, check_outputs, print_json, print_table, print_written, reading_words, say
from fewshift.cli.options import CLOSER, Head, Json, NetworkOptions, Report, Seed, Shots, Support, Unlabelled, command

if TYPE_CHECKING:
    from fewshift import Comparison


@command(
    panel=CLOSER,
    examples="""
    fewshift compare -m timm:resnet18 -w w.pt -s photos/
    fewshift compare -m timm:resnet18 -w w.pt -s photos/ --methods lp-ft,auto
    fewshift compare -m timm:resnet18 -w w.pt -s photos/ --report page.html
    """,
)
def compare(
    support: Support,
    network: NetworkOptions,
    unlabelled: Unlabelled = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Names separated by commas, see `fewshift list methods`. lp-ft is good too, and takes minutes.",
        ),
    ] = "source,adabn,auto",
    select: Annotated[
        Literal["best", "clear"] | None,
        typer.Option(help="Choose a method: the lowest held-out cross-entropy; clear: only if it is clearly a gain."),
    ] = None,
    report: Report = None,
    shots: Shots = None,
    validate: Annotated[
        str,
        typer.Option(
            metavar="WAY", help="Where the evidence comes from: cv, loo, or a folder of other labelled images."
        ),
    ] = "cv",
    head: Head = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Several methods on the same held-out images: paired gains over the source network, with intervals."""
    import fewshift
    from fewshift.api import method_of

    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise MisuseError("there is nothing to compare: name a method, such as --methods source,auto")
    if validate == "none":
        raise MisuseError("--validate none holds nothing out to compare by: choose cv or loo, or give a folder")
    with reading_words():
        for name in names:
            method_of(name)
    check_outputs([report], network.files)
    with network.opened() as (model, arguments):
        comparison = fewshift.compare(
            model, support, names, unlabelled=unlabelled, shots=shots, **arguments, validate=validate,
            select=select, head=head, seed=seed,
        )  # fmt: skip
    page = None if report is None else comparison.report(report)
    if as_json:
        print_json(comparison.to_json() | {"report": page and str(page)})
        return
    _print(comparison)
    print_written({"report": page})


def _print(comparison: Comparison) -> None:
    from fewshift.report import prose

    table = comparison.table()
    print_table(
        f"{prose.counted(len(table), 'method')} on the same images; gains are points of accuracy over the source",
        list(table[0]),
        [list(row.values()) for row in table],
    )
    for label, reason in comparison.failures.items():
        say(f"{label} has no numbers: {reason}")
    say(comparison.words)
    if comparison.rule:
        say(f"rule: {comparison.rule}")
        say(f"selected: {comparison.selected or 'nothing'}")
    if comparison.selected_gain:
        say(f"what selecting by this rule is worth: {prose.gain(comparison.selected_gain)}")

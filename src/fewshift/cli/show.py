"""`fewshift show`: what a delta is, without its network."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import print_facts, print_json
from fewshift.cli.options import Json, command


@command(
    examples="""
    fewshift show site.safetensors
    fewshift show site.safetensors --json
    """
)
def show(
    delta: Annotated[Path, typer.Argument(help="A delta written by `fewshift adapt --out`.")],
    as_json: Json = False,
) -> None:
    """What a delta is: method, verdict, gain, evidence, classes, network and size.

    The date is that of the file. A delta stores none, so that the same images and seed give the same bytes.
    """
    import fewshift

    change = fewshift.Delta.load(delta)
    stat = delta.stat()
    date = datetime.fromtimestamp(stat.st_mtime).astimezone()
    if as_json:
        print_json(change.to_json() | {"file": str(delta), "file_bytes": stat.st_size, "file_date": date.isoformat()})
        return
    file = {"file": f"{delta}, {stat.st_size:,} bytes", "file's date": f"{date:%Y-%m-%d %H:%M}"}
    print_facts(change.title, change.facts | file)

"""`fewshift sites`: the deltas of a folder, one for each site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import print_json, print_table, say
from fewshift.cli.options import Json, NamedNetwork, command


@command(
    examples="""
    fewshift sites sites/
    fewshift sites sites/ -m timm:resnet18 -w w.safetensors
    """
)
def sites(
    folder: Annotated[Path, typer.Argument(help="A folder with one delta (*.safetensors) for each site.")],
    network: NamedNetwork,
    as_json: Json = False,
) -> None:
    """List a folder of sites: method, k, gain, verdict, date, size, and whether each still fits.

    Without a network, whether deltas fit is left open. The date is that of the file.
    """
    import fewshift

    model = network.built() if network.model or network.weights else None
    listed = fewshift.list_sites(folder, model)
    if as_json:
        print_json(listed.to_json())
        return
    rows = listed.table()
    print_table(listed.title, list(rows[0]), [list(row.values()) for row in rows])
    for name, problem in listed.problems.items():
        say(f"{name}: {problem}")

"""`fewshift inspect`: what can be adapted in a network."""

from __future__ import annotations

from typing import Annotated

import typer

from fewshift.cli.console import print_json, print_table, say
from fewshift.cli.options import CLOSER, NETWORK, Json, NamedNetwork, command


@command(
    "inspect",
    panel=CLOSER,
    examples="""
    fewshift inspect -m timm:resnet18
    fewshift inspect -m timm:resnet18 -w w.pt --size 224 --json
    """,
)
def inspect(
    network: NamedNetwork,
    size: Annotated[
        int | None,
        typer.Option(min=1, max=9000, rich_help_panel=NETWORK, help="Run the network once on an image of this size."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What can be adapted in a network, and what cannot, before any data."""
    import fewshift
    from fewshift.api import known_card

    model = network.built(instead="random")
    card = known_card(model)
    pixels = size or (card.preprocess.crop if card.preprocess else None)
    inspection = fewshift.inspect(model, size=pixels)
    if as_json:
        print_json(inspection.to_json())
        return
    print_table(
        f"{card.arch}: {len(inspection.layers)} BatchNorm layers",
        ["layer", "kind", "channels", "calls"],
        [
            [layer.name, layer.kind, str(layer.channels), "?" if layer.calls is None else str(layer.calls)]
            for layer in inspection.layers
        ],
    )
    if not inspection.layers:
        say("nothing to adapt here: LCCS and the other BatchNorm methods need BatchNorm layers")
    if inspection.skipped:
        rows = [[layer.name, layer.kind, layer.reason] for layer in inspection.skipped]
        print_table("left alone", ["layer", "kind", "why"], rows)
    say(
        f"parameters: {inspection.parameters:,}; in BatchNorm: {inspection.affine_parameters:,}; "
        f"LCCS with n = 1 learns {inspection.coefficients:,}"
    )
    if pixels is not None:
        say(f"head: {inspection.head}" if inspection.head else "head: none found, so classifier=source only")

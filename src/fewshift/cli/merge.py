"""`fewshift merge`: the adapted network as ordinary weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import check_outputs, say
from fewshift.cli.options import NamedNetwork, command


@command(
    examples="""
    fewshift merge -m timm:resnet18 -w w.pt -d site.safetensors \\
        -o new.safetensors
    fewshift merge -m timm:resnet18 -w new.safetensors -d site.safetensors \\
        --revert -o source.safetensors
    """
)
def merge(
    delta: Annotated[Path, typer.Option(help="A delta written by `fewshift adapt --out`.")],
    out: Annotated[Path, typer.Option(help="Write the whole network's weights here: .safetensors, or .pt.")],
    network: NamedNetwork,
    revert: Annotated[bool, typer.Option("--revert", help="From merged weights back to the source's.")] = False,
) -> None:
    """Write the adapted network as ordinary weights, with a card beside them."""
    import fewshift

    card = out.with_suffix(".json") if out.name else out
    check_outputs([out, card] if card != out else [out], [*network.files, delta])
    change = fewshift.Delta.load(delta)
    model = network.built(change.classes)
    fewshift.api.merge(model, change, out, undo=revert)
    say(f"weights: {out} ({out.stat().st_size:,} bytes), card: {card}")

"""`fewshift card`: write down what weights are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import check_outputs, print_json, say
from fewshift.cli.options import CLOSER, Json, NetworkOptions, command
from fewshift.errors import FewshiftError


@dataclass(frozen=True)
class DescribedNetwork(NetworkOptions):
    """The options that name a network and say all about it; its weights come first."""

    weights: Annotated[Path, typer.Argument(help="The weights that the card is about.")] = ...  # type: ignore[assignment]
    interpolation: Annotated[str | None, typer.Option(help="How images are resized, such as bicubic.")] = None
    squeeze: Annotated[
        bool | None, typer.Option("--squeeze/--keep-proportions", help="Whether --resize makes both sides that long.")
    ] = None


@command(
    panel=CLOSER,
    examples="""
    fewshift card w.pth -m timm:resnet18 --classes cat,dog,eel --crop 224
    """,
)
def card(
    network: DescribedNetwork,
    out: Annotated[Path | None, typer.Option(help="Write it here instead of beside the weights.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a card that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the card and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write a card: the network, its classes and its preprocessing, so that the weights alone are enough.

    The weights are loaded first, so a card that is written fits them.
    """
    import fewshift
    from fewshift.api import known_card

    path = out or network.weights.with_suffix(".json")
    if path.suffix != ".json":
        raise FewshiftError(f"a card is a .json file, {path} is not: choose another --out")
    check_outputs([path], [network.weights])
    model = network.load()
    chosen = {"interpolation": network.interpolation, "squeeze": network.squeeze}
    steps = replace(
        network.steps_of(model),
        **{key: value for key, value in chosen.items() if value is not None},  # type: ignore[arg-type]
    )
    described = replace(known_card(model), preprocess=steps)
    content = described.to_json()
    if as_json:
        print_json({"path": str(path), "written": not dry_run, "card": content})
    else:
        print_json(content)
    if "arch" not in content:
        say(f"a card names no code to run, so pass --model {described.arch} beside it", err=True)
    if "classes" not in content:
        say("class names are not known, so folders will be taken in alphabetical order: add --classes", err=True)
    if not dry_run:
        fewshift.write_card(model, path, preprocess=steps, overwrite=overwrite)
        say(f"card: {path}", err=True)

"""`fewshift studio`: a local page on which a person labels, adapts and decides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fewshift.cli.console import MisuseError, say, warnings_on_stderr
from fewshift.cli.options import NetworkOptions, Seed, command


@command(
    examples="""
    fewshift studio -m timm:resnet18 -w w.pt --images photos/
    fewshift studio -w w.safetensors --images photos/ --labels labels.csv
    fewshift studio -w w.safetensors --images photos/ -o camera-7/ --no-browser
    """
)
def studio(
    network: NetworkOptions,
    images: Annotated[
        Path, typer.Option(help="A folder of images from the new place; with pixel labels, images/ and labels/ in it.")
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Labels that exist: class folders, a CSV (path, label), a JSON export of Label Studio, COCO."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where labels and adaptations go. By default photos-studio/ beside photos/."),
    ] = None,
    write: Annotated[
        Literal["csv", "label-studio", "folders", "links"] | None,
        typer.Option(metavar="FORM", help="Open no page: write the labels as csv, label-studio, folders or links."),
    ] = None,
    port: Annotated[int, typer.Option(help="The port of the page; 0 takes any that is free.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open no browser.")] = False,
    size: Annotated[
        Literal["any", "small"] | None,
        typer.Option(help="small changes BatchNorm and the head alone: kilobytes. For the method auto."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Label images, adapt and decide on one page of this machine.

    Nothing leaves the machine. Every label is on disk when the page says so. Ctrl-C ends it.
    """
    from fewshift.studio import open_studio, serve

    if not images.is_dir():
        raise MisuseError(f"{images} is no folder: give the folder of the images")
    model = network.load()
    options: dict[str, Any] = {
        "labels": labels, "out": out, "classes": network.names, "preprocess": network.steps_of(model), "port": port,
        "size": size, "seed": seed, "origin": network.origin(),
    }  # fmt: skip
    with warnings_on_stderr():
        if write is not None:
            say(open_studio(model, images, **options).written(write))
            return
        serve(model, images, browser=not no_browser, tell=_tell, **options)


def _tell(address: str) -> None:
    say(f"studio: {address}")
    say("the page is for this machine alone; Ctrl-C ends it", err=True)

"""`fewshift predict`: a class for every image, or for every pixel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewshift.cli.console import print_json, print_left_out, print_table, refuse_overwriting
from fewshift.cli.options import DeltaFile, Json, NetworkOptions, Stride, Window, command
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from fewshift import ImagePredictions, PixelPredictions


@command()
def predict(
    images: Annotated[Path, typer.Argument(help="A folder of images (or one image).")],
    network: NetworkOptions,
    delta: DeltaFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the CSV here instead of stdout; with pixel labels, a new folder.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With pixel labels: replace the label maps that are in --out.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="With pixel labels: leave out images that this network has labelled there.")
    ] = False,
    window: Window = None,
    stride: Stride = None,
    as_json: Json = False,
) -> None:
    """Predict a class and its probability for every image, as CSV; or a class for every pixel, as images."""
    import fewshift

    refuse_overwriting([out], [*network.files, delta, images])
    if out is not None and out.is_file() and images.is_dir() and out.resolve().is_relative_to(images.resolve()):
        raise FewshiftError(f"{out} lies among the images: choose another --out")
    with network.opened(delta) as (model, arguments):
        result = fewshift.predict(
            model, images, delta=delta, out=out, **arguments, window=window, stride=stride, resume=resume,
            overwrite=overwrite,
        )  # fmt: skip
    print_left_out(images)
    if isinstance(result, fewshift.ImagePredictions):
        _print_classes(result, out, as_json)
    else:
        _print_pixels(result, as_json)


def _print_classes(result: ImagePredictions, out: Path | None, as_json: bool) -> None:
    from fewshift.report.prose import counted

    if out is None:
        sys.stdout.write(json.dumps(result.to_json(), indent=1) + "\n" if as_json else result.to_csv())
        return
    if as_json:
        result.save_json(out)
    typer.echo(f"{counted(len(result.rows), 'prediction')}: {out}")


def _print_pixels(result: PixelPredictions, as_json: bool) -> None:
    from fewshift.report.prose import counted

    if result.crop is not None:
        typer.echo(f"the crop to {result.crop} pixels is left out: every pixel of an image gets a label", err=True)
    if as_json:
        print_json(result.to_json())
    else:
        total = sum(result.pixels.values())
        rows = [[name, f"{count:,}", f"{100 * count / total:.1f}"] for name, count in result.pixels.items() if count]
        print_table(f"{counted(len(result.images), 'image')} labelled", ["class", "pixels", "%"], rows)
        typer.echo(f"label maps: {result.folder / 'labels'}, to look at: {result.folder / 'overlays'}")
    if result.broken:
        images = counted(len(result.images) + len(result.broken), "image")
        raise FewshiftError(
            f"{len(result.broken)} of {images} could not be labelled, the first because {result.broken[0].error}, "
            "then pass --resume"
        )

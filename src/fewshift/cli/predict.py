"""`fewshift predict`: a class for every image, or for every pixel."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewshift.cli.console import MisuseError, print_json, print_left_out, print_table, refuse_overwriting, say
from fewshift.cli.options import DeltaFile, Json, NetworkOptions, Stride, Window, command

if TYPE_CHECKING:
    from fewshift import ImagePredictions, PartPredictions, PixelPredictions

SOME_UNREADABLE = 5  # the exit code when images were left out
INTERRUPTED = 130


@command(
    examples="""
    fewshift predict -m timm:resnet18 -w w.pt -d site.safetensors images/
    fewshift predict -m timm:resnet18 -w w.pt images/ -o classes.csv
    fewshift predict -m timm:resnet18 -w w.pt images/ -o rows/ -j 2
    fewshift predict -m timm:resnet18 -w w.pt images/ -o rows/ --engine ray
    fewshift predict -m smp:unet/resnet34 -w w.safetensors scenes/ -o labelled/
    """
)
def predict(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Folders, images, patterns ('photos/*.jpg'), @files.txt with one path in each line, or - for such a "
            "list on standard input."
        ),
    ],
    network: NetworkOptions,
    delta: DeltaFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the CSV here instead of stdout, row by row. A folder, or a new name without a suffix, gets "
            "Parquet parts; with pixel labels, label maps."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier run has written to --out.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on: leave out images that this network has predicted in --out.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")] = False,
    top: Annotated[int, typer.Option(min=1, help="So many classes for each image, the most probable first.")] = 1,
    all_probabilities: Annotated[
        bool, typer.Option("--all-probabilities", help="A column with the probability of each class.")
    ] = False,
    with_source: Annotated[
        bool, typer.Option("--with-source", help="What the network says without --delta too; takes twice as long.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images that go through the network together.")] = 32,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images while the network works.")] = 0,
    engine: Annotated[
        str, typer.Option(help="local, or ray: a Ray cluster reads and predicts; --out is a folder of Parquet parts.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, or auto; a local one is started by default.")
    ] = None,
    part_size: Annotated[int, typer.Option(min=1, help="Images in each Parquet part: what is resumed.")] = 2000,
    device: Annotated[str | None, typer.Option(help="Where to compute, such as cuda; the CPU by default.")] = None,
    window: Window = None,
    stride: Stride = None,
    as_json: Json = False,
) -> None:
    """Predict a class and its probability for every image, as CSV; or a class for every pixel, as images.

    Images that cannot be read are left out and named at the end: exit code 5.

    Ctrl-C keeps what was written: exit code 130. --resume goes on.
    """
    import fewshift

    _check_out(out, images, [*network.files, delta])
    streamed = sys.stdout if out is None and not as_json else out
    with network.opened(delta) as (model, arguments), _interruptible(out):
        result = fewshift.predict(
            model, images[0] if len(images) == 1 else images, delta=delta, out=streamed, **arguments, window=window,
            stride=stride, resume=resume, overwrite=overwrite, strict=strict, top=top, workers=workers, device=device,
            all_probabilities=all_probabilities, with_source=with_source, batch_size=batch_size, as_json=as_json,
            engine=engine, address=address, part_size=part_size,
        )  # fmt: skip
    print_left_out(*images)
    if isinstance(result, fewshift.ImagePredictions):
        _print_classes(result, out, as_json)
    elif isinstance(result, fewshift.PartPredictions):
        _print_parts(result, as_json)
    else:
        _print_pixels(result, as_json)
    _print_unreadable(result)


def _check_out(out: Path | None, images: Sequence[str], read: Sequence[Path | None]) -> None:
    """One sentence when the table would be written over something that is read."""
    places = [Path(word.removeprefix("@")) for word in images]
    refuse_overwriting([out], [*read, *places])
    if out is not None and out.is_file():
        for folder in (place for place in places if place.is_dir()):
            if out.resolve().is_relative_to(folder.resolve()):
                raise MisuseError(f"{out} lies among the images: choose another --out")


@contextmanager
def _interruptible(out: Path | None) -> Iterator[None]:
    """Within the block, Ctrl-C ends the command in one sentence; what was written stays."""
    try:
        yield
    except KeyboardInterrupt:
        rest = "" if out is None else f": what was predicted is in {out}, and --resume goes on"
        say(f"interrupted{rest}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _print_classes(result: ImagePredictions, out: Path | None, as_json: bool) -> None:
    from fewshift.report.prose import counted

    if out is None:
        if as_json:
            print_json(result.to_json())
        return
    earlier = f", {result.earlier:,} were there" if result.earlier else ""
    say(f"{counted(len(result.rows), 'prediction')}{earlier}: {out}")


def _print_parts(result: PartPredictions, as_json: bool) -> None:
    from fewshift.report.prose import counted

    if as_json:
        print_json(result.to_json())
        return
    earlier = f", {result.earlier:,} were there" if result.earlier else ""
    files = counted(result.parts, "Parquet file")
    say(f"{counted(result.predicted, 'prediction')}{earlier}, in {files}: {result.folder}")


def _print_pixels(result: PixelPredictions, as_json: bool) -> None:
    from fewshift.report.prose import counted

    if result.crop is not None:
        say(f"the crop to {result.crop} pixels is left out: every pixel of an image gets a label", err=True)
    if as_json:
        print_json(result.to_json())
        return
    total = sum(result.pixels.values())
    rows = [[name, f"{count:,}", f"{100 * count / total:.1f}"] for name, count in result.pixels.items() if count]
    print_table(f"{counted(len(result.images), 'image')} labelled", ["class", "pixels", "%"], rows)
    say(f"label maps: {result.folder / 'labels'}, to look at: {result.folder / 'overlays'}")


def _print_unreadable(result: ImagePredictions | PixelPredictions | PartPredictions) -> None:
    """Name the images that were left out, and end with an exit code of their own."""
    import fewshift
    from fewshift.report.prose import counted

    if not result.broken:
        return
    count = result.unreadable if isinstance(result, fewshift.PartPredictions) else len(result.broken)
    say(f"{counted(count, 'image')} of {result.asked:,} left out:", err=True)
    for image in result.broken:
        say(f"  {image.error}", err=True)
    if count > len(result.broken):
        say(f"  and {count - len(result.broken):,} more", err=True)
    if isinstance(result, fewshift.PartPredictions):
        say(f"  all of them: {result.folder / '_broken'}", err=True)
    say(f"exit code {SOME_UNREADABLE}: the others are done; --resume adds these once they are mended", err=True)
    raise typer.Exit(SOME_UNREADABLE)

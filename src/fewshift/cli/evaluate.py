"""`fewshift evaluate`: scores on labelled images, before and after adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewshift.cli.console import MisuseError, check_outputs, print_json, print_left_out, print_table, print_written, say
from fewshift.cli.options import LABELLED, DeltaFile, Json, NetworkOptions, Stride, Window, command

if TYPE_CHECKING:
    from fewshift import Evaluation, PixelEvaluation


@command(
    examples="""
    fewshift evaluate -m timm:resnet18 -w w.pt labelled/
    fewshift evaluate -m timm:resnet18 -w w.pt -d site.safetensors labelled/
    """
)
def evaluate(
    labelled: Annotated[Path, typer.Argument(help=LABELLED)],
    network: NetworkOptions,
    delta: DeltaFile = None,
    report: Annotated[
        Path | None, typer.Option(help="With pixel labels and a delta: write a page of the best and worst images here.")
    ] = None,
    support: Annotated[
        Path | None,
        typer.Option(help="The images that the network was adapted to; one of them among LABELLED is an error."),
    ] = None,
    window: Window = None,
    stride: Stride = None,
    as_json: Json = False,
) -> None:
    """Accuracy on labelled images, or IoU on labelled pixels, per class; with a delta, before and after it."""
    import fewshift
    from fewshift.api import known_card
    from fewshift.report.cautions import order_taken

    check_outputs([report], [*network.files, delta])
    if report is not None and delta is None:
        raise MisuseError("a report compares a network before and after adaptation: pass --delta")
    with network.opened(delta) as (model, arguments):
        result = fewshift.evaluate(
            model, labelled, delta=delta, support=support, **arguments, window=window, stride=stride,
        )  # fmt: skip
        named = network.names or known_card(model).classes or (delta and fewshift.Delta.load(delta).classes)
    pixels = isinstance(result, fewshift.PixelEvaluation)
    if not (named or pixels) and (order := order_taken(result.classes)) is not None:
        say(f"note: {order}", err=True)
    origin = {"network": network.name_of(model), "weights": network.weights, "delta": delta}
    origin |= {"images": labelled, "support": support}
    page = None if report is None else _page(result, report, origin)
    print_left_out(labelled)
    if isinstance(result, fewshift.PixelEvaluation):
        _print_pixels(result, page, as_json)
    else:
        _print_images(result, page, as_json)


def _page(result: Evaluation, path: Path, origin: Mapping[str, object]) -> Path:
    import fewshift
    from fewshift.report.pages import accuracy_page, evaluation_page
    from fewshift.report.scenes import changed_most

    if isinstance(result, fewshift.ImageEvaluation):
        return accuracy_page(result, path, origin=origin)
    assert isinstance(result, fewshift.PixelEvaluation)
    return evaluation_page(result, *changed_most(result), path, origin=origin)


def _print_images(result: Evaluation, page: Path | None, as_json: bool) -> None:
    """Print the accuracy of each class, their mean, and that of all images, in percent."""
    import fewshift
    from fewshift.report.prose import interval

    if as_json:
        print_json(result.to_json() | ({"report": str(page)} if page else {}))
        return
    rows = [[name, str(images), *map(_percent, values)] for name, images, values in result.rows]
    rows.append(["mean of classes", str(len(rows)), *map(_percent, result.mean.values())])
    rows.append(["all images", str(sum(result.labels)), *map(_percent, result.accuracy.values())])
    print_table("accuracy in %", ["class", "images", *result.tallies], rows)
    if isinstance(result, fewshift.ImageEvaluation) and (gain := result.gain) is not None:
        say(
            f"{gain.wins} became right, {gain.losses} became wrong: {gain.point:+.1f} points on average over classes, "
            f"{interval(gain)}"
        )
    print_written({"report": page})


def _print_pixels(result: PixelEvaluation, page: Path | None, as_json: bool) -> None:
    """Print the IoU of each class, their mean, and the share of pixels that is right, in percent."""
    from fewshift.report.prose import counted
    from fewshift.report.scenes import counted_at

    if as_json:
        print_json(result.to_json() | {"report": None if page is None else str(page)})
        return
    rows = [[name, f"{pixels:,}", *map(_percent, values)] for name, pixels, values in result.rows]
    rows.append(["mean IoU", "-", *map(_percent, result.mean.values())])
    rows.append(["pixel accuracy", f"{sum(result.labels):,}", *map(_percent, result.accuracy.values())])
    images = counted(len(next(iter(result.images.values()))), "image")
    title = f"IoU in %, {images}{f', {counted_at(result.sizes)}' if result.sizes else ''}"
    print_table(title, ["class", "pixels", *(f"{name} IoU" for name in result.tallies)], rows)
    print_written({"report": page})


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

"""Commands about one network: look at it, adapt it, use it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewshift.cli.adapt import leaks_as_warnings
from fewshift.cli.app import Classes, Crop, DeltaFile, Json, Mean, Model, Resize, Std, Weights, app
from fewshift.cli.console import check_outputs, print_json, print_table
from fewshift.cli.loading import answers_of, load_network, steps_of
from fewshift.cli.scenes import (
    Judged,
    Output,
    View,
    class_names,
    open_scenes,
    predict_scenes,
    print_scores,
)
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from fewshift.cli.loading import Loaded
    from fewshift.images import ImageFolder

LABELLED = "A folder with one folder of labelled images per class; with pixel labels, images/ and labels/."
Window = Annotated[
    int | None,
    typer.Option(min=1, help="With pixel labels: see images through a window of this many preprocessed pixels."),
]
Stride = Annotated[int | None, typer.Option(min=1, help="From window to window; two thirds of it by default.")]


@app.command()
def predict(
    images: Annotated[Path, typer.Argument(help="A folder of images (or one image).")],
    model: Model = None,
    weights: Weights = None,
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
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Predict a class and its probability for every image, as CSV; or a class for every pixel, as images."""
    import csv
    import io

    from fewshift.core._files import whole
    from fewshift.images import image_files
    from fewshift.images.scenes import scene_layout
    from fewshift.report.prose import counted

    loaded = load_network(model, weights, classes, resize, crop, mean, std, delta)
    where = scene_layout(images)
    root = images if where is None or where.images == images.absolute() else where.images  # labels are pictures too
    steps, files, view, output = (
        steps_of(loaded),
        image_files(root),
        View(window, stride),
        Output(out, overwrite, resume),
    )
    shape = view.answer(loaded.model, steps, files)
    if len(shape) == 3:
        output.checked(images)
        predict_scenes(loaded, steps, class_names(loaded, shape), view, root, files, output, as_json)
        return
    view.refuse()
    output.refuse()
    check_outputs([out], [weights, delta])
    rows = []
    for file, scores in zip(files, answers_of(loaded, files), strict=True):
        best = int(scores.argmax())
        name = loaded.classes[best] if loaded.classes else str(best)
        rows.append({"file": str(file), "class": name, "probability": round(float(scores.max()), 6)})
    if as_json:
        text = json.dumps(rows, indent=1) + "\n"
    else:
        table = io.StringIO()
        writer = csv.DictWriter(table, ["file", "class", "probability"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        text = table.getvalue()
    if out is None:
        sys.stdout.write(text)
        return
    with whole(out) as draft:
        draft.write_text(text, encoding="utf-8")
    typer.echo(f"{counted(len(rows), 'prediction')}: {out}")


@app.command()
def evaluate(
    labelled: Annotated[Path, typer.Argument(help=LABELLED)],
    model: Model = None,
    weights: Weights = None,
    delta: DeltaFile = None,
    report: Annotated[
        Path | None, typer.Option(help="With pixel labels and a delta: write a page of the best and worst images here.")
    ] = None,
    support: Annotated[
        Path | None, typer.Option(help="The images it was adapted to: one that is also judged by is an error.")
    ] = None,
    window: Window = None,
    stride: Stride = None,
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Accuracy on labelled images, or IoU on labelled pixels, per class; with a delta, before and after it."""
    from dataclasses import replace

    from fewshift.core.delta import Delta
    from fewshift.images import labelled_folder

    check_outputs([report], [weights, delta])
    if report is not None and delta is None:
        raise FewshiftError("a report compares a network before and after adaptation: pass --delta")
    if support is not None:
        from fewshift.trust.leaks import find_leaks, refuse_leaks

        with leaks_as_warnings():
            refuse_leaks(find_leaks(support, labelled))
    loaded = load_network(model, weights, classes, resize, crop, mean, std, delta)
    networks = {"source": loaded}
    if delta is not None:  # both with the preprocessing and the classes that the delta carries
        networks = {"source": replace(loaded, model=Delta.load(delta).revert(loaded.model)), "adapted": loaded}
    steps, view = steps_of(loaded), View(window, stride)
    if scenes := open_scenes(labelled, loaded, steps, view):
        judged = Judged({name: it.model for name, it in networks.items()}, scenes, view)
        origin = {
            "network": loaded.name,
            "weights": weights,
            "delta": delta,
            "images": labelled,
            "support": support,
        }
        print_scores(judged.scores, None if report is None else judged.page(report, origin), as_json)
        return
    view.refuse()
    if report is not None:
        raise FewshiftError("a report shows labelled pixels, and here are labelled images: leave out --report")
    _print_accuracy(networks, labelled_folder(labelled, steps, loaded.classes), labelled, as_json)


def _print_accuracy(networks: dict[str, Loaded], folder: ImageFolder, root: Path, as_json: bool) -> None:
    """The accuracy of each network on labelled images: of each class, their mean, and of all images, in percent."""
    import torch

    labels = torch.tensor(folder.labels)
    right = {}
    for name, network in networks.items():
        answers = torch.stack(list(answers_of(network, list(folder.files))))
        if answers.shape[1] != len(folder.classes):
            raise FewshiftError(
                f"{root} has {len(folder.classes)} classes and the network {answers.shape[1]} outputs: "
                "name its outputs with --classes, in their order"
            )
        right[name] = answers.argmax(1) == labels
    accuracy = {name: 100 * float(it.double().mean()) for name, it in right.items()}
    present = sorted(set(folder.labels))
    per_class = {
        folder.classes[label]: {name: 100 * float(it[labels == label].double().mean()) for name, it in right.items()}
        for label in present
    }
    if as_json:
        print_json({"images": len(labels), "accuracy": accuracy, "per_class": per_class})
        return
    rows = [
        [name, str(int((labels == label).sum())), *(f"{value:.1f}" for value in per_class[name].values())]
        for label, name in ((label, folder.classes[label]) for label in present)
    ]
    mean_row = [f"{sum(it[name] for it in per_class.values()) / len(per_class):.1f}" for name in networks]
    rows.append(["mean of classes", str(len(present)), *mean_row])
    rows.append(["all images", str(len(labels)), *(f"{accuracy[name]:.1f}" for name in networks)])
    print_table("accuracy in %", ["class", "images", *networks], rows)

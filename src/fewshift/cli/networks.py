"""Commands about one network: look at it, adapt it, use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewshift.cli.app import LABELLED, Classes, Crop, Json, Mean, Model, Resize, Std, Weights, app
from fewshift.cli.console import (
    check_outputs,
    leaks_on_stderr,
    number,
    one_thread,
    print_json,
    print_table,
    progress_bar,
)
from fewshift.cli.loading import load_network, method_named, read_support, steps_of
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from fewshift.api import Adaptation


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("fewshift-demo.html"),
    draws: Annotated[int, typer.Option(min=1, help="How often the support set is drawn.")] = 3,
    everything: Annotated[bool, typer.Option("--all", help="Every method; takes some minutes.")] = False,
    as_json: Json = False,
) -> None:
    """A network trained on MNIST meets digits from Turkish forms: a table and a report in under a minute."""
    one_thread()
    check_outputs([out], [])
    from fewshift.lab.demo import MORE, PLAN, run
    from fewshift.report import demo_page

    with progress_bar():
        found = run(draws, PLAN + MORE if everything else PLAN)
    page = demo_page(found, out)
    if as_json:
        rows = [
            {"method": it.method, "settings": it.settings, "k": it.shots, "accuracies": it.accuracies}
            for it in found.rows
        ]
        print_json({"source_accuracy": found.source_accuracy, "rows": rows, "report": str(page)})
        return
    print_table(
        f"MNIST network on UCI digits: accuracy in % on {found.test_images} images, "
        f"n = {found.draws} draws of the support",
        ["method", "k", "mean", "spread"],
        [
            [
                f"{it.method} ({it.settings})" if it.settings else it.method,
                "-" if it.shots is None else str(it.shots),
                f"{it.mean:.1f}",
                f"{it.spread:.1f}",
            ]
            for it in found.rows
        ],
    )
    typer.echo(f"The same network has {found.source_accuracy:.1f} % on held-out MNIST digits.")
    typer.echo(f"Report: {page} ({found.seconds:.0f} s)")


@app.command()
def inspect(
    model: Model = None,
    weights: Weights = None,
    size: Annotated[
        int | None, typer.Option(min=1, max=9000, help="Run the network once on an image of this size.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What can be adapted in a network, and what cannot, before any data."""
    import torch

    import fewshift
    from fewshift.models import libraries as models

    loaded = models.load(model, weights if weights is not None else "random")
    pixels = size or (loaded.preprocess.crop if loaded.preprocess else None)
    channels = loaded.preprocess.channels if loaded.preprocess else 3
    image = None if pixels is None else torch.zeros(2, channels, pixels, pixels)
    found = fewshift.inspect(loaded.model, image)
    if as_json:
        from dataclasses import asdict

        counts = {"coefficients": found.coefficients, "affine_parameters": found.affine_parameters}
        print_json(asdict(found) | counts)
        return
    print_table(
        f"{loaded.name}: {len(found.layers)} BatchNorm layers",
        ["layer", "kind", "channels", "calls"],
        [[it.name, it.kind, str(it.channels), "?" if it.calls is None else str(it.calls)] for it in found.layers],
    )
    if not found.layers:
        typer.echo("nothing to adapt here: LCCS and the other BatchNorm methods need BatchNorm layers")
    if found.skipped:
        print_table("left alone", ["layer", "kind", "why"], [[it.name, it.kind, it.reason] for it in found.skipped])
    typer.echo(
        f"parameters: {found.parameters:,}; in BatchNorm: {found.affine_parameters:,}; "
        f"LCCS with n = 1 learns {found.coefficients:,}"
    )
    if image is not None:
        typer.echo(f"head: {found.head}" if found.head else "head: none found, so classifier=source only")


@app.command()
def adapt(
    support: Annotated[Path | None, typer.Option(help=LABELLED)] = None,
    unlabelled: Annotated[Path | None, typer.Option(help="A folder of images without labels.")] = None,
    model: Model = None,
    weights: Weights = None,
    out: Annotated[Path | None, typer.Option(help="Write the delta here (kilobytes).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
    method: Annotated[str, typer.Option(help="See `fewshift list methods`.")] = "lccs",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the method, such as --set epochs=20.")
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(min=1, help="Use this many images per class (with pixel labels: in all), drawn with --seed."),
    ] = None,
    validate: Annotated[
        str, typer.Option(help="Where the evidence comes from: cv, loo, none, or a folder of other labelled images.")
    ] = "cv",
    accept: Annotated[
        str, typer.Option(help="not-worse, better, always, or a number of points that the interval has to exceed.")
    ] = "not-worse",
    write_rejected: Annotated[
        bool, typer.Option("--write-rejected", help="Write the delta of a rejected adaptation too.")
    ] = False,
    head: Annotated[str | None, typer.Option(help="The name of the last linear layer, if it is not found.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Fit a network to the place that the support images come from; exit code 3 if the source network is better."""
    import fewshift

    chosen = method_named(method, setting or [])
    if support is None and unlabelled is None:
        raise typer.BadParameter("give --support, --unlabelled or both")
    check_outputs([out, report], [weights])
    if (out or report) and not chosen.plain:
        raise FewshiftError(
            f"{method} returns a {chosen.returns}, of which there is no delta and no report: "
            "leave out --out and --report, or for late-fusion --set scores=logits"
        )
    loaded = load_network(model, weights, classes, resize, crop, mean, std)
    labelled = None if support is None else read_support(support, loaded, shots, seed)
    with progress_bar() as tell, leaks_on_stderr():
        result = fewshift.adapt(
            loaded.model,
            labelled,
            method=chosen if setting else method,
            unlabelled=unlabelled,
            preprocess=steps_of(loaded),
            classes=None if labelled else loaded.classes,
            validate=None if validate == "none" else validate,
            accept=_condition(accept),
            head=head,
            seed=seed,
            progress=tell,
        )
    wanted = out is not None and (result.accepted or write_rejected)
    written = {
        "delta": str(result.candidate_delta.save(out)) if out is not None and wanted else None,
        "report": None if report is None else str(result.report(report, out if wanted else None)),
    }
    if as_json:
        _print_adaptation(result, written)
    else:
        _tell_adaptation(result, written)
    if not result.accepted:
        raise typer.Exit(3)


def _condition(text: str) -> str | float:
    """A word, or a number."""
    try:
        return float(text)
    except ValueError:
        return text


def _print_adaptation(result: Adaptation, written: Mapping[str, str | None]) -> None:
    from dataclasses import asdict

    layers = [{"name": it.name, "skipped": it.skipped, **(it.details or {})} for it in result.layers]
    print_json(
        {
            "accepted": result.accepted,
            "reason": result.reason,
            "gain": None if result.gain is None else asdict(result.gain),
            "facts": result.evidence.facts,
            "calibration": None if result.calibration is None else asdict(result.calibration),
            "method": result.method.name,
            "settings": result.method.settings(),
            "seconds": result.seconds,
            "notes": result.notes,
            "layers": layers,
            **written,
        }
    )


def _tell_adaptation(result: Adaptation, written: Mapping[str, str | None]) -> None:
    from fewshift.report import prose as words

    count = sum(it.skipped is None for it in result.layers)
    typer.echo(f"{result.method.name}: {words.given(result)}, {count} BatchNorm layers, {result.seconds:.1f} s")
    typer.echo(result.reason)
    if result.notes.get("classifier"):
        typer.echo(f"blend v = {number(result.notes['v'])}, classifier: {result.notes['classifier']}")
    if result.calibration is not None and result.calibration.applied:
        typer.echo(result.calibration.words)
    for skipped in (it for it in result.layers if it.skipped):
        typer.echo(f"left alone: {skipped.name} ({skipped.kind}): {skipped.skipped}")
    for what, file in written.items():
        if file:
            typer.echo(f"{what}: {file} ({Path(file).stat().st_size:,} bytes)")


@app.command()
def merge(
    delta: Annotated[Path, typer.Option(help="A delta written by `fewshift adapt --out`.")],
    out: Annotated[Path, typer.Option(help="Write the whole network's weights here (safetensors).")],
    model: Model = None,
    weights: Weights = None,
    revert: Annotated[bool, typer.Option("--revert", help="From merged weights back to the source's.")] = False,
) -> None:
    """Write the adapted network as ordinary weights, with a card beside them."""
    from safetensors.torch import save_model

    from fewshift.core._files import whole
    from fewshift.core.delta import Delta
    from fewshift.models import libraries as models

    card_file = out.with_suffix(".json")
    check_outputs([out, card_file], [weights, delta])
    change = Delta.load(delta)
    loaded = models.load(model, weights, classes=change.classes)
    network = change.revert(loaded.model) if revert else change.apply(loaded.model)
    named = loaded.name.partition(":")[0] in models.LIBRARIES  # a card names architectures, never code to run
    layers = loaded.algorithm and {"name": loaded.algorithm.name, **loaded.algorithm.settings()}
    card = {"arch": loaded.name if named else None, "classes": change.classes, "algorithm": layers}
    card |= change.preprocess or {}
    with whole(out) as draft, whole(card_file) as card_draft:
        save_model(network, str(draft))
        card_draft.write_text(json.dumps({key: value for key, value in card.items() if value is not None}, indent=1))
    typer.echo(f"weights: {out} ({out.stat().st_size:,} bytes), card: {card_file}")

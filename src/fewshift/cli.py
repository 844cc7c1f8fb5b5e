"""The command line. Results go to stdout, progress to stderr; heavy imports happen inside the commands."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from torch import Tensor

    from fewshift.method import Method
    from fewshift.models import Loaded

app = typer.Typer(
    help="Fit a trained network to a new place with a handful of labelled images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option(help="timm:NAME, torchvision:NAME, smp:ARCH/ENCODER or package.module:factory.", show_default=False),
]
Weights = Annotated[
    Path | None, typer.Option(help="A safetensors or weights-only file; a card (.json) beside it is read.")
]
Classes = Annotated[str | None, typer.Option(help="Class names in the network's order, separated by commas.")]
Resize = Annotated[int | None, typer.Option(help="Shorter side, in pixels.")]
Crop = Annotated[int | None, typer.Option(help="Centre crop, in pixels.")]
Mean = Annotated[str | None, typer.Option(help="Per channel, such as 0.485,0.456,0.406.")]
Std = Annotated[str | None, typer.Option(help="Per channel.")]
DeltaFile = Annotated[Path | None, typer.Option(help="A delta written by `fewshift adapt --out`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def main() -> None:
    """The entry point: a user's mistake is one sentence on stderr and exit code 1."""
    try:
        app()
    except FewshiftError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("fewshift-demo.html"),
    draws: Annotated[int, typer.Option(min=1, help="How often the support set is drawn.")] = 3,
    everything: Annotated[bool, typer.Option("--all", help="Every method; takes some minutes.")] = False,
    as_json: Json = False,
) -> None:
    """A network trained on MNIST meets digits from Turkish forms: a table and a report in under a minute."""
    _one_thread()
    _check_outputs([out], [])
    from fewshift.demo import MORE, PLAN, run
    from fewshift.report import demo_page

    with _progress():
        found = run(draws, PLAN + MORE if everything else PLAN)
    page = demo_page(found, out)
    if as_json:
        rows = [
            {"method": it.method, "settings": it.settings, "k": it.shots, "accuracies": it.accuracies}
            for it in found.rows
        ]
        _print_json({"source_accuracy": found.source_accuracy, "rows": rows, "report": str(page)})
        return
    _print_table(
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
    from fewshift import models

    loaded = models.load(model, weights if weights is not None else "random")
    pixels = size or (loaded.preprocess.crop if loaded.preprocess else None)
    channels = loaded.preprocess.channels if loaded.preprocess else 3
    image = None if pixels is None else torch.zeros(2, channels, pixels, pixels)
    found = fewshift.inspect(loaded.model, image)
    if as_json:
        from dataclasses import asdict

        counts = {"coefficients": found.coefficients, "affine_parameters": found.affine_parameters}
        _print_json(asdict(found) | counts)
        return
    _print_table(
        f"{loaded.name}: {len(found.layers)} BatchNorm layers",
        ["layer", "kind", "channels", "calls"],
        [[it.name, it.kind, str(it.channels), "?" if it.calls is None else str(it.calls)] for it in found.layers],
    )
    if not found.layers:
        typer.echo("nothing to adapt here: LCCS and the other BatchNorm methods need BatchNorm layers")
    if found.skipped:
        _print_table("left alone", ["layer", "kind", "why"], [[it.name, it.kind, it.reason] for it in found.skipped])
    typer.echo(
        f"parameters: {found.parameters:,}; in BatchNorm: {found.affine_parameters:,}; "
        f"LCCS with n = 1 learns {found.coefficients:,}"
    )
    if image is not None:
        typer.echo(f"head: {found.head}" if found.head else "head: none found, so classifier=source only")


@app.command()
def adapt(
    support: Annotated[Path | None, typer.Option(help="A folder with one folder of labelled images per class.")] = None,
    unlabelled: Annotated[Path | None, typer.Option(help="A folder of images without labels.")] = None,
    model: Model = None,
    weights: Weights = None,
    out: Annotated[Path | None, typer.Option(help="Write the delta here (kilobytes).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
    method: Annotated[str, typer.Option(help="See `fewshift list methods`.")] = "lccs",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the method, such as --set epochs=20.")
    ] = None,
    shots: Annotated[int | None, typer.Option(min=1, help="Use this many images per class, drawn with --seed.")] = None,
    head: Annotated[str | None, typer.Option(help="The name of the last linear layer, if it is not found.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Fit a network to the place that the support images come from."""
    import fewshift
    from fewshift.data import labelled_folder
    from fewshift.target import Support, draw_support

    chosen = _method(method, setting or [])
    if support is None and unlabelled is None:
        raise typer.BadParameter("give --support, --unlabelled or both")
    _check_outputs([out, report], [weights])
    if (out or report) and not chosen.plain:
        raise FewshiftError(
            f"{method} returns a {chosen.returns}, of which there is no delta and no report: "
            "leave out --out and --report, or for late-fusion --set scores=logits"
        )
    loaded = _load(model, weights, classes, resize, crop, mean, std)
    labelled = None
    if support is not None:
        folder = labelled_folder(support, _preprocess(loaded), loaded.classes)
        if shots is not None:
            folder = folder.subset(draw_support(folder.labels, shots, seed, folder.classes).tolist())
        images, labels = folder.tensors()
        labelled = Support(images, labels, folder.classes)
    with _progress() as tell:
        result = fewshift.adapt(
            loaded.model,
            labelled,
            method=chosen,
            unlabelled=unlabelled,
            preprocess=_preprocess(loaded),
            classes=None if labelled else loaded.classes,
            head=head,
            seed=seed,
            progress=tell,
        )
    written = {
        "delta": None if out is None else str(result.delta.save(out)),
        "report": None if report is None else str(result.report(report)),
    }
    if as_json:
        layers = [{"name": it.name, "skipped": it.skipped, **(it.details or {})} for it in result.layers]
        facts = {"accepted": result.accepted, "reason": result.reason, "method": chosen.name, "seconds": result.seconds}
        _print_json(facts | {"settings": chosen.settings(), "notes": result.notes, "layers": layers} | written)
        return
    from fewshift.report import words

    count = sum(it.skipped is None for it in result.layers)
    typer.echo(
        f"{chosen.name}: {words.given(result)}, {count} BatchNorm layers, {result.seconds:.1f} s; {result.reason}"
    )
    if result.notes.get("classifier"):
        typer.echo(f"blend v = {_number(result.notes['v'])}, classifier: {result.notes['classifier']}")
    for skipped in (it for it in result.layers if it.skipped):
        typer.echo(f"left alone: {skipped.name} ({skipped.kind}): {skipped.skipped}")
    for what, file in written.items():
        if file:
            typer.echo(f"{what}: {file} ({Path(file).stat().st_size:,} bytes)")


@app.command()
def predict(
    images: Annotated[Path, typer.Argument(help="A folder of images (or one image).")],
    model: Model = None,
    weights: Weights = None,
    delta: DeltaFile = None,
    out: Annotated[Path | None, typer.Option(help="Write the CSV here instead of stdout.")] = None,
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Predict a class and its probability for every image, as CSV."""
    import csv
    import io

    from fewshift.data import image_files
    from fewshift.files import whole

    _check_outputs([out], [weights, delta])
    loaded = _load(model, weights, classes, resize, crop, mean, std, delta)
    files = image_files(images)
    rows = []
    for file, scores in zip(files, _answers(loaded, files), strict=True):
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
    typer.echo(f"{len(rows)} predictions: {out}")


@app.command()
def evaluate(
    labelled: Annotated[Path, typer.Argument(help="A folder with one folder of labelled images per class.")],
    model: Model = None,
    weights: Weights = None,
    delta: DeltaFile = None,
    classes: Classes = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Accuracy on labelled images, per class; with a delta, before and after it."""
    from dataclasses import replace

    import torch

    from fewshift.data import labelled_folder
    from fewshift.delta import Delta

    loaded = _load(model, weights, classes, resize, crop, mean, std, delta)
    networks = {"source": loaded}
    if delta is not None:  # both with the preprocessing and the classes that the delta carries
        networks = {"source": replace(loaded, model=Delta.load(delta).revert(loaded.model)), "adapted": loaded}
    folder = labelled_folder(labelled, _preprocess(loaded), loaded.classes)
    labels = torch.tensor(folder.labels)
    right = {}
    for name, network in networks.items():
        scores = torch.stack(list(_answers(network, list(folder.files))))
        if scores.shape[1] != len(folder.classes):
            raise FewshiftError(
                f"{labelled} has {len(folder.classes)} classes and the network {scores.shape[1]} outputs: "
                "name its outputs with --classes, in their order"
            )
        right[name] = scores.argmax(1) == labels
    accuracy = {name: 100 * float(it.double().mean()) for name, it in right.items()}
    present = sorted(set(folder.labels))
    per_class = {
        folder.classes[label]: {name: 100 * float(it[labels == label].double().mean()) for name, it in right.items()}
        for label in present
    }
    if as_json:
        _print_json({"images": len(labels), "accuracy": accuracy, "per_class": per_class})
        return
    rows = [
        [name, str(int((labels == label).sum())), *(f"{value:.1f}" for value in per_class[name].values())]
        for label, name in ((label, folder.classes[label]) for label in present)
    ]
    mean_row = [f"{sum(it[name] for it in per_class.values()) / len(per_class):.1f}" for name in networks]
    rows.append(["mean of classes", str(len(present)), *mean_row])
    rows.append(["all images", str(len(labels)), *(f"{accuracy[name]:.1f}" for name in networks)])
    _print_table("accuracy in %", ["class", "images", *networks], rows)


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

    from fewshift import models
    from fewshift.delta import Delta
    from fewshift.files import whole

    card_file = out.with_suffix(".json")
    _check_outputs([out, card_file], [weights, delta])
    change = Delta.load(delta)
    loaded = models.load(model, weights, classes=change.classes)
    network = change.revert(loaded.model) if revert else change.apply(loaded.model)
    named = loaded.name.partition(":")[0] in models.LIBRARIES  # a card names architectures, never code to run
    card = {"arch": loaded.name if named else None, "classes": change.classes, **(change.preprocess or {})}
    with whole(out) as draft, whole(card_file) as card_draft:
        save_model(network, str(draft))
        card_draft.write_text(json.dumps({key: value for key, value in card.items() if value is not None}, indent=1))
    typer.echo(f"weights: {out} ({out.stat().st_size:,} bytes), card: {card_file}")


@app.command()
def bench(
    grids: Annotated[list[Path], typer.Argument(help="Grid files, such as grids/smoke.toml.")],
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME of the first grid by default.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; FEWSHIFT_DATA otherwise.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A folder of source networks, SOURCE.safetensors each.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
    as_json: Json = False,
) -> None:
    """Run the cells of grids that have no result yet; call it again to go on where it stopped."""
    _one_thread()
    from fewshift.bench.grid import Grid
    from fewshift.bench.record import Records
    from fewshift.bench.sweep import missing, sweep
    from fewshift.bench.workshop import open_workshop

    cells = list({cell.key: cell for grid in grids for cell in Grid.load(grid).cells()}.values())
    folder = out or Path("runs") / grids[0].stem
    records = Records(folder)
    for grid in grids:
        records.keep_grid(grid)
    left = len(missing(cells, records))
    failed: list[str] = []
    with _progress() as tell:
        done = 0

        def hear(record: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            if "error" in record:
                failed.append(record["error"])
            tell(f"cells ({len(failed)} failed)" if failed else "cells", done, left)

        arguments = (None if data_root is None else str(data_root), None if weights is None else str(weights))
        sweep(cells, folder, open_workshop, arguments, workers=workers, tell=hear)
    still = len(missing(cells, records))
    if as_json:
        _print_json({"folder": str(folder), "cells": len(cells), "run": left - still, "failed": len(failed)})
    else:
        typer.echo(f"{len(cells) - still} of {len(cells)} cells done, {left - still} now: {folder}")
    for sentence in sorted(set(failed)):
        typer.echo(f"failed: {sentence}", err=True)
    if still:
        raise typer.Exit(1)


@app.command()
def report(
    grid: Annotated[Path, typer.Argument(help="The grid file.")],
    run: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME by default.")] = None,
) -> None:
    """Print the table of a run, and write it as Markdown, CSV and LaTeX into its folder."""
    from fewshift.bench.grid import Grid
    from fewshift.bench.record import Records
    from fewshift.bench.results import table_of
    from fewshift.files import whole
    from fewshift.report import tables

    folder = run or Path("runs") / grid.stem
    if not (folder / "records.jsonl").is_file():
        raise FewshiftError(f"there are no records in {folder}: run `fewshift bench {grid}` first")
    table = tables.with_average(table_of(Grid.load(grid), Records(folder).read()))
    for name, render in {"md": tables.markdown, "csv": tables.comma_separated, "tex": tables.latex}.items():
        with whole(folder / f"table.{name}") as draft:
            draft.write_text(render(table), encoding="utf-8")
    typer.echo(tables.markdown(table))


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, models or datasets.")],
    contains: Annotated[str, typer.Option("--filter", help="Only names that contain this.")] = "",
    as_json: Json = False,
) -> None:
    """What there is to choose from."""
    if what == "methods":
        from fewshift import catalogue

        rows = [it for it in catalogue.rows() if contains in it["name"]]
        if as_json:
            _print_json(rows)
            return
        columns = ["name", "looks at", "returns", "paper"]
        table = [[*(it[column] for column in columns), catalogue.settings_line(it)] for it in rows]
        _print_table("methods", [*columns, "settings"], table)
    elif what == "models":
        from fewshift import models

        names = [name for name in models.names() if contains in name]
        typer.echo(json.dumps(names) if as_json else "\n".join(names))
    elif what == "datasets":
        from fewshift.data.collections import describe

        found = [it for it in describe() if contains in it["name"]]
        if as_json:
            _print_json(found)
            return
        columns = list(found[0]) if found else []
        _print_table("datasets", columns, [[str(it[column]) for column in columns] for it in found])
    else:
        raise typer.BadParameter(f"'{what}' is unknown: choose methods, models or datasets")


def _load(
    model: str | None,
    weights: Path | None,
    classes: str | None,
    resize: int | None,
    crop: int | None,
    mean: str | None,
    std: str | None,
    delta: Path | None = None,
) -> Loaded:
    """The network with its preprocessing and classes: from the options, the delta, the card, the library."""
    from dataclasses import replace

    from fewshift import models
    from fewshift.data import Preprocess
    from fewshift.delta import Delta

    change = None if delta is None else Delta.load(delta)
    names = None if classes is None else [it.strip() for it in classes.split(",")]
    if names is not None and (not all(names) or len(set(names)) < len(names)):
        raise typer.BadParameter(f"'{classes}' is no list of different names", param_hint="--classes")
    known = names or (change.classes if change else None)
    loaded = models.load(model, weights, classes=known)
    if change is not None:
        stored = Preprocess.from_json(dict(change.preprocess)) if change.preprocess else loaded.preprocess
        loaded = replace(
            loaded,
            model=change.apply(loaded.model, names or loaded.classes),
            classes=change.classes or loaded.classes,
            preprocess=stored,
        )
    given = {
        "resize": resize,
        "crop": crop,
        "mean": _numbers("--mean", mean),
        "std": _numbers("--std", std),
    }
    given = {key: value for key, value in given.items() if value is not None}
    if given:
        base = loaded.preprocess or Preprocess(None, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        loaded = replace(loaded, preprocess=replace(base, **given))  # type: ignore[arg-type]
    return loaded


def _preprocess(loaded: Loaded) -> Any:
    if loaded.preprocess is None:
        raise FewshiftError(f"how {loaded.name} wants its images is not known: pass --resize, --crop, --mean and --std")
    return loaded.preprocess


def _answers(loaded: Loaded, files: list[Path], batch: int = 32) -> Iterator[Tensor]:
    """Class probabilities of one image after another; images are read a batch at a time."""
    import torch

    from fewshift.data import open_image
    from fewshift.network import like, logits_of

    steps, network = _preprocess(loaded), loaded.model.eval()
    with _progress() as tell, torch.no_grad():
        for start in range(0, len(files), batch):
            images = [steps(open_image(file, steps.mode)) for file in files[start : start + batch]]
            same = len({image.shape for image in images}) == 1
            for group in [torch.stack(images)] if same else [image.unsqueeze(0) for image in images]:
                yield from logits_of(network(like(network, group))).float().softmax(1)
            tell("images", min(start + batch, len(files)), len(files))


def _method(name: str, settings: list[str]) -> Method:
    """A method with fields set from words such as epochs=20 or init=none."""
    from dataclasses import fields

    from fewshift.adaptation import method_of

    method = method_of(name)
    known = {it.name for it in fields(method)}
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, word = setting.partition("=")
        if key not in known:
            raise FewshiftError(f"{name} has no setting '{key}': choose one of {', '.join(sorted(known)) or 'none'}")
        try:
            values[key] = json.loads({"none": "null"}.get(word.lower(), word))
        except json.JSONDecodeError:
            values[key] = word
    return type(method)(**values)


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(it) for it in text.split(","))
    except ValueError:
        raise FewshiftError(f"{option} {text} is not a list of numbers: write it like 0.5,0.5,0.5") from None


def _check_outputs(outputs: list[Path | None], inputs: list[Path | None]) -> None:
    """Told before the work begins, not after it: what cannot be written, and what would be written over."""
    taken = {path.absolute() for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        if path.absolute() in taken:
            raise FewshiftError(f"{path} is named twice, or is read as well: choose different files")
        taken.add(path.absolute())
        try:
            if path.exists() and not path.is_file():
                raise FewshiftError(f"cannot write {path}: it is not an ordinary file: choose another path")
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
        except OSError as error:
            raise FewshiftError(
                f"cannot write {path}: {error.strerror}: choose a file in a folder that exists and is writable"
            ) from error


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, for work that takes more than a moment; silent when stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fewshift import progress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        with progress.told_to(tell):
            yield tell


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on stdout, as wide as it needs to be when it goes into a file."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _is_number(text: str) -> bool:
    return text in {"-", "?"} or text.replace(".", "").replace(",", "").replace("-", "").isdigit()


def _number(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "one per layer"


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def _one_thread() -> None:
    """Small networks on small images are fastest on one thread."""
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()

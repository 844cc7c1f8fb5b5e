"""Cards as files: writing one, and the keys in it that are not known."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from fewshift.core._files import whole
from fewshift.errors import FewshiftError
from fewshift.files.parsing import read_json
from fewshift.images.preprocess import Preprocess
from fewshift.models.cards import known_card

WRITTEN = ("arch", "classes", "algorithm", *(step.name for step in fields(Preprocess)))
KEYS = (*WRITTEN, "sources", "recipe", "validation")
NOTES = (  # what `fewshift train` writes down and nothing reads
    "dataset",
    "factory",
    "finished",
    "history",
    "images",
    "initial_weights",
    "kept_epoch",
    "seed",
    "source_validation_accuracy",
    "source_validation_mean_iou",
    "target",
    "versions",
)
OTHER_WORDS = {  # that people and libraries use
    "architecture": "arch",
    "model": "arch",
    "model_name": "arch",
    "network": "arch",
    "id2label": "classes",
    "label_names": "classes",
    "labels": "classes",
    "names": "classes",
    "crop_size": "crop",
    "image_size": "crop",
    "img_size": "crop",
    "input_size": "crop",
    "image_mean": "mean",
    "image_std": "std",
    "resample": "interpolation",
}


def unknown_keys(card: Mapping[str, Any]) -> dict[str, str | None]:
    """The keys of a card that nothing reads, each with the known key that it resembles, if there is one."""
    return {key: _nearest(key) for key in card if key not in KEYS and key not in NOTES}


def write_card(
    model: nn.Module, path: str | Path, *, preprocess: Preprocess | None = None, overwrite: bool = False
) -> Path:
    """Write all that is known about a network from `fewshift.load`, with this preprocessing if it is given.

    Notes in a card that is replaced stay.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FewshiftError(f"{path} is there already: pass --overwrite to replace it, or another --out")
    notes = {key: value for key, value in _content(path).items() if key not in WRITTEN}
    known = known_card(model)
    content = {**replace(known, preprocess=preprocess or known.preprocess).to_json(), **notes}
    with whole(path) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def is_card(path: Path) -> bool:
    """Whether a file is a card, which a new one may replace: it says nothing but what cards say."""
    content = _content(path)
    return bool(content) and set(content) <= {*KEYS, *NOTES}


def _content(path: Path) -> dict[str, Any]:
    """What is in a card that is about to be replaced; nothing if it cannot be read."""
    try:
        content = read_json(path, path, "mend or remove it")
    except FewshiftError:
        return {}
    return content if isinstance(content, dict) else {}


def _nearest(key: str) -> str | None:
    word = key.lower().replace("-", "_")
    near = difflib.get_close_matches(word, KEYS, n=1)
    return OTHER_WORDS.get(word) or (near[0] if near else None)

"""Layers that training algorithms put into networks, by the names that cards have for the algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fewshift.errors import FewshiftError
from fewshift.models.layers.changes import (
    HiddenHead,
    IBNChange,
    ISWChange,
    IterNormChange,
    LayerChange,
    SwitchableWhiteningChange,
)

CHANGES: dict[str, type[LayerChange]] = {
    "erm": LayerChange,
    "mixstyle": LayerChange,
    "csg": HiddenHead,
    "ibn": IBNChange,
    "switchable-whitening": SwitchableWhiteningChange,
    "iternorm": IterNormChange,
    "isw": ISWChange,
}


def change_of(algorithm: Mapping[str, Any] | None) -> LayerChange:
    """The change of layers that goes with a card's `algorithm`; what only training needs is left aside."""
    if algorithm is None:
        return LayerChange()
    name = algorithm["name"]
    if name not in CHANGES:
        raise FewshiftError(f"unknown algorithm {name!r}: use one of {', '.join(CHANGES)}")
    own = [field.name for field in fields(CHANGES[name])]
    return CHANGES[name](**{key: algorithm[key] for key in own if key in algorithm})

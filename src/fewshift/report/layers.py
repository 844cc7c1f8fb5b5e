"""The table of layers: what a method noted about each BatchNorm layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewshift.report.results import Adaptation, LayerReport

ETA, RHO = "\N{GREEK SMALL LETTER ETA}", "\N{GREEK SMALL LETTER RHO}"


@dataclass(frozen=True)
class Column:
    """A column of the table of layers; an empty cell is a fact the method did not note."""

    heading: str
    meaning: str
    cell: Callable[[LayerReport], str]


def columns(result: Adaptation) -> list[Column]:
    """What the method noted about its layers; columns without any entry are left out."""
    start = result.notes.get("v")
    own_start = start if isinstance(start, Mapping) else {}  # a common one stands in the caption
    possible = [
        Column("v", "the blend it started from", lambda layer: _number(own_start.get(layer.name))),
        Column("n", "support vectors, for mean and deviation", lambda layer: _n(_detail(layer, "n"))),
        Column(f"{ETA} source", "weight of the source's mean", lambda layer: _weight(layer, "eta", 0)),
        Column(f"{ETA} support", "of the support's mean", lambda layer: _weight(layer, "eta", 1)),
        Column(f"{RHO} source", "of the source's standard deviation", lambda layer: _weight(layer, "rho", 0)),
        Column(f"{RHO} support", "of the support's", lambda layer: _weight(layer, "rho", 1)),
    ]
    return [column for column in possible if any(column.cell(layer) for layer in result.layers)]


def _detail(layer: LayerReport, key: str) -> Any:
    return (layer.details or {}).get(key)


def _weight(layer: LayerReport, key: str, place: int) -> str:
    weights = _detail(layer, key)
    return _number(weights[place] if weights else None)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _n(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return ""
    mean, std = pair
    return f"{mean}" if mean == std else f"{mean}, {std}"

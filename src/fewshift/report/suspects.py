"""Labels that look wrong: as sentences, and as JSON knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fewshift.report import prose
from fewshift.trust.suspects import Suspect, Suspects

NAMED = 5  # images that a sentence names


def plain(suspect: Suspect) -> dict[str, Any]:
    """Numbers and words."""
    return asdict(suspect) | {"file": None if suspect.file is None else str(suspect.file)}


def looks_wrong(suspects: Suspects) -> str:
    """How many labels look wrong, and where the first are; nothing if there are none."""
    if not suspects:
        return ""
    what = "1 label looks wrong" if len(suspects) == 1 else f"{len(suspects)} labels look wrong"
    return f"{what}: {_named(suspects)}"


def gain_without(suspects: Suspects) -> str:
    """The evidence without the suspects; nothing if there is none."""
    gain = suspects.gain_without
    return "" if gain is None else f"without {'it' if len(suspects) == 1 else 'them'}, {prose.gain(gain)}"


def dropped(suspects: Sequence[Suspect]) -> str:
    """Which images were dropped."""
    label = "label looks" if len(suspects) == 1 else "labels look"
    return f"dropped {prose.counted(len(suspects), 'image')} whose {label} wrong: {_named(suspects)}"


def place(suspect: Suspect) -> str:
    """The file of an image, or its number in the support, counted from 1."""
    return f"image {suspect.position + 1}" if suspect.file is None else str(suspect.file)


def _named(suspects: Sequence[Suspect]) -> str:
    phrases = [
        f"{place(suspect)} ({suspect.label_name}, looks like {suspect.predicted_name}, "
        f"{100 * suspect.predicted_probability:.0f} %)"
        for suspect in suspects[:NAMED]
    ]
    rest = len(suspects) - NAMED
    return ", ".join(phrases) + (f" and {rest} more" if rest > 0 else "")

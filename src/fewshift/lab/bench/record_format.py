"""What the record of a cell may hold: tables and figures are made of it, so a line with anything else is no record."""

from __future__ import annotations

from typing import Any

from fewshift.core.metrics import METRICS
from fewshift.files.shapes import (
    Shape,
    fields,
    is_count,
    is_finite,
    is_flag,
    is_loss,
    is_number,
    is_table,
    is_text,
    list_of,
    or_none,
    table_of,
)

BYTE = 256
LATEST = 2.0**33  # seconds of the clock: the year 2242

SECONDS = fields({"adapt": is_finite, "predict": is_finite})
GAIN = fields({}, {name: or_none(is_finite) for name in ("point", "low", "high")})
ACCURACY = fields(dict.fromkeys(("source", "candidate", "returned"), is_finite))
TRUST = fields({"gain": or_none(GAIN), "accepted": is_flag, "accuracy": ACCURACY}, {"strength": or_none(is_loss)})
NOTES = fields({}, {"grid": or_none(list_of(fields({"v": is_finite, "loss": is_loss})))})
LAYER = fields({}, {name: list_of(is_finite) for name in ("eta", "rho")})
PICTURE = fields({"answer": is_text}, dict.fromkeys(("image", "labels", "name"), is_text))
COLOUR = list_of(lambda value: is_count(value) and value < BYTE, least=3, most=3)
POINTS = list_of(list_of(list_of(is_finite, least=2, most=2), least=1), least=2, most=2)  # of both samples

KNOWN: dict[str, Shape] = {  # every part of a result may be missing
    "classes": list_of(is_text),
    "image_iou": table_of(or_none(is_finite)),
    "layers": table_of(LAYER),
    "network": fields({}, {"arch": is_text, "algorithm": is_text, "pixels": is_count}),
    "notes": NOTES,
    "palette": list_of(COLOUR),
    "pictures": table_of(PICTURE),
    "seconds": SECONDS,
    "tally": list_of(list_of(is_count)),
    "trust": TRUST,
    "versions": table_of(is_text),
}
FEATURES: dict[str, Shape] = {
    "after": POINTS,
    "before": POINTS,
    "classes": list_of(is_text),
    "gap_after": is_number,
    "gap_before": is_number,
    "labels": list_of(list_of(is_count), least=2, most=2),
    "layer": is_text,
    "samples": list_of(is_text, least=2, most=2),
}


def is_cell_record(record: dict[str, Any]) -> bool:
    """Whether everything that tables and figures look at is what it has to be."""
    result = record.get("result", {})
    return (
        fields({}, {"cell": is_table, "began": _is_time, "seconds": is_finite})(record)
        and fields({}, KNOWN | {name: or_none(is_number) for name in METRICS})(result)
        and _is_square(result.get("tally", []), result.get("classes"))
    )


def is_features(result: dict[str, Any]) -> bool:
    """Whether this is the result of a comparison of features."""
    return fields(FEATURES)(result) and all(
        len(labels) == len(result["before"][side]) == len(result["after"][side])
        and max(labels) < len(result["classes"])
        for side, labels in enumerate(result["labels"])
    )


def _is_time(value: Any) -> bool:
    return is_finite(value) and 0 <= value < LATEST


def _is_square(tally: list[list[int]], classes: list[str] | None) -> bool:
    """Whether there is a row and a column for each class."""
    size = len(tally) if classes is None else len(classes)
    return len(tally) in (0, size) and all(len(row) == size for row in tally)

"""What a run left behind, as facts that two runs have in common, and where they differ."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TIMINGS = ("seconds", "at", "date")  # keys, or the ends of keys, that differ between any two runs
CLOSE = 1e-5  # a batch of another size changes the last digits of a probability
Facts = dict[str, Any]


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """A sentence for each difference between two values that JSON knows."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        keys = [*expected, *(key for key in found if key not in expected)]
        return [line for key in keys for line in _of_key(expected, found, key, where)]
    if _is_list(expected) and _is_list(found):
        if len(expected) != len(found):
            return [f"{where} has {len(found)} entries, not {len(expected)}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for place, pair in pairs for line in differences(*pair, f"{where}[{place}]")]
    if isinstance(expected, float) and isinstance(found, float):
        return [] if math.isclose(expected, found, abs_tol=CLOSE) else [f"{where} is {found}, not {expected}"]
    return [] if expected == found else [f"{where} is {_short(found)}, not {_short(expected)}"]


def _of_key(expected: Mapping[str, Any], found: Mapping[str, Any], key: str, where: str) -> list[str]:
    place = f"{where}/{key}" if where else key
    if key not in found:
        return [f"{place} is missing"]
    if key not in expected:
        return [f"{place} should not be there"]
    return differences(expected[key], found[key], place)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def without_timings(value: Any) -> Any:
    """The same value without what a clock says."""
    if isinstance(value, Mapping):
        return {key: without_timings(each) for key, each in value.items() if not key.endswith(TIMINGS)}
    return [without_timings(each) for each in value] if isinstance(value, list) else value


# --- files


def digest(file: Path) -> str:
    """A word for the content of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def drafts(folder: Path) -> list[str]:
    """What was left half-written below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.part"))


def is_whole_page(file: Path) -> bool:
    """Whether a page has its end."""
    return file.read_text("utf-8").rstrip().endswith("</html>")


def table(file: Path) -> Facts:
    """The rows of a CSV in their order: a row that is lost or there twice moves the others."""
    with file.open(encoding="utf-8", newline="") as text:
        return {"rows": [[_value(cell) for cell in row] for row in csv.reader(text)]}


def _value(cell: str) -> str | float:
    try:
        return float(cell)
    except ValueError:
        return cell


def json_file(file: Path) -> Any:
    """A JSON file without what a clock says."""
    return without_timings(json.loads(file.read_text("utf-8")))


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file; a torn one is an error."""
    content = file.read_bytes()
    if not content.endswith(b"\n"):
        raise ValueError(f"{file.name} ends in a torn line")
    yield from (json.loads(line) for line in content.splitlines())


def records(file: Path) -> Facts:
    """The results in a file of records by their keys, and how often each key is there."""
    stored = list(lines(file))
    return {
        "results": {record["key"]: without_timings(record.get("result")) for record in stored},
        "times": dict(Counter(record["key"] for record in stored)),
    }

"""The file of a delta: a safetensors file with a header in JSON, whose every part is checked when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fewshift.core._arguments import checked_path
from fewshift.core.contents import BITS
from fewshift.errors import FewshiftError
from fewshift.files.parsing import parsed_json
from fewshift.files.shapes import (
    fields,
    is_count,
    is_flag,
    is_loss,
    is_table,
    is_text,
    list_of,
    one_of,
    or_none,
)

FORMATS = (1, 2)  # without and with an outcome
KEY = "fewshift"
AGAIN = "make it again with `fewshift adapt`"


FINGERPRINT = fields({"architecture": is_text, "weights": is_text})
GAIN = fields(dict.fromkeys(("point", "low", "high", "level", "before", "after", "images"), is_loss))
OUTCOME = fields(
    {"accepted": is_flag, "rule": is_text},
    {name: or_none(is_text) for name in ("chosen", "missing", "weakness")}
    | {"labelled": is_count, "unlabelled": is_count, "gain": or_none(GAIN)},
)
HEADER = fields(
    {
        "digest": is_text,
        "source": FINGERPRINT,
        "adapted": FINGERPRINT,
        "method": is_text,
        "settings": is_table,
        "classes": or_none(list_of(is_text)),
        "preprocess": or_none(is_table),
        "seed": or_none(lambda value: type(value) is int),
        "shots": or_none(is_count),
        "version": is_text,
    },
    {"outcome": or_none(OUTCOME)},
)


class DeltaFile(NamedTuple):
    """What a file says: its tensors, its digest, and the other fields of its header."""

    bits: dict[str, Tensor]
    digest: str
    header: dict[str, Any]


def read_delta(path: Any) -> DeltaFile:
    """Read a file; one that is missing, truncated, foreign or of wrong types is one clear sentence."""
    path = checked_path(path, "the delta")
    if not path.is_file():
        raise FewshiftError(f"there is no delta at {path}: give the file that `fewshift adapt --out` wrote")
    text, bits = _content(path)
    header = parsed_json(text, f"the header of {path}", AGAIN)
    version = header.get("format") if is_table(header) else None
    if type(version) is int and version > FORMATS[-1]:
        raise FewshiftError(
            f"{path} has delta format {version}, this library reads format {FORMATS[-1]}: update fewshift"
        )
    if not one_of(*FORMATS)(version) or not HEADER(header):
        raise foreign(path)
    if any(tensor.dtype not in BITS.values() for tensor in bits.values()):
        raise foreign(path)
    del header["format"]
    return DeltaFile(bits, header.pop("digest"), header)


def foreign(path: Path) -> FewshiftError:
    """The sentence about a file that is no delta."""
    return FewshiftError(f"{path} is not a whole fewshift delta: {AGAIN}")


def _content(path: Path) -> tuple[str, dict[str, Tensor]]:
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {})[KEY]
            return text, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except Exception as error:  # readers raise whatever a broken file leads them to
        raise foreign(path) from error

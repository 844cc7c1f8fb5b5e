"""Site files that were made to harm, with a digest that is right, and bases whose bytes have no end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewshift import FewshiftError
from fewshift.deploy.edge import Session
from fewshift.deploy.onnx_bytes import OnnxLayout
from fewshift.deploy.site_format import BEGINNING, BLANK, LENGTH, SiteFile, SiteTensor, _digest
from tests.deploy.test_edge import base, site

TWO = np.array([1, -1], np.float32).tobytes()
TENSORS = {
    "a name that is not there": {"bn.colour": SiteTensor("F32", (2,), TWO)},
    "another type": {"bn.bias": SiteTensor("I32", (2,), TWO)},
    "another shape": {"bn.bias": SiteTensor("F32", (1, 2), TWO)},
    "more values": {"bn.bias": SiteTensor("F32", (2,), TWO * 9)},
    "no values": {"bn.bias": SiteTensor("F32", (2,), b"")},
    "NaN": {"bn.bias": SiteTensor("F32", (2,), np.array([1, np.nan], np.float32).tobytes())},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    base(tmp_path / "base.onnx")
    return tmp_path


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_that_the_base_has_not_so_are_refused(place: Path, tensors: dict[str, SiteTensor]) -> None:
    site(place / "forged.site", place / "base.onnx", tensors=tensors)
    with pytest.raises(FewshiftError, match=r"forged\.site .*: make it again"):
        Session(place / "base.onnx", place / "forged.site")


def signed(header: Any, values: bytes = b"") -> bytes:
    """A file with this header, and a digest that is right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = len(text).to_bytes(LENGTH, "little") + text + values
    return content.replace(BLANK, _digest(content), 1)


GOOD = {"format": 1, "base": "b", "network": "w", "classes": None, "preprocess": None, "about": {}}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def header(facts: Any, **tensors: Any) -> dict[str, Any]:
    said = facts if isinstance(facts, str) else json.dumps(facts)
    return {"__metadata__": {"digest": BLANK.decode(), "fewshift-site": said}, **tensors}


HEADERS: dict[str, Any] = {
    "no JSON": BEGINNING + BLANK + b"!",
    "deep": BEGINNING + BLANK + b'"}, "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "no facts": {"__metadata__": {"digest": BLANK.decode()}},
    "facts of a number": header("5"),
    "facts without base": header({"format": 1}),
    "more facts": header(GOOD | {"colour": "red"}),
    "format in words": header(GOOD | {"format": "one"}),
    "classes of numbers": header(GOOD | {"classes": [1]}),
    "preprocess without mean": header(GOOD | {"preprocess": {"std": [1.0]}}),
    "digits": header('{"format": ' + "9" * 5000 + "}"),
    "a tensor of a number": header(GOOD, x=5),
    "offsets in words": header(GOOD, x=ENTRY | {"data_offsets": ["0", "8"]}),
    "offsets beyond the end": header(GOOD, x=ENTRY | {"data_offsets": [0, 800]}),
    "offsets backwards": header(GOOD, x=ENTRY | {"data_offsets": [8, 0]}),
    "negative offsets": header(GOOD, x=ENTRY | {"data_offsets": [-8, 0]}),
    "a negative shape": header(GOOD, x=ENTRY | {"shape": [-2]}),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_of_wrong_types_is_one_sentence(tmp_path: Path, content: Any) -> None:
    (tmp_path / "forged.site").write_bytes(signed(content, b"\0" * 8))
    with pytest.raises(FewshiftError, match=r"forged\.site.*: make it again") as caught:
        SiteFile.read(tmp_path / "forged.site")
    assert "\n" not in str(caught.value)


def test_a_signed_file_of_right_types_is_read(tmp_path: Path) -> None:
    (tmp_path / "good.site").write_bytes(signed(header(GOOD, x=ENTRY), TWO))
    assert SiteFile.read(tmp_path / "good.site").tensors == {"x": SiteTensor("F32", (2,), TWO)}


@pytest.mark.parametrize(
    "facts",
    [
        {"input": 5},
        {"input": {"type": "float32"}},
        {"fewshift": "mine"},
        {"classes": 5},
        {"preprocess": {"mean": "grey", "std": [1]}},
    ],
)
def test_a_base_that_says_things_of_wrong_types_is_one_sentence(tmp_path: Path, facts: dict[str, Any]) -> None:
    base(tmp_path / "base.onnx", **facts)
    with pytest.raises(FewshiftError, match="was not written by `fewshift export`"):
        Session(tmp_path / "base.onnx")


def test_a_number_without_an_end_takes_no_time() -> None:
    began = time.process_time()
    with pytest.raises(FewshiftError, match="not a whole ONNX file"):
        OnnxLayout.of(b"\xff" * 1_000_000, "base.onnx")
    assert time.process_time() - began < 1

"""What the program does is what `tests/golden` says it does: a change is meant, or it is a mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.golden.make import HERE, environment, makers

EXACT = {"help.txt", "lists.json", "keys.json"}  # on every machine


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("name", [name for name in makers(Path()) if name != "environment.json"])
def test_the_program_does_what_it_did(name, scratch):
    frozen, now = (HERE / name).read_text(encoding="utf-8"), makers(scratch)[name]()
    here = environment() == json.loads((HERE / "environment.json").read_text(encoding="utf-8"))
    if name not in EXACT and not here:  # another processor or torch: the last bits differ, and with them the hashes
        frozen, now = _without_hashes(frozen), _without_hashes(now)
    assert now == frozen, f"if this is meant: python -m tests.golden.make, and say why in the commit ({name})"


def _without_hashes(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{16,64}\b|[-+]?\d+\.\d+", "-", text)

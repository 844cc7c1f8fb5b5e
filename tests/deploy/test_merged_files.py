"""Merged weights are written over nothing that was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fewshift
from fewshift import FewshiftError
from tests.helpers.networks import make_support, make_tiny, state


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """A network with its file of weights and its card, and a delta."""
    from safetensors.torch import save_file

    save_file(state(make_tiny()), tmp_path / "w.safetensors")
    card = {"classes": ["a", "b", "c"], "mean": [0.5] * 3, "std": [0.25] * 3, "source_valid_accuracy": 0.9}
    (tmp_path / "w.json").write_text(json.dumps(card))
    network = fewshift.load("tests.helpers.networks:make_tiny", weights=tmp_path / "w.safetensors")
    result = fewshift.adapt(network, make_support(), method="adabn", validate=None)
    return {"network": network, "delta": result.delta.save(tmp_path / "d.safetensors"), "folder": tmp_path}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "d.safetensors"])
def test_what_the_network_and_the_delta_came_from_is_kept(place, name):
    before = {path.name: path.read_bytes() for path in place["folder"].iterdir()}
    with pytest.raises(FewshiftError, match="is a file that the network or the delta came from"):
        fewshift.merge(place["network"], place["delta"], place["folder"] / name)
    assert {path.name: path.read_bytes() for path in place["folder"].iterdir()} == before


@pytest.mark.parametrize("name", ["", ".", "..", "/", "new.json"])
def test_what_can_be_no_file_of_weights_is_one_sentence(place, command, monkeypatch, name):
    monkeypatch.chdir(place["folder"])
    with pytest.raises(FewshiftError, match=r"cannot write weights to .*: name a file such as"):
        fewshift.merge(place["network"], place["delta"], name)
    words = ["-m", "tests.helpers.networks:make_tiny", "-w", "w.safetensors", "-d", "d.safetensors", "-o", name]
    done = command("merge", *words)
    assert done.code in (1, 2)
    assert done.stderr.startswith("error: cannot write " if name else "error: a word of the command is empty")
    assert len(done.stderr.splitlines()) == 1

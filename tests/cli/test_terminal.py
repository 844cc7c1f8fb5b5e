"""Names come from files that anybody made: a terminal is not commanded by them."""

from __future__ import annotations

import copy

import pytest
import torch

from fewshift import Delta
from tests.helpers.networks import make_tiny

EVIL = "\x1b[2J[red]\x07\u202ename"
SHOWN = r"\x1b[2J[red]\x07\u202ename"


@pytest.fixture
def folder(tmp_path):
    network = make_tiny()
    adapted = copy.deepcopy(network)
    with torch.no_grad():
        adapted.fc.bias[0] = 1.0
    about = {"method": EVIL, "classes": (EVIL, "b", "c"), "settings": {EVIL: EVIL}, "version": EVIL}
    Delta.between(network, adapted, **about).save(tmp_path / f"{EVIL}.safetensors")
    return tmp_path


@pytest.mark.parametrize("words", [("show", "{file}"), ("sites", "{folder}")], ids=["show", "sites"])
def test_a_name_is_shown_and_not_obeyed(words, folder, command):
    paths = {"file": folder / f"{EVIL}.safetensors", "folder": folder}
    result = command(*(word.format_map(paths) for word in words))
    assert result.code == 0
    assert not [letter for letter in result.stdout + result.stderr if not letter.isprintable() and letter != "\n"]
    assert SHOWN in result.stdout

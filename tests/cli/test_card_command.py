"""`fewshift card` writes what weights are, after it has loaded them, and replaces nothing unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

import fewshift
from fewshift.cli import app
from fewshift.errors import FewshiftError
from fewshift.models.card_files import unknown_keys
from fewshift.models.cards import known_card

WORDS = ["--classes", "ant,bee,cat", "--mean", "0.1,0.2,0.3", "--std", "1,2,3", "--resize", "40", "--crop", "32"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def card(*words: object) -> Result:
    return CliRunner().invoke(app, ["card", *map(str, words)])


def test_with_the_card_that_was_written_the_weights_are_enough(weights: Path) -> None:
    shown = card(weights, "--model", "timm:test_resnet", *WORDS, "--interpolation", "nearest", "--squeeze")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout) == json.loads(weights.with_suffix(".json").read_text())
    known = known_card(fewshift.load(None, weights))
    assert (known.arch, known.classes) == ("timm:test_resnet", ("ant", "bee", "cat"))
    assert known.preprocess == fewshift.Preprocess(40, 32, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "nearest", squeeze=True)


def test_a_card_is_replaced_only_on_request_and_keeps_its_notes(weights: Path) -> None:
    path = weights.with_suffix(".json")
    path.write_text('{"arch": "timm:test_resnet", "crop": 96, "dataset": "pacs"}')
    refused = card(weights, "--crop", "48")
    assert isinstance(refused.exception, FewshiftError)
    assert "w.json is there already" in str(refused.exception)
    assert json.loads(path.read_text())["crop"] == 96
    assert card(weights, "--crop", "48", "--overwrite").exit_code == 0
    content = json.loads(path.read_text())
    assert (content["crop"], content["dataset"]) == (48, "pacs")


def test_a_dry_run_shows_the_card_and_writes_nothing(weights: Path) -> None:
    shown = json.loads(card(weights, "--model", "timm:test_resnet", *WORDS, "--dry-run", "--json").stdout)
    assert (shown["written"], shown["card"]["classes"]) == (False, ["ant", "bee", "cat"])
    assert not weights.with_suffix(".json").exists()


def test_another_place_can_be_named(weights: Path, tmp_path: Path) -> None:
    assert card(weights, "--model", "timm:test_resnet", "--out", tmp_path / "other.json").exit_code == 0
    assert json.loads((tmp_path / "other.json").read_text())["arch"] == "timm:test_resnet"
    assert not weights.with_suffix(".json").exists()
    assert "is a .json file" in str(card(weights, "--model", "timm:test_resnet", "--out", "w.txt").exception)


def test_a_card_that_does_not_fit_the_weights_is_not_written(weights: Path) -> None:
    refused = card(weights, "--model", "timm:test_resnet", "--classes", "ant,bee")
    assert "does not fit" in str(refused.exception)
    assert not weights.with_suffix(".json").exists()


def test_a_factory_is_left_out_of_a_card(tmp_path: Path) -> None:
    from tests.helpers.commands import FACTORY, SIZES, small_network

    save_file(small_network().state_dict(), tmp_path / "w.safetensors")
    shown = card(tmp_path / "w.safetensors", "--model", FACTORY, *SIZES)
    assert shown.exit_code == 0
    assert "arch" not in json.loads((tmp_path / "w.json").read_text())
    assert f"pass --model {FACTORY}" in shown.stderr


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("class_names", "classes"),
        ("resise", "resize"),
        ("Mean", "mean"),
        ("input_size", "crop"),
        ("label_names", "classes"),
        ("architecture", "arch"),
        ("zebra", None),
    ],
)
def test_an_unknown_key_of_a_card_is_listed_with_the_key_that_was_meant(key: str, meant: str | None) -> None:
    assert unknown_keys({"arch": "timm:resnet18", key: 1, "seed": 0, "dataset": "pacs"}) == {key: meant}

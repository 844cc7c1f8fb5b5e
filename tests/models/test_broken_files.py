"""Weights and configs that somebody broke: one sentence, or nothing where the file is not ours to judge."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fewshift import FewshiftError
from fewshift.models.cards import read_card
from fewshift.models.checkpoints import read_file
from fewshift.models.hub_configs import card_of_config


def test_an_archive_with_a_broken_directory_is_one_sentence(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    content = buffer.getvalue()
    at = content.index(b"PK\x01\x02")
    (tmp_path / "w.pt").write_bytes(content[:at] + b"PK\x01\x03" + content[at + 4 :])
    assert zipfile.is_zipfile(tmp_path / "w.pt")
    with pytest.raises(FewshiftError, match=r"w\.pt is truncated or not a table of weights"):
        read_file(tmp_path / "w.pt")


@pytest.mark.parametrize("key", ["9" * 5000, "²", "-1"])
def test_class_numbers_that_are_none_give_no_names(tmp_path: Path, key: str) -> None:
    config = {"architectures": ["ResNetForImageClassification"], "id2label": {"0": "ant", key: "bee"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = card_of_config(tmp_path / "config.json")
    assert card is not None
    assert "classes" not in card


@pytest.mark.parametrize(
    "steps",
    [{"size": {"shortest_edge": 1e999}}, {"size": 224, "crop_pct": 1e-320}, {"image_mean": [1e999], "image_std": 5}],
)
def test_sizes_without_end_are_one_sentence(tmp_path: Path, steps: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ResNetForImageClassification"]}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(steps))
    with pytest.raises(FewshiftError, match=r"preprocessor_config\.json cannot be read"):
        read_card(tmp_path / "config.json")


def test_a_crop_without_end_in_a_config_of_timm_says_nothing(tmp_path: Path) -> None:
    steps = {"input_size": [3, 1e999, 1e999], "crop_pct": 1.0}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": steps}))
    card = card_of_config(tmp_path / "config.json")
    assert card is not None
    assert "resize" not in card


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"classes": ' * 300 + "1" + "}" * 300, '{"resize": ' + "9" * 5000 + "}"]
)
def test_a_card_without_end_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(FewshiftError, match=r"the card .*w\.json is not JSON .*: mend or remove it"):
        read_card(tmp_path / "w.json")

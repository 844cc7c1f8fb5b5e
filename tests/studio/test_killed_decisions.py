"""A kill in the middle of a decision leaves neither half a folder nor half a list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fewshift.studio import decisions

FACTS = {"advice": "recommended", "recommendation": [], "accepted": True, "labels": 3, "classes": ["ä"]}
GAIN = {"point": 1.25, "low": 0.1, "high": 2.4, "images": 30}


class KilledError(BaseException):
    """Nothing after this happens."""


def killed(*_: object, **__: object) -> None:
    raise KilledError


@pytest.fixture
def outcome(tmp_path: Path) -> decisions.AdaptationFolder:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "site.safetensors").write_bytes(b"delta")
    (tmp_path / "site" / "result.json").write_text(json.dumps(FACTS | {"gain": GAIN}))
    found = decisions.last_outcome(tmp_path)
    assert found is not None
    return found


def test_a_delta_that_was_kept_is_noted_once(tmp_path: Path, outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(decisions, "_append", killed)
        with pytest.raises(KilledError):
            decisions.keep(outcome, tmp_path)
    assert outcome.decision is not None
    for _ in range(2):
        decisions.settle(tmp_path)
        (line,) = (tmp_path / "decisions.jsonl").read_text("utf-8").splitlines()
        assert json.loads(line) == outcome.decision


def test_a_line_that_an_older_version_tore_is_left_out(tmp_path: Path, outcome) -> None:
    (tmp_path / "decisions.jsonl").write_text('{"name": "a"}\n{"na')
    decisions.keep(outcome, tmp_path)
    names = [json.loads(line)["name"] for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert names == ["a", "site"]


def test_what_is_thrown_away_is_gone_as_a_whole(tmp_path: Path, outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KilledError):
            decisions.throw_away(outcome, tmp_path)
    assert not outcome.folder.exists()
    decisions.clear_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["decisions.jsonl"]

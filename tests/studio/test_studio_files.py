"""What the studio finds on disk: a damaged file is one sentence, a full disk loses nothing that was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fewshift import FewshiftError
from fewshift.studio import decisions
from fewshift.studio.decisions import AdaptationFolder
from fewshift.studio.errand import Errand
from fewshift.studio.labels_store import LABELLED, LabelStore
from tests.helpers.disk import room_for

FACTS = {"advice": "use", "recommendation": [], "accepted": True, "gain": None, "labels": 3, "classes": ["a", "b"]}
DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize("content", ["{", "[]", DEEP, '{"accepted": 1}', json.dumps(FACTS | {"suspects": [5]})])
def test_a_damaged_result_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(FewshiftError, match=r"result\.json is not (JSON|what an adaptation wrote)"):
        decisions.opened_outcome(tmp_path)


@pytest.mark.parametrize("content", ["5", DEEP, "[1]"])
def test_damaged_decisions_and_scenes_count_as_none(tmp_path: Path, content: str) -> None:
    for name in ("decision.json", "scenes.json"):
        (tmp_path / name).write_text(content)
    folder = AdaptationFolder(tmp_path, FACTS)
    assert (folder.decision, folder.scenes) == (None, [])


@pytest.mark.parametrize("line", [DEEP, "5", '{"image": 5}', '{"image": "a", "state": [], "label": 1, "version": 1}'])
def test_a_damaged_line_of_the_journal_is_one_sentence(tmp_path: Path, line: str) -> None:
    (tmp_path / "labels.jsonl").write_text(line + "\n")
    with pytest.raises(FewshiftError, match=r"line 1 of .*labels\.jsonl is (no label|not JSON)"):
        LabelStore(tmp_path)


def test_a_decision_that_does_not_fit_on_the_disk_is_one_sentence_and_leaves_no_half(tmp_path: Path) -> None:
    (tmp_path / "decisions.jsonl").write_text("x" * 9_990 + "\n")
    (tmp_path / "a").mkdir()
    with room_for(10_000), pytest.raises(FewshiftError, match=r"decisions\.jsonl.*: free some space"):
        decisions.throw_away(AdaptationFolder(tmp_path / "a", FACTS), tmp_path)
    assert (tmp_path / "decisions.jsonl").stat().st_size == 9_991
    assert (tmp_path / "a").is_dir()


def test_a_label_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    store.change("a.jpg", LABELLED, "cat", base=0, tab="t")
    before = store.path.read_bytes()
    with room_for(len(before) + 20), pytest.raises(FewshiftError, match=r"not on disk.*free some space"):
        store.change("b.jpg", LABELLED, "dog", base=0, tab="t")
    assert store.path.read_bytes() == before
    assert store.labels() == {"a.jpg": "cat"}
    store.close()


def test_a_crash_whose_details_cannot_be_written_is_still_a_sentence(tmp_path: Path) -> None:
    errand = Errand.__new__(Errand)
    errand._log = tmp_path / "no such folder" / "crashes.log"
    assert errand._written("Traceback") == "the details cannot be written (No such file or directory): try again"

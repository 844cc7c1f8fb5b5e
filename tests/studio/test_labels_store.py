"""Labels on disk: nothing that was confirmed is lost, nothing is overwritten unseen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fewshift.errors import FewshiftError
from fewshift.studio.labels_store import JOURNAL, LABELLED, NONE, OPEN, SKIPPED, ConflictError, LabelStore

WRITER = """
import sys
from fewshift.studio.labels_store import LabelStore
store = LabelStore(sys.argv[1])
for number in range(10_000):
    mark = store.change(f"{number}.png", "labelled", "cat", base=0, tab="a")
    print(mark.version, flush=True)
"""


def reopened(store: LabelStore) -> LabelStore:
    store.close()
    return LabelStore(store.folder)


def label(store: LabelStore, image: str, name: str | None, tab: str = "a", state: str = LABELLED) -> int:
    return store.change(image, state, name, base=store.mark(image).version, tab=tab).version


def test_a_kill_loses_no_label_that_was_confirmed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        confirmed = [int(writer.stdout.readline()) for _ in range(25)]
        writer.send_signal(signal.SIGKILL)
        confirmed += [int(line) for line in writer.stdout if line.endswith("\n")]
    store = LabelStore(tmp_path)
    assert confirmed == list(range(1, len(confirmed) + 1))
    assert {f"{number}.png" for number in range(len(confirmed))} <= store.labels().keys()


def test_a_change_comes_back_after_the_disk_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LabelStore(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    label(store, "a.png", "cat")
    assert synced == [(tmp_path / JOURNAL).stat().st_size] != [0]


def test_what_the_disk_refuses_is_not_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LabelStore(tmp_path)
    label(store, "a.png", "cat")
    before = (tmp_path / JOURNAL).read_bytes()

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FewshiftError, match="not on disk"):
            label(store, "b.png", "dog")
    assert store.labels() == {"a.png": "cat"}
    assert (tmp_path / JOURNAL).read_bytes() == before
    label(store, "b.png", "dog")
    assert reopened(store).labels() == {"a.png": "cat", "b.png": "dog"}


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    label(store, "a.png", "cat")
    store.close()
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"version": 2, "image": "b.p')
    store = LabelStore(tmp_path)
    assert store.labels() == {"a.png": "cat"}
    label(store, "b.png", "dog")
    assert reopened(store).labels() == {"a.png": "cat", "b.png": "dog"}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("not json\n")
    with pytest.raises(FewshiftError, match=r"line 1 .*restore"):
        LabelStore(tmp_path)


def test_two_tabs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    seen_by_both = store.mark("a.png").version
    store.change("a.png", LABELLED, "cat", base=seen_by_both, tab="one")
    with pytest.raises(ConflictError, match="changed elsewhere") as conflict:
        store.change("a.png", LABELLED, "dog", base=seen_by_both, tab="two")
    assert conflict.value.current.label == "cat"
    assert store.labels() == {"a.png": "cat"}
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 1


def test_undo_restores_what_was_before_and_is_a_line_of_its_own(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    label(store, "a.png", "cat")
    label(store, "a.png", "dog")
    label(store, "b.png", None, state=SKIPPED)
    states = []
    while (image := store.undo("a")) is not None:
        states.append((image, store.mark(image).state, store.mark(image).label))
    assert states == [("b.png", OPEN, None), ("a.png", LABELLED, "cat"), ("a.png", OPEN, None)]
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 6
    assert reopened(store).labels() == {}


def test_a_tab_undoes_its_own_changes_alone_also_after_a_restart(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    label(store, "a.png", "cat", tab="one")
    label(store, "b.png", "dog", tab="two")
    store = reopened(store)
    assert store.undo("one") == "a.png"
    assert store.undo("one") is None
    assert store.labels() == {"b.png": "dog"}


def test_undo_does_not_take_back_what_another_tab_has_changed_since(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    label(store, "a.png", "cat", tab="one")
    label(store, "a.png", "dog", tab="two")
    with pytest.raises(ConflictError):
        store.undo("one")
    assert store.labels() == {"a.png": "dog"}


def test_labels_from_elsewhere_do_not_replace_decisions(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    label(store, "a.png", "cat")
    label(store, "b.png", None, state=NONE)
    assert store.take_in({"a.png": "dog", "b.png": "dog", "c.png": "dog"}, "labels.csv") == 1
    assert store.labels() == {"a.png": "cat", "c.png": "dog"}
    assert store.take_in({"c.png": "cat"}, "labels.csv") == 0


def test_a_second_studio_is_told_that_the_folder_is_open(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    with pytest.raises(FewshiftError, match="another studio"):
        LabelStore(tmp_path)
    store.close()
    LabelStore(tmp_path).close()


def test_names_that_are_no_text_survive(tmp_path: Path) -> None:
    store = LabelStore(tmp_path)
    name = os.fsdecode(b"caf\xe9\n.png")
    label(store, name, "na\u00efve \u732b")
    assert reopened(store).labels() == {name: "na\u00efve \u732b"}
    for line in (tmp_path / JOURNAL).read_text("ascii").splitlines():
        json.loads(line)


@pytest.mark.parametrize(("state", "name"), [(LABELLED, None), (SKIPPED, "cat"), ("guessed", None)])
def test_a_decision_is_a_class_or_a_state(tmp_path: Path, state: str, name: str | None) -> None:
    store = LabelStore(tmp_path)
    with pytest.raises(FewshiftError, match="no decision"):
        store.change("a.png", state, name, base=0, tab="a")
    assert store.version == 0

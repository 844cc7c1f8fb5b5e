"""Records and cells: nothing lost, nothing done twice, nothing corrupted."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from fewshift import FewshiftError
from fewshift.core.method import Method
from fewshift.lab.bench.cell import RETIRED, Cell, FeatureCell, Sample
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.record import Records
from fewshift.methods.catalog import METHODS
from fewshift.methods.lccs import LCCS
from tests.helpers.bench import forked, lines_of, wait_for

CELL = Cell("digits", "mnist", "uci", "lccs", {"epochs": 5}, shots=5)


OTHERS = {
    "dataset": {"dataset": "pacs"},
    "source": {"source": "x"},
    "target": {"target": "sketch"},
    "method": {"method": "adabn", "settings": {}},
    "settings": {"settings": {"epochs": 6}},
    "shots": {"shots": 1},
    "seed": {"seed": 1},
    "condition": {"condition": Condition(batch_size=8)},
    "largest_support": {"largest_support": 5},
    "max_test": {"max_test": 100},
    "damage": {"damage": "two classes"},
    "validate": {"validate": "cv"},
    "unlabelled": {"unlabelled": 20},
    "corruption": {"corruption": "noise 1"},
    "precision": {"precision": "bfloat16"},
}


def test_a_key_depends_on_every_field_of_a_cell_and_survives_json():
    assert set(OTHERS) == {each.name for each in fields(Cell)}
    cells = [CELL, *(replace(CELL, **change) for change in OTHERS.values())]
    assert len({cell.key for cell in cells}) == len(cells)
    assert all(Cell.from_json(json.loads(json.dumps(cell.to_json()))).key == cell.key for cell in cells)


def test_a_setting_at_its_default_is_the_same_experiment():
    assert replace(CELL, settings={"epochs": 5, "lr": 1e-3}).key == CELL.key
    assert replace(CELL, condition=Condition("shuffled", None, 128)).key == CELL.key


def test_a_field_that_a_method_gets_later_changes_no_key(monkeypatch):
    @dataclass(frozen=True)
    class Later(LCCS):
        momentum: float = 0.9

    before = CELL.key
    monkeypatch.setitem(METHODS, "lccs", Later)
    assert CELL.key == before
    assert replace(CELL, settings={"epochs": 5, "momentum": 0.5}).key != before


# a record as version 0.1.0 wrote it: every setting is part of the key
OLD_SETTINGS = {
    "adapt_dtype": None, "batch_size": None, "classifier": "ncc", "classifier_epochs": 10, "combination": "linear",
    "epochs": 10, "gamma_floor": None, "gradient_head": "source", "grid": 11, "init": "grid", "init_epochs": 10,
    "lr": 0.001, "min_sigma": None, "n": "k*classes", "objective": "cross-entropy", "statistics": "auto",
    "variant": "paper",
}  # fmt: skip
OLD_CELL = {
    "condition": {"alpha": None, "batch_size": 128, "order": "shuffled"}, "dataset": "digits", "flaw": "two classes",
    "largest_support": 10, "max_test": 500, "method": "lccs", "seed": 0, "settings": OLD_SETTINGS, "shots": 1,
    "source": "mnist", "target": "uci", "validate": None,
}  # fmt: skip
NOW = Cell("digits", "mnist", "uci", "lccs", {"classifier": "ncc"}, shots=1, max_test=500, damage="two classes")


def test_a_record_of_an_older_version_is_found_under_the_key_that_its_cell_has_now(tmp_path):
    records = Records(tmp_path)
    records.append({"key": "1c60327c4c95358e", "cell": OLD_CELL, "result": {"accuracy": 0.5}})
    assert records.read()[NOW.key]["result"] == {"accuracy": 0.5}
    records.append({"key": NOW.key, "cell": NOW.to_json(), "result": {"accuracy": 0.6}})
    assert [record["result"] for record in records.read().values()] == [{"accuracy": 0.6}]


def test_a_record_of_what_can_no_longer_be_run_keeps_its_key(tmp_path):
    records = Records(tmp_path)
    records.append({"key": "old", "cell": OLD_CELL | {"settings": OLD_SETTINGS | {"classifier": "evidence"}}})
    assert list(records.read()) == ["old"]


def test_retired_settings_are_forgotten_at_their_default_and_only_there(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Smaller(Method):
        """LCCS without the settings that are retired."""

        name = "lccs"
        classifier: str = "auto"

        def fit(self, *_):
            raise NotImplementedError

    monkeypatch.setitem(METHODS, "lccs", Smaller)
    kept = {"classifier": "ncc", **RETIRED["lccs"]}
    records = Records(tmp_path)
    records.append({"key": "old", "cell": OLD_CELL | {"settings": kept}})
    records.append({"key": "lost", "cell": OLD_CELL | {"settings": kept | {"gradient_head": "ncc"}}})
    assert list(records.read()) == [NOW.key, "lost"]


def test_a_record_of_features_keeps_its_key_when_it_is_read(tmp_path):
    cell = FeatureCell("digits", "mnist", "shift", Sample("uci"), Sample("mnist", "batch"), images=30)
    records = Records(tmp_path)
    records.append({"key": "old", "cell": cell.to_json()})
    assert list(records.read()) == [cell.key]
    assert replace(cell, images=31).key != cell.key != replace(cell, second=Sample("mnist")).key


def test_records_are_read_back_and_the_newest_of_a_key_counts(tmp_path):
    records = Records(tmp_path / "run")
    records.append({"key": "a", "value": 1})
    records.append({"key": "b", "value": 2})
    records.append({"key": "a", "value": 3})
    assert Records(tmp_path / "run").read() == {"a": {"key": "a", "value": 3}, "b": {"key": "b", "value": 2}}


@pytest.mark.parametrize("torn", [b'{"key": "c", "val', b"{", b"\xff\xfe"])
def test_a_torn_last_line_is_recognised_and_repaired(tmp_path, torn):
    records = Records(tmp_path)
    records.append({"key": "a"})
    with records.file.open("ab") as file:
        file.write(torn)
    assert records.read() == {"a": {"key": "a"}}
    records.append({"key": "b"})
    assert [json.loads(line)["key"] for line in records.file.read_text().splitlines()] == ["a", "b"]


def test_a_last_record_that_lacks_only_its_end_is_kept(tmp_path):
    records = Records(tmp_path)
    records.append({"key": "a"})
    with records.file.open("ab") as file:
        file.write(b'{"key": "c"}')
    assert list(records.read()) == ["a", "c"]
    records.append({"key": "b"})
    assert [json.loads(line)["key"] for line in records.file.read_text().splitlines()] == ["a", "c", "b"]


def test_lines_that_are_no_records_are_passed_over_and_counted(tmp_path):
    records = Records(tmp_path)
    records.append({"key": "a"})
    with records.file.open("ab") as file:
        file.write(b'garbage\n\n[1]\n{"no": "key"}\n\xff\n')
    records.append({"key": "b"})
    assert list(records.read()) == ["a", "b"]
    assert records.unreadable == 4


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FewshiftError, match="choose another folder"):
        Records(tmp_path / "file" / "run")


def append_many(folder: str, name: int) -> None:
    records = Records(folder)
    for index in range(50):
        records.append({"key": f"{name}-{index}", "padding": "x" * 500})


def test_several_processes_append_without_tearing_each_other(tmp_path):
    processes = [forked(append_many, str(tmp_path), name) for name in range(3)]
    for process in processes:
        process.join()
    assert len(Records(tmp_path).read()) == 150


def claim_for_ever(folder: str) -> None:
    with Records(folder).claim("cell") as mine:
        Path(folder, "claimed").write_text(str(mine))
        threading.Event().wait()


def test_a_claim_is_exclusive_and_dies_with_its_owner(tmp_path):
    records = Records(tmp_path)
    process = forked(claim_for_ever, str(tmp_path))
    wait_for(lambda: lines_of(tmp_path / "claimed") == 1, process)
    assert (tmp_path / "claimed").read_text() == "True"
    with records.claim("cell") as mine:
        assert not mine
    with records.claim("another") as mine:
        assert mine
    process.kill()
    process.join()
    with records.claim("cell") as mine:
        assert mine

"""Records and cells: nothing lost, nothing done twice, nothing corrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from fewshift import FewshiftError
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.record import Records

CELL = Cell("digits", "mnist", "uci", "lccs", {"epochs": 5}, shots=5)


def test_a_cell_survives_json_and_its_key_depends_on_everything_in_it():
    assert Cell.from_json(json.loads(json.dumps(CELL.to_json()))).key == CELL.key
    others = [
        replace(CELL, dataset="pacs"),
        replace(CELL, source="x"),
        replace(CELL, target="sketch"),
        replace(CELL, method="adabn", settings={}),
        replace(CELL, settings={"epochs": 6}),
        replace(CELL, shots=1),
        replace(CELL, seed=1),
        replace(CELL, condition=Condition(batch_size=8)),
        replace(CELL, largest_support=5),
        replace(CELL, max_test=100),
    ]
    assert len({it.key for it in [CELL, *others]}) == 11


def test_a_setting_at_its_default_is_the_same_experiment():
    assert replace(CELL, settings={"epochs": 5, "lr": 1e-3}).key == CELL.key


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
    assert records.damaged == 4


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FewshiftError, match="choose another folder"):
        Records(tmp_path / "file" / "run")


def append_many(folder: str, name: int) -> None:
    records = Records(folder)
    for index in range(50):
        records.append({"key": f"{name}-{index}", "padding": "x" * 500})


def test_several_processes_append_without_tearing_each_other(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=append_many, args=(str(tmp_path), name)) for name in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(Records(tmp_path).read()) == 150


CLAIMING = """
import sys, time
from fewshift.lab.bench.record import Records
with Records(sys.argv[1]).claim("cell") as mine:
    print(mine, flush=True)
    time.sleep(60)
"""


def test_a_claim_is_exclusive_and_dies_with_its_owner(tmp_path):
    records = Records(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", CLAIMING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline().strip() == "True"
        with records.claim("cell") as mine:
            assert not mine
        with records.claim("another") as mine:
            assert mine
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        with records.claim("cell") as mine:
            assert mine

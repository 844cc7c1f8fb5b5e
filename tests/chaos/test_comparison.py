"""The comparison of the chaos suite sees what a kill can do, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.comparison import differences, drafts, json_file, records, table

ROWS = "file,class,probability\na.png,1,0.5\nb.png,2,0.25\n"
LINES = [{"key": "a", "result": {"accuracy": 0.5, "adapt_seconds": 1.0}}, {"key": "b", "result": {"accuracy": 0.75}}]


def rows(path: Path, text: str) -> Any:
    path.write_text(text)
    return table(path)


def test_the_same_rows_do_not_differ_nor_does_the_last_digit(tmp_path: Path) -> None:
    expected = rows(tmp_path / "a.csv", ROWS)
    assert differences(expected, rows(tmp_path / "b.csv", ROWS)) == []
    assert differences(expected, rows(tmp_path / "b.csv", ROWS.replace("0.25", "0.250001"))) == []


@pytest.mark.parametrize(
    "text",
    [
        ROWS.replace("a.png,1,0.5\n", ""),
        ROWS + "b.png,2,0.25\n",
        ROWS.replace("a.png,1", "a.png,2"),
        ROWS.replace("0.25", "0.26"),
        ROWS[:-3],
    ],
    ids=["lost", "twice", "another class", "another probability", "torn"],
)
def test_a_row_that_is_lost_twice_or_other_is_seen(tmp_path: Path, text: str) -> None:
    assert differences(rows(tmp_path / "a.csv", ROWS), rows(tmp_path / "b.csv", text))


def written(path: Path, stored: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in stored))
    return path


def test_records_are_the_same_in_any_order_and_time(tmp_path: Path) -> None:
    expected = records(written(tmp_path / "a.jsonl", LINES))
    slower = {"key": "a", "result": {"accuracy": 0.5, "adapt_seconds": 9.0}}
    assert differences(expected, records(written(tmp_path / "b.jsonl", [LINES[1], slower]))) == []


@pytest.mark.parametrize("stored", [LINES[:1], [*LINES, LINES[0]], [LINES[0], LINES[0] | {"key": "b"}]])
def test_a_record_that_is_lost_twice_or_other_is_seen(tmp_path: Path, stored: list[dict[str, Any]]) -> None:
    expected = records(written(tmp_path / "a.jsonl", LINES))
    assert differences(expected, records(written(tmp_path / "b.jsonl", stored)))


def test_a_torn_line_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", LINES)
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes()[:-5])
    with pytest.raises(ValueError, match="torn"):
        records(tmp_path / "a.jsonl")


def test_cards_are_compared_without_the_clock(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"history": [{"loss": 0.5, "seconds": 3}], "seed": 0}')
    assert json_file(tmp_path / "a.json") == {"history": [{"loss": 0.5}], "seed": 0}


def test_drafts_are_seen_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ".a.csv.fewshift-12345678.part").touch()
    (tmp_path / "a.csv").touch()
    assert drafts(tmp_path) == ["deep/.a.csv.fewshift-12345678.part"]

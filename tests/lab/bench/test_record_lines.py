"""Lines of records.jsonl that somebody, or a full disk, has damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fewshift import FewshiftError
from fewshift.lab.bench.features import load_grid
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.runs import report_run, run_grids
from tests.helpers.disk import room_for
from tests.helpers.runs import FEATURES, OBJECTIVE, PLAIN, embedded, fill, invented, undrawn


def append_many(records: Records) -> None:
    for number in range(100):
        records.append({"key": f"cell {number}", "padding": "x" * 700})


def test_a_record_that_does_not_fit_on_the_disk_leaves_whole_lines_and_a_sentence(tmp_path: Path) -> None:
    records = Records(tmp_path)
    with room_for(20_000), pytest.raises(FewshiftError, match=r"records\.jsonl.*too large.*: free some space"):
        append_many(records)
    lines = records.file.read_bytes()
    assert lines.endswith(b"\n")
    assert [json.loads(line)["key"] for line in lines.splitlines()] == list(records.read())
    assert 20 < len(records.read()) < 30
    records.append({"key": "later"})
    assert list(records.read())[-1] == "later"
    assert records.unreadable == 0


def test_a_claim_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    records = Records(tmp_path)
    (tmp_path / "claims").rmdir()
    (tmp_path / "claims").write_text("a file, where a folder was")
    with pytest.raises(FewshiftError, match="cannot read or write"), records.claim("cell"):
        pass


def test_what_a_run_has_lost_is_not_said_to_be_claimed_by_others(tmp_path: Path, command, monkeypatch) -> None:
    append = Records.append

    def forgetful(self: Records, record: dict[str, Any]) -> None:
        append(self, record | {"result": "gone"} if record["cell"]["seed"] == 0 else record)

    monkeypatch.setattr(Records, "append", forgetful)
    grid = tmp_path / "toy.toml"
    text = 'title = "Toy"\ndataset = "digits"\nsource = "mnist"\ntargets = ["uci"]\nseeds = [0, 1]\nmax_test = 20\n'
    grid.write_text(text + '[[rows]]\nmethod = "source"\n')
    assert run_grids([grid], tmp_path / "run").lost == 1
    result = command("bench", grid, "--out", tmp_path / "run")
    assert result.code == 1
    assert "1 cells were run, but" in result.stderr
    assert "claimed" not in result.stderr


WRONG_RESULTS: dict[str, Any] = {
    "a word": "good",
    "a list": [1],
    "accuracy": {"accuracy": "high"},
    "endless accuracy": {"accuracy": float("inf")},
    "accuracy that has no square": {"accuracy": 1e308},
    "seconds": {"seconds": 5},
    "seconds in words": {"seconds": {"adapt": "long", "predict": 1}},
    "notes": {"notes": []},
    "curve": {"notes": {"grid": 5}},
    "points": {"notes": {"grid": [{"v": 1}]}},
    "layers": {"layers": [1]},
    "weights": {"layers": {"bn1": {"eta": 5}}},
    "versions": {"versions": {"torch": 2}},
    "tally": {"tally": [[1, 2], [3]]},
    "tally of others": {"tally": [[1]], "classes": ["a", "b", "c"]},
    "classes": {"classes": "abc"},
    "trust": {"trust": {"accepted": 1}},
    "palette": {"palette": [[1, 2]]},
}


@pytest.mark.parametrize("result", WRONG_RESULTS.values(), ids=WRONG_RESULTS.keys())
def test_a_result_of_wrong_types_is_no_record_and_the_report_counts_it(tmp_path: Path, result: Any) -> None:
    folder = fill(tmp_path, "plain", PLAIN)
    cell = load_grid(folder / "grids" / "plain.toml").cells()[0]
    line = {"key": cell.key, "cell": cell.to_json(), "began": 1.8e9, "seconds": 1.0}
    whole = invented(cell)
    line["result"] = whole | result if isinstance(result, dict) else result
    with Records(folder).file.open("a") as file:
        file.write(json.dumps(line) + "\n")
    records = Records(folder)
    assert records.read()[cell.key]["result"] == whole
    assert records.unreadable == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"key": "a", "began": "today"}',
        '{"key": "a", "began": 1e300}',
        '{"key": "a", "seconds": null}',
        '{"key": "a", "error": {}}',
        '{"key": "a", "cell": 5}',
        '{"key": "a", "cell": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"key": "a", "x": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
    ids=lambda line: line[:30],
)
def test_a_line_of_another_kind_is_passed_over_and_counted(tmp_path: Path, line: str) -> None:
    records = Records(tmp_path)
    records.file.write_text(line + "\n")
    assert not records.read()
    assert records.unreadable == 1


@pytest.mark.parametrize(
    "harm", [{"before": 5}, {"labels": [[9] * 6, [0] * 6]}, {"samples": ["one"]}, {"gap_after": ""}]
)
def test_features_of_wrong_types_are_not_drawn(tmp_path: Path, harm: dict[str, Any]) -> None:
    folder = fill(tmp_path, "features", FEATURES, lambda cell: embedded(cell) | harm)
    with undrawn():
        assert report_run(folder).run.sections[0].gaps == []


@pytest.mark.parametrize("chosen", [None, "", [0.5], {}], ids=repr)
def test_a_search_whose_chosen_v_is_no_number_is_drawn_without_it(tmp_path: Path, chosen: Any) -> None:
    def harmed(cell: Any) -> dict[str, Any]:
        result = invented(cell)
        if cell.seed == 0 and result["notes"]:
            result["notes"]["v"] = chosen
        return result

    folder = fill(tmp_path, "objective", OBJECTIVE, harmed)
    with undrawn():
        assert report_run(folder).run.sections


def test_records_with_different_classes_are_one_sentence(tmp_path: Path) -> None:
    folder = fill(
        tmp_path, "plain", PLAIN, lambda cell: invented(cell, classes=("ant", "bee", "cat", "dog")[: 3 + cell.seed % 2])
    )
    with undrawn(), pytest.raises(FewshiftError, match=r"have 3 classes and 4.*records\.jsonl"):
        report_run(folder)

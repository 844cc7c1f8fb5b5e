"""When the disk is full, a command ends in one sentence and leaves nothing half-written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fewshift import FewshiftError, cli
from fewshift.jobs.ledger import Ledger
from tests.helpers.commands import CLASSES, network_options
from tests.helpers.disk import room_for
from tests.helpers.runs import GRIDS, fill, invented

HEAD = ["--classes", ",".join(CLASSES)]


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def sentence_of(done) -> str:
    """The one line of a command that could not write."""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.code, "Traceback" in done.stderr) == (1, False)
    return line


@pytest.fixture
def delta(run, place) -> Path:
    made = place / "d.safetensors"
    run("adapt", *network_options(place), "-s", place / "photos", "--method", "adabn", "--validate", "none", "-o", made)
    assert made.is_file()
    return made


def test_adapt_predict_and_merge_end_in_a_sentence(run, place, delta):
    adapting = ["-s", place / "photos", "--method", "adabn", "--validate", "none"]
    commands = {
        "site.safetensors": ["adapt", *network_options(place), *adapting, "-o", place / "site.safetensors"],
        "site.html": ["adapt", *network_options(place), *adapting, "--report", place / "site.html"],
        "rows.csv": ["predict", *network_options(place), *HEAD, place / "photos", "-o", place / "rows.csv"],
        "new.safetensors": ["merge", *network_options(place)[:4], "-d", delta, "-o", place / "new.safetensors"],
    }
    before = names_below(place)
    for name, words in commands.items():
        with room_for(600):
            done = run(*words)
        assert f"cannot write {place / name}: File too large: free some space" in sentence_of(done)
    assert names_below(place) - before <= {"rows.csv", "rows.csv.run.json"}
    done = run("predict", *network_options(place), *HEAD, place / "photos", "-o", place / "rows.csv", "--resume")
    assert (done.code, len((place / "rows.csv").read_text().splitlines())) == (0, 19)


def test_bench_and_report_end_in_a_sentence(command, tmp_path):
    grid = tmp_path / "plain.toml"
    grid.write_text(GRIDS["plain"].replace('"toy"', '"digits"').replace('"north", "south"', '"uci"'))
    with room_for(20):
        line = sentence_of(command("bench", grid, "-o", tmp_path / "run"))
    assert "plain.toml: File too large: free some space" in line
    assert not [name for name in names_below(tmp_path) if name.endswith(".part")]
    fill(tmp_path / "done", "plain", GRIDS["plain"], invented)
    before = names_below(tmp_path / "done")
    with room_for(2000):
        line = sentence_of(command("report", tmp_path / "done"))
    assert "report.html: File too large: free some space" in line
    assert names_below(tmp_path / "done") - before <= {"records.lock"}


def test_a_record_that_does_not_fit_is_a_sentence_and_the_next_one_follows_the_last_whole_one(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.append({"key": "a", "result": {"n": 1}})
    with room_for(60), pytest.raises(FewshiftError, match=r"records\.jsonl \(File too large\).*: free some space"):
        ledger.append({"key": "b", "result": {"n": "x" * 100}})
    ledger.append({"key": "c", "result": {"n": 2}})
    assert {key: record["result"] for key, record in ledger.read().items()} == {"a": {"n": 1}, "c": {"n": 2}}


def test_rows_for_a_full_device_end_in_a_sentence(place, monkeypatch, capfd):
    words = ["predict", *network_options(place), *HEAD, place / "photos"]
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "argv", ["fewshift", *map(str, words)])
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert stop.value.code == 1
    assert capfd.readouterr().err.endswith("error: cannot write the output: No space left on device: free some space\n")

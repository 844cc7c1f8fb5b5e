"""`fewshift report` on several runs, and into a folder of documentation."""

from __future__ import annotations

import json

import pytest

from fewshift.report import compared_figures
from tests.helpers.runs import ONE_POINT, PLAIN, fill, undrawn


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(compared_figures, "DOTS", 20)
    with undrawn():
        yield fill(tmp_path / "first", "plain", PLAIN), fill(tmp_path / "second", "one_point", ONE_POINT)


def test_several_runs_are_printed_one_after_the_other_and_docs_are_named(run, runs, tmp_path):
    docs = tmp_path / "docs"
    done = run("report", *runs, "--docs", docs)
    assert done.code == 0, done.stderr
    assert done.stdout.index("### Plain") < done.stdout.index("### One point")
    files = ["plain.md", "one-point.md", "accuracy-over-k.png"]
    assert done.stdout.splitlines()[-3:] == [f"wrote {docs / name}" for name in files]
    assert {path.name for path in docs.iterdir()} == set(files)
    assert all((folder / "report.html").is_file() for folder in runs)


def test_json_is_one_object_for_any_number_of_runs(run, runs, tmp_path):
    one = json.loads(run("report", runs[0], "--json").stdout)
    assert one["tables"].keys() == {"plain"}
    assert "pages" not in one
    several = json.loads(run("report", *runs, "--docs", tmp_path / "docs", "--json").stdout)
    assert [list(each["tables"]) for each in several["runs"]] == [["plain"], ["one_point"]]
    assert several["pages"] == [str(tmp_path / "docs" / name) for name in ("plain.md", "one-point.md")]
    assert several["figures"] == [str(tmp_path / "docs" / "accuracy-over-k.png")]


def test_a_page_that_cannot_be_written_is_an_error(run, runs, tmp_path):
    (tmp_path / "docs").write_text("a file")
    done = run("report", runs[0], "--docs", tmp_path / "docs")
    assert done.code == 1
    assert "choose another folder" in done.stderr

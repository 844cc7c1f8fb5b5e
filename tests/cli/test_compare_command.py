"""`fewshift compare`: what the function returns, as a table and sentences, or as JSON."""

from __future__ import annotations

import json

import pytest

import fewshift
from fewshift import Preprocess
from tests.helpers.commands import network_options, small_network

STEPS = Preprocess(None, 16, (0.5,) * 3, (0.25,) * 3)


def options(place, *words: object) -> list[object]:
    return ["compare", *network_options(place), "--support", place / "photos", *words]


def test_the_command_prints_what_the_function_returns(run, place):
    page, methods = place / "page.html", ["source", "adabn"]
    done = run(*options(place, "--methods", "source, adabn", "--select", "clear", "--report", page))
    assert done.code == 0, done.stderr
    expected = fewshift.compare(small_network(), place / "photos", methods, preprocess=STEPS, select="clear")
    lines = [line.split() for line in done.stdout.splitlines()]
    for row in expected.table():
        words = [word for cell in list(row.values())[:-1] for word in cell.split()]  # all but the seconds
        assert words in [line[: len(words)] for line in lines]
    assert expected.words in done.stdout
    assert f"selected: {expected.selected}" in done.stdout
    assert str(page) in done.stdout
    assert "<html" in page.read_text()


def test_json_has_the_numbers_of_as_many_shots_as_asked(run, place):
    done = run(*options(place, "--methods", "adabn", "--shots", 3, "--json"))
    assert done.code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["rows"][0]["gain"]["images"] == 9
    assert (facts["select"], facts["report"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "code", "facts"),
    [
        (["--methods", "adabn,nonsense"], 2, "no method 'nonsense'"),
        (["--methods", "tent"], 1, "tent"),
        (["--methods", ","], 2, "nothing to compare"),
        (["--validate", "none"], 2, "--validate none"),
        (["--report", "nowhere/page.html"], 2, "nowhere/page.html"),
    ],
)
def test_a_mistake_is_one_sentence(run, place, words, code, facts):
    done = run(*options(place, *words))
    assert done.code == code
    assert done.stderr.startswith("error: ")
    assert facts in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""

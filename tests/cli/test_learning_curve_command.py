"""`fewshift learning-curve`: what the function returns, as a table and sentences, or as JSON."""

from __future__ import annotations

import json
from html import unescape

import pytest
from PIL import Image

import fewshift
from fewshift import Preprocess
from fewshift.methods.finetune import L2
from tests.helpers.commands import network_options, small_network

STEPS = Preprocess(None, 16, (0.5,) * 3, (0.25,) * 3)


def test_the_command_prints_what_the_function_returns(run, place):
    page = place / "curve.html"
    words = ["learning-curve", *network_options(place), "--support", place / "photos", "--set", "epochs=1"]
    done = run(*words, "--method", "l2", "--shots", "1,3", "--draws", 2, "--report", page)
    assert done.code == 0, done.stderr
    expected = fewshift.learning_curve(
        small_network(), place / "photos", method=L2(epochs=1), shots=(1, 3), draws=2, preprocess=STEPS
    )
    lines = done.stdout.splitlines()
    assert expected.title in lines
    assert expected.words in lines
    assert expected.luck in lines
    rows = [line.split()[:4] for line in lines if line.strip()[:2] in ("1 ", "3 ")]
    assert rows == [list(row.values())[:4] for row in expected.table()]
    written = " ".join(unescape(page.read_text()).split())
    for sentence in (expected.title, expected.words, expected.luck):
        assert sentence[1:] in written


def test_json_is_what_the_function_returns(run, place):
    labelled = place / "labelled"
    (place / "photos").rename(labelled)
    for name in ("ant", "bee", "cat"):
        (place / "photos" / name).mkdir(parents=True)
        for file in sorted((labelled / name).iterdir())[:3]:
            file.rename(place / "photos" / name / file.name)
    words = ["--support", place / "photos", "--labelled", labelled, "--method", "adabn", "--draws", 2, "--json"]
    done = run("learning-curve", *network_options(place), *words)
    assert done.code == 0, done.stderr
    expected = fewshift.learning_curve(
        small_network(), place / "photos", method="adabn", draws=2, labelled=labelled, preprocess=STEPS
    ).to_json()
    facts = json.loads(done.stdout)
    assert facts | {"seconds": 0} == json.loads(json.dumps(expected | {"seconds": 0, "report": None}))


@pytest.mark.parametrize(
    ("words", "code", "facts"),
    [
        (["--shots", "1,two"], 2, "--shots 1,two is no list of numbers"),
        (["--shots", "6"], 1, "class 'ant' has 6 images"),
        (["--method", "tent"], 1, "tent does not learn from labelled images"),
        (["--report", "nowhere/page.html"], 2, "nowhere/page.html"),
        (["--labelled", "nowhere"], 2, "nowhere"),
    ],
)
def test_a_mistake_goes_to_stderr(run, place, words, code, facts):
    done = run("learning-curve", *network_options(place), "--support", place / "photos", *words)
    assert done.code == code
    assert facts in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize("labelled", [False, True])
def test_a_picture_that_would_judge_what_saw_it_is_named_by_its_files(run, place, labelled):
    copy = place / "photos" / "bee" / "again.png"
    words = []
    if labelled:
        copy = place / "others" / "ant" / "again.png"
        for name in ("ant", "bee", "cat"):
            (place / "others" / name).mkdir(parents=True)
            Image.new("RGB", (16, 16), (len(name), 90, ord(name[0]))).save(place / "others" / name / "new.png")
        words = ["--labelled", place / "others"]
    copy.write_bytes((place / "photos" / "ant" / "0.png").read_bytes())
    done = run("learning-curve", *network_options(place), "--support", place / "photos", "--method", "adabn", *words)
    assert done.code == 1
    assert f"{place / 'photos' / 'ant' / '0.png'} and {copy}" in done.stderr

"""`fewshift adapt --sites`: one table, one page, and an exit code that tells."""

from __future__ import annotations

import json

import pytest

from tests.helpers.commands import network_options
from tests.helpers.fleet import fill

QUICK = ["--method", "adabn", "--accept", "always"]


@pytest.fixture
def places(place):
    for seed, name in enumerate(("door", "gate")):
        fill(place / "places" / name, seed)
    return place / "places"


@pytest.fixture
def adapt(run, place, places):
    words = ["adapt", *network_options(place), "--sites", places, "--out", place / "sites"]
    return lambda *more: run(*words, *more)


def test_all_accepted_is_0_and_a_second_run_says_that_all_was_done(adapt, place):
    done = adapt(*QUICK)
    assert done.code == 0, done.stderr
    assert all(word in done.stdout for word in ("2 places", "door", "gate", "90 % interval"))
    assert (place / "sites/report.html").stat().st_size > 1000
    assert {path.name for path in (place / "sites").glob("*.safetensors")} == {"door.safetensors", "gate.safetensors"}
    assert "2 of 2 were done already" in adapt(*QUICK).stdout


def test_some_rejected_is_3_and_some_failed_is_1(adapt, place, places):
    rejected = adapt("--method", "adabn", "--accept", "1000", "--report", place / "page.html")
    assert rejected.code == 3
    assert "2 not recommended" in rejected.stdout
    assert (place / "page.html").exists()
    (places / "gate/ant/0.png").write_bytes(b"no image")
    failed = adapt(*QUICK, "--json")
    assert failed.code == 1
    found = json.loads(failed.stdout)
    assert found["counts"]["failed"] == 1
    assert found["rows"][0]["place"] == "gate"
    assert "gate/ant/0.png is not an image" in found["rows"][0]["note"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--support", "places"], "leave out --support"),
        (["--verbose", "--write-rejected"], "leave out --write-rejected, --verbose"),
        (["--out", "places/sites"], "lies among the places"),
        (["--validate", "labelled"], "labelled does not exist"),
    ],
)
def test_options_for_one_place_are_refused(adapt, place, words, facts):
    paths = [place / word if word.startswith("places") else word for word in words]
    done = adapt(*QUICK, *paths)
    assert done.code == 2
    assert facts in done.stderr


def test_workers_without_sites_are_refused(run, place):
    done = run("adapt", *network_options(place), "--support", place / "photos", "--workers", 2)
    assert done.code == 2
    assert "give --sites" in done.stderr

"""`fewshift show`: what a delta is, without its network."""

from __future__ import annotations

import json
import os

import fewshift
from tests.helpers.commands import network_options


def adapt(run, place, *words):
    out = place / "d.safetensors"
    command = ["adapt", *network_options(place), "--support", place / "photos", "--method", "adabn", "--out", out]
    done = run(*command, *words)
    assert done.code in (0, 3), done.stderr
    return out


def test_method_gain_evidence_classes_network_and_size_are_shown(run, place):
    delta = adapt(run, place, "--accept", "always")
    done = run("show", delta)
    assert done.code == 0, done.stderr
    shown = " ".join(done.stdout.split())
    fingerprint = fewshift.Delta.load(delta).source.weights[:12]
    facts = ["adabn", "accepted", "points", "18 held-out images", "18 labelled images", "ant, bee, cat", fingerprint]
    assert [fact for fact in facts if fact not in shown] == []
    assert f"{delta.stat().st_size:,} bytes" in shown


def test_the_date_is_that_of_the_file(run, place):
    delta = adapt(run, place, "--validate", "none")
    os.utime(delta, (1_000_000_000, 1_000_000_000))
    assert "2001-09-09" in run("show", delta).stdout
    assert json.loads(run("show", delta, "--json").stdout)["file_date"].startswith("2001-09-09")


def test_json_is_one_object_without_tensors(run, place):
    facts = json.loads(run("show", adapt(run, place, "--accept", 200, "--write-rejected"), "--json").stdout)
    assert facts["method"] == "adabn"
    assert facts["outcome"]["accepted"] is False
    assert facts["shots"] == 6
    assert set(facts["tensors"]) == {f"bn{layer}.{name}" for layer in (1, 2) for name in ("weight", "bias")}


def test_what_is_no_delta_is_one_sentence(run, place):
    done = run("show", place / "w.safetensors")
    assert done.code == 1
    assert "is not a whole fewshift delta" in done.stderr
    assert run("show", place / "nowhere.safetensors").code == 2

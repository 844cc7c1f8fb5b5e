"""`fewshift sites`: a folder of deltas as a table, with what `show` says about each and whether it still fits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import fewshift
from fewshift import Delta
from tests.helpers.commands import CLASSES, FACTORY, network_options
from tests.helpers.networks import make_tiny, unsettle


@pytest.fixture
def folder(run, place: Path) -> Path:
    """One site that was accepted, one that was not, one of another network, and an altered file."""
    sites = place / "sites"
    sites.mkdir()
    adapt = ["adapt", *network_options(place), "--support", place / "photos", "--method", "adabn"]
    assert run(*adapt, "--accept", "always", "--out", sites / "yard.safetensors").code == 0
    assert run(*adapt, "--accept", 200, "--write-rejected", "--out", sites / "gate.safetensors").code == 3
    other = make_tiny(seed=4)
    delta = Delta.between(other, unsettle(make_tiny(seed=4), 9), method="lccs", shots=2, classes=tuple(CLASSES))
    delta.save(sites / "other.safetensors")
    content = bytearray((sites / "yard.safetensors").read_bytes())
    content[-1] ^= 1
    (sites / "broken.safetensors").write_bytes(content)
    return sites


def rows_of(text: str) -> dict[str, list[str]]:
    lines = [line.split() for line in text.splitlines() if line.startswith("  ")]
    return {words[0]: words for words in lines if words}


def test_the_table_says_what_show_says(run, place, folder):
    os.utime(folder / "yard.safetensors", (1_000_000_000, 1_000_000_000))
    done = run("sites", folder, "--model", FACTORY, "--weights", place / "w.safetensors")
    assert done.code == 0, done.stderr
    assert f"4 sites in {folder}, 2 of them fit the Tiny" in done.stdout.replace("\n", " ")
    rows = rows_of(done.stdout)
    shown = json.loads(run("show", folder / "yard.safetensors", "--json").stdout)
    gain = shown["outcome"]["gain"]
    facts = ["adabn", "6", f"{gain['point']:+.1f}", f"{gain['low']:+.1f}", f"{gain['high']:+.1f}", "2001-09-09"]
    assert [fact for fact in facts if fact not in rows["yard"]] == []
    assert [rows[name][-1] for name in ("yard", "gate", "other", "broken")] == ["yes", "yes", "no", "no"]
    assert "other: the network has the same architecture but other weights" in done.stdout
    assert "broken.safetensors was altered after it was written" in done.stdout


def test_json_has_every_value_and_python_the_same(run, place, folder):
    network = ["--model", FACTORY, "--weights", place / "w.safetensors"]
    listed = json.loads(run("sites", folder, *network, "--json").stdout)
    sites = {site["site"]: site for site in listed["sites"]}
    assert list(sites) == ["broken", "gate", "other", "yard"]
    assert {name: site["fits"] for name, site in sites.items()} == {
        "broken": False, "gate": True, "other": False, "yard": True,
    }  # fmt: skip
    assert [sites[name]["accepted"] for name in ("yard", "gate", "other", "broken")] == [True, False, None, None]
    assert sites["other"]["method"] == "lccs"
    assert sites["other"]["k"] == 2
    assert sites["yard"]["file_bytes"] == (folder / "yard.safetensors").stat().st_size
    assert sites["yard"]["classes"] == CLASSES
    table = fewshift.list_sites(folder, make_tiny())
    assert json.loads(json.dumps(table.to_json())) == listed
    assert "yard" in repr(table)


def test_without_a_network_whether_a_delta_fits_is_left_open(run, folder):
    sites = {site["site"]: site["fits"] for site in json.loads(run("sites", folder, "--json").stdout)["sites"]}
    assert sites == {"broken": False, "gate": None, "other": None, "yard": None}
    assert rows_of(run("sites", folder).stdout)["yard"][-1] == "-"


def test_other_classes_do_not_fit(folder):
    table = fewshift.list_sites(folder, make_tiny(), classes=["bee", "ant", "cat"])
    assert "made for classes ant, bee, cat, not for bee, ant, cat" in table.problems["yard"]


def test_a_folder_that_is_missing_or_empty_is_one_sentence(run, place):
    done = run("sites", place / "sties")
    assert (done.code, "does not exist" in done.stderr) == (2, True)
    done = run("sites", place / "photos")
    assert (done.code, "there is no delta" in done.stderr) == (1, True)

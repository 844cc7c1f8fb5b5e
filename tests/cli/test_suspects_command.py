"""Labels that look wrong, on the command line and on the page."""

from __future__ import annotations

import json

import pytest

from tests.helpers.commands import network_options


@pytest.fixture
def mislabelled(place):
    """A red image among the green ones."""
    (place / "photos" / "ant" / "0.png").rename(place / "photos" / "bee" / "red.png")
    return place


def test_adapt_names_the_files_whose_label_looks_wrong(run, mislabelled):
    page = mislabelled / "r.html"
    done = run("adapt", *network_options(mislabelled), "--support", mislabelled / "photos", "--report", page)
    assert "1 label looks wrong" in done.stdout
    line = " ".join(done.stdout.split())
    assert f"{mislabelled / 'photos' / 'bee' / 'red.png'} (bee, looks like ant," in line
    assert "without it, of 17 held-out images" in line
    text = " ".join(page.read_text().split())
    assert "Labels that look wrong" in text
    assert f'alt="{mislabelled / "photos" / "bee" / "red.png"}, labelled bee, looks like ant."' in text


def test_suspects_are_dropped_once_on_request(run, mislabelled):
    options = [*network_options(mislabelled), "--support", mislabelled / "photos", "--drop-suspects"]
    facts = json.loads(run("adapt", *options, "--json").stdout)
    assert facts["gain"]["images"] == 17
    (dropped,) = facts["dropped"]
    assert dropped["file"] == str(mislabelled / "photos" / "bee" / "red.png")
    assert (dropped["label_name"], dropped["predicted_name"]) == ("bee", "ant")


def test_a_support_without_suspects_stays_whole(run, place):
    done = run("adapt", *network_options(place), "--support", place / "photos", "--drop-suspects", "--json")
    facts = json.loads(done.stdout)
    assert (facts["suspects"], facts["dropped"], facts["gain_without_suspects"]) == ([], [], None)

"""What a command reads, and what it was not asked to write, is there afterwards as it was before."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.commands import CLASSES, network_options
from tests.helpers.networks import same_state


@pytest.mark.parametrize("option", ["--out", "--report"])
@pytest.mark.parametrize("read", ["--support", "--unlabelled", "--validate"])
def test_a_list_of_labels_is_not_written_over(run, place, option, read):
    table = place / "labels.csv"
    table.write_text(
        "".join(f"{file.relative_to(place)},{file.parent.name}\n" for file in place.glob("photos/*/*.png"))
    )
    before = table.read_bytes()
    own = [] if read == "--support" else ["--support", place / "photos"]
    done = run("adapt", *network_options(place), *own, read, table, option, table, "--accept", "always")
    assert (done.code, "is read as well" in done.stderr) == (2, True)
    assert table.read_bytes() == before


def test_an_image_of_the_support_is_not_written_over_and_a_delta_beside_it_may_be(run, place):
    image = sorted(place.glob("photos/*/*.png"))[0]
    before = image.read_bytes()
    options = [*network_options(place), "--support", place / "photos", "--method", "adabn", "--accept", "always"]
    done = run("adapt", *options, "--out", image)
    assert (done.code, "is read as well" in done.stderr) == (2, True)
    assert image.read_bytes() == before
    for _ in range(2):
        assert run("adapt", *options, "--out", place / "photos" / "site.safetensors").code == 0


@pytest.mark.parametrize("words", [["--support", ""], ["--support="]])
def test_an_empty_word_is_no_folder(run, place, words):
    done = run("adapt", *network_options(place), *words)
    assert (done.code, "is empty" in done.stderr) == (2, True)


def test_many_threads_are_as_many_as_there_may_be(run, place):
    threads = torch.get_num_threads()
    try:
        done = run("evaluate", *network_options(place), place / "photos", "--threads", 100_000)
    finally:
        torch.set_num_threads(threads)
    assert done.code == 0, done.stderr


def test_evaluate_says_in_which_order_it_took_the_classes(run, place):
    options = network_options(place)
    done = run("evaluate", *options, place / "photos")
    assert done.code == 0, done.stderr
    assert f"took the order {', '.join(sorted(CLASSES))}" in done.stderr


@pytest.fixture
def merged(run, place):
    """Runs `merge` into a file; the delta is there already."""
    delta = place / "d.safetensors"
    options = network_options(place)
    done = run("adapt", *options, "--support", place / "photos", "--method", "adabn", "--accept", "always", "-o", delta)
    assert done.code == 0, done.stderr
    return lambda out: run("merge", *options[:4], "--delta", delta, "--out", out)


def test_a_file_beside_the_weights_that_is_no_card_is_kept(merged, place):
    other = place / "new.json"
    other.write_text('{"my": "notes"}')
    done = merged(place / "new.safetensors")
    assert (done.code, "no card" in done.stderr) == (1, True)
    assert json.loads(other.read_text()) == {"my": "notes"}
    assert not (place / "new.safetensors").exists()
    other.unlink()
    for _ in range(2):  # a card is replaced
        assert merged(place / "new.safetensors").code == 0


def test_merged_weights_are_in_the_format_that_the_name_says(merged, place):
    assert merged(place / "one.safetensors").code == 0
    assert merged(place / "two.pt").code == 0
    written = torch.load(place / "two.pt", weights_only=True)
    expected = load_file(place / "one.safetensors")
    assert same_state(written, {name: expected[name] for name in written})
    assert merged(place / "labels.csv").code == 1

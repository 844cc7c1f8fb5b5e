"""Commands read lists of labels, and say which files they left out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.helpers.commands import CLASSES, network_options


@pytest.fixture
def others(place: Path) -> Path:
    """Two images that are not read, and two other files, in two of the class folders."""
    for name in ("ant/scan.jp2", "bee/sign.svg", "bee/notes.txt", "ant/.DS_Store"):
        (place / "photos" / name).write_bytes(b"x")
    return place


LEFT_OUT = "left out of {}: scan.jp2, sign.svg, 2 other files (save .jp2 .svg as JPEG or PNG)"


def test_images_that_adapt_leaves_out_are_a_warning_and_make_it_cautious(run, others):
    words = ["--method", "adabn", "--accept", "always", "--support", others / "photos"]
    done = run("adapt", *network_options(others), *words)
    assert "warning: 2 images were left out: scan.jp2, sign.svg: save .jp2 .svg as JPEG or PNG" in done.stderr
    assert f"left out of {others / 'photos'}: 2 files\n" in done.stderr
    assert "with caution" in done.stdout
    cautions = json.loads(run("adapt", *network_options(others), *words, "--json").stdout)["warnings"]
    (warning,) = [caution for caution in cautions if caution["kind"] == "left out"]
    assert [Path(file).name for file in warning["files"]] == ["scan.jp2", "sign.svg"]


def test_files_that_are_no_images_are_counted_and_no_warning(run, place):
    (place / "photos/ant/README.txt").write_text("five ants")
    done = run("adapt", *network_options(place), "--method", "adabn", "--support", place / "photos")
    assert f"left out of {place / 'photos'}: 1 file\n" in done.stderr
    assert "warning" not in done.stderr


@pytest.mark.parametrize("words", [("predict",), ("evaluate",), ("shift",)])
def test_commands_count_the_files_they_left_out_and_name_the_images(run, others, words):
    name, *more = words
    done = run(name, *network_options(others), *more, others / "photos")
    assert done.code == 0, done.stderr
    assert LEFT_OUT.format(others / "photos") in done.stderr
    assert "left out" not in done.stdout


def test_json_stays_json_beside_files_that_were_left_out(run, others):
    done = run("predict", *network_options(others), others / "photos", "--json")
    assert len(json.loads(done.stdout)) == 18
    assert LEFT_OUT.format(others / "photos") in done.stderr


def test_nothing_is_said_where_every_file_is_an_image(run, place):
    assert "left out" not in run("shift", *network_options(place), place / "photos").stderr


def test_a_table_is_a_support_and_judges(run, place):
    tables = {}
    for name, numbers in (("support", range(4)), ("others", range(4, 6))):
        tables[name] = place / f"{name}.csv"
        rows = [(f"photos/{label}/{number}.png", label.upper()) for label in CLASSES for number in numbers]
        with tables[name].open("w", newline="") as file:
            csv.writer(file, delimiter=";").writerows([("path", "label"), *rows])
    options = [*network_options(place), "--classes", ",".join(CLASSES)]
    adapted = run(
        "adapt", *options, "--support", tables["support"], "--validate", tables["others"], "--method", "adabn",
        "--accept", "always", "--json",
    )  # fmt: skip
    assert adapted.code == 0, adapted.stderr
    assert json.loads(adapted.stdout)["gain"]["images"] == 6
    done = run("evaluate", *options, tables["others"], "--support", tables["support"], "--json")
    assert (done.code, json.loads(done.stdout)["images"]) == (0, 6)
    leak = run("evaluate", *options, tables["support"], "--support", tables["support"])
    assert (leak.code, "also among" in leak.stderr) == (1, True)

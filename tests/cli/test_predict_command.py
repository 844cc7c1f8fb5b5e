"""`fewshift predict` at volume: what was predicted is written, what was left out is named, the exit code says so."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest

from tests.helpers.commands import CLASSES, network_options


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_damaged_images_are_named_at_the_end_with_an_exit_code_of_their_own(run, place):
    for name in ("ant/2.png", "cat/5.png"):
        (place / "photos" / name).write_bytes(b"no image")
    words = ["predict", *network_options(place), place / "photos"]
    done = run(*words)
    assert done.code == 5
    assert len(rows(done.stdout)) == 16
    assert "2 images of 18 left out" in done.stderr
    assert all(name in done.stderr for name in ("ant/2.png", "cat/5.png", "exit code 5"))
    strict = run(*words, "--strict")
    assert strict.code == 1
    assert "ant/2.png" in strict.stderr


def test_paths_patterns_and_lists_are_predicted_in_order(run, place):
    (place / "list.txt").write_text(f"{place / 'photos/cat/0.png'}\n")
    done = run(
        "predict", *network_options(place), place / "photos/bee", place / "photos/a*/[01].png", f"@{place / 'list.txt'}"
    )
    assert done.code == 0, done.stderr
    names = ["/".join(row["file"].split("/")[-2:]) for row in rows(done.stdout)]
    assert names == [*(f"bee/{number}.png" for number in range(6)), "ant/0.png", "ant/1.png", "cat/0.png"]


def test_options_for_rows_change_the_columns(run, place):
    delta = place / "d.safetensors"
    run(
        "adapt",
        *network_options(place),
        "--method",
        "adabn",
        "--accept",
        "always",
        "--support",
        place / "photos",
        "--out",
        delta,
    )
    words = [*network_options(place), "--delta", delta, "--with-source", "--top", 2, "--all-probabilities"]
    done = run("predict", *words, "--workers", 1, "--batch-size", 4, "--device", "cpu", place / "photos")
    assert done.code == 0, done.stderr
    header = ["file", "class", "probability", "source_class", "source_probability", "class_2", "probability_2"]
    assert list(rows(done.stdout)[0]) == [*header, *(f"p_{name}" for name in CLASSES)]


def test_a_table_goes_on_and_says_how_many_rows_it_had(run, place):
    words = ["predict", *network_options(place), "--out", place / "t.csv", "--resume"]
    assert "6 predictions: " in run(*words, place / "photos/ant").stdout
    done = run(*words, place / "photos")
    assert "12 predictions, 6 were there: " in done.stdout
    assert len(rows((place / "t.csv").read_text())) == 18
    refused = run(*words, "--top", 2, place / "photos")
    assert refused.code == 1
    assert "--overwrite" in refused.stderr


def test_an_interruption_exits_with_130_and_names_the_way_on(run, place, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fewshift.deploy.class_table.class_probabilities", interrupt)
    done = run("predict", *network_options(place), place / "photos", "--out", place / "t.csv")
    assert done.code == 130
    assert "t.csv, and --resume goes on" in done.stderr
    assert (place / "t.csv").read_text() == "file,class,probability\n"


def test_json_in_a_file_is_what_json_on_stdout_is(run, place):
    words = ["predict", *network_options(place), place / "photos/ant", "--json"]
    shown = json.loads(run(*words).stdout)
    assert run(*words, "--out", place / "t.json").code == 0
    assert json.loads((place / "t.json").read_text()) == shown
    assert len(shown) == 6


@pytest.mark.parametrize("words", [["photos", "list.txt"], ["@list.txt"]])
def test_a_table_is_not_written_over_a_list_or_an_image(run, place, words):
    (place / "list.txt").write_text(str(place / "photos/ant/0.png"))
    paths = [f"@{place / word[1:]}" if word.startswith("@") else place / word for word in words]
    done = run("predict", *network_options(place), *paths, "--out", place / "list.txt")
    assert done.code == 2
    assert "is read as well" in done.stderr


def test_names_come_from_standard_input(place):
    words = [sys.executable, "-m", "fewshift.cli", "predict", *map(str, network_options(place)), "-"]
    names = f"{place / 'photos/bee/1.png'}\n{place / 'photos/gone.png'}\n"
    done = subprocess.run(words, input=names, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert [row["file"] for row in rows(done.stdout)] == [str(place / "photos/bee/1.png")]
    assert "no such image" in done.stderr


def test_a_folder_gets_parts_and_broken_images_are_named(run, place):
    (place / "photos/bee/1.png").write_bytes(b"no image")
    words = ["predict", *network_options(place), place / "photos", "--out", place / "parts", "--part-size", 8]
    done = run(*words)
    assert done.code == 5
    assert "17 predictions, in 3 Parquet files: " in done.stdout
    assert all(word in done.stderr for word in ("1 image of 18 left out", "bee/1.png", "parts/_broken"))
    again = run(*words, "--resume", "--json")
    assert again.code == 5
    assert json.loads(again.stdout)["earlier"] == 17

"""Names with brackets, colons, line breaks or strange bytes are printed as they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fewshift.cli.console import print_facts, print_table
from tests.helpers.commands import network_options
from tests.helpers.labeller import labeller
from tests.helpers.pictures import picture, save

STRANGE = ["[red]", "[/]", "[/bold]", ":car:", "a[b]c", "[link=x]y"]


@pytest.mark.parametrize("terminal", [False, True])
def test_brackets_and_colons_mean_nothing(capsys, monkeypatch, terminal):
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: terminal)
    monkeypatch.setenv("COLUMNS", "120")
    for name in STRANGE:
        print_table(f"title {name}", [f"column {name}", "n"], [[f"cell {name}", "1"]])
        shown = capsys.readouterr().out
        for word in ("title", "column", "cell"):
            assert f"{word} {name}" in shown
        print_facts(f"title {name}", {f"fact {name}": f"value {name}"})
        shown = capsys.readouterr().out
        for word in ("title", "fact", "value"):
            assert f"{word} {name}" in shown


def test_a_class_with_brackets_does_not_end_predict_after_the_work(command, tmp_path):
    from safetensors.torch import save_file

    save_file(labeller().state_dict(), tmp_path / "w.safetensors")
    save(tmp_path / "scenes" / "a.png", picture(8, 8))
    steps = ["--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25", "--classes", "[/],[red],:car:"]
    network = ["--model", "tests.helpers.labeller:labeller", "--weights", tmp_path / "w.safetensors", *steps]
    done = command("predict", *network, tmp_path / "scenes", "-o", tmp_path / "out")
    assert done.code == 0
    assert any(name in done.stdout for name in ("[/]", "[red]", ":car:"))


def test_a_name_that_is_no_text_is_printed_all_the_same(run, place):
    strange = place / os.fsdecode(b"caf\xe9")
    (place / "photos").rename(strange)
    os.mkfifo(strange / "pipe.png")
    options = [*network_options(place), "--classes", "ant,bee,cat"]
    done = run("predict", *options, strange, "-o", place / os.fsdecode(b"r\xe9sultats.csv"))
    assert (done.code, "18 images of 18 left out" in done.stderr) == (5, True)
    assert "left out of" in done.stderr
    assert "pipe.png (not an ordinary file)" in done.stderr
    assert "predictions: " in done.stdout
    assert "caf\\xe9/ant/0.png: the name is not UTF-8 text" in done.stderr


def test_what_runs_code_says_so(command):
    for name in ("adapt", "predict", "studio", "train"):
        words = " ".join(command(name, "--help").stdout.replace("│", " ").split())
        assert "package.module:factory, which runs that code" in words


def test_a_pipe_in_a_list_of_images_is_not_waited_for(command, tmp_path):
    from safetensors.torch import save_file

    save_file(labeller().state_dict(), tmp_path / "w.safetensors")
    save(tmp_path / "a.png", picture(8, 8))
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "files.txt").write_text(f"{tmp_path / 'a.png'}\n{tmp_path / 'b.png'}\n")
    steps = ["--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25", "--classes", "grass,water,stone"]
    network = ["--model", "tests.helpers.labeller:labeller", "--weights", tmp_path / "w.safetensors", *steps]
    done = command("predict", *network, f"@{tmp_path / 'files.txt'}", "-o", tmp_path / "out")
    assert done.code == 5
    assert "b.png cannot be read (not an ordinary file)" in done.stderr
    assert [path.name for path in (tmp_path / "out/labels").iterdir()] == ["a.png"]
    assert Path(tmp_path / "out/overlays/a.jpg").is_file()


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("predict", LONG),
        ("evaluate", LONG),
        ("adapt", "--support", LONG),
        ("merge", "--delta", LONG, "-o", "new.safetensors"),
        ("inspect", "--weights", LONG),
        ("show", LONG),
    ],
)
def test_a_name_that_no_file_can_have_is_one_sentence(command, words):
    network = [] if words[0] == "show" else ["--model", "tests.helpers.labeller:labeller"]
    done = command(*words, *network)
    assert done.code in (1, 2)
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_link_that_leads_nowhere_is_named(command, tmp_path):
    (tmp_path / "broken.png").symlink_to("gone.png")
    done = command("predict", tmp_path / "broken.png", "--model", "tests.helpers.labeller:labeller")
    assert "broken.png is a link to gone.png, which does not exist: mend the link" in done.stderr

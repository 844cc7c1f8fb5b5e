"""The command line, as a person would use it: real files, real exit codes."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import fewshift
from fewshift.core.network import logits_of
from fewshift.lab import demo
from fewshift.lab.datasets import digits
from fewshift.methods.auto import Auto
from tests.helpers.commands import CLASSES, FACTORY, SIZES, network_options, small_network
from tests.helpers.networks import make_tiny

SMALL_GRID = """title = "Small"
dataset = "digits"
source = "mnist"
targets = ["uci"]
seeds = [0, 1]
max_test = 50

[[rows]]
method = "source"
label = "Source model"

[[rows]]
method = "adabn"
label = "AdaBN"
shots = [5]
"""


def test_adapt_predict_evaluate_merge_and_revert_are_one_straight_line(run, place):
    delta, page, merged, back = (place / name for name in ("d.safetensors", "r.html", "m.safetensors", "b.safetensors"))
    options = network_options(place)
    done = run("adapt", *options, "--support", place / "photos", "--shots", 5, "--out", delta, "--report", page)
    assert done.code == 0, done.stderr
    assert delta.stat().st_size < 20_000
    assert "<html" in page.read_text()

    table = place / "p.csv"
    assert run("predict", *options, "--delta", delta, place / "photos", "--out", table).code == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 18
    assert {row["class"] for row in rows} <= set(CLASSES)
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)
    adapted = fewshift.apply(small_network(), delta)
    with torch.no_grad():
        image = fewshift.Preprocess(None, 16, (0.5,) * 3, (0.25,) * 3)(Image.open(rows[0]["file"]))
        best = logits_of(adapted(image.unsqueeze(0))).argmax(1)
    assert rows[0]["class"] == CLASSES[int(best)]

    evaluated = run("evaluate", *options, "--delta", delta, place / "photos", "--json")
    assert evaluated.code == 0, evaluated.stderr
    accuracy = json.loads(evaluated.stdout)["accuracy"]
    share = 100 * sum(row["class"] == Path(row["file"]).parent.name for row in rows) / 18
    assert accuracy["adapted"] == pytest.approx(share)

    source = ["--model", FACTORY, "--weights", place / "w.safetensors"]
    assert run("merge", *source, "--delta", delta, "--out", merged).code == 0
    assert all(torch.equal(tensor, adapted.state_dict()[name]) for name, tensor in load_file(merged).items())
    assert json.loads(merged.with_suffix(".json").read_text())["classes"] == CLASSES
    assert run("merge", "--model", FACTORY, "--weights", merged, "--delta", delta, "--out", back, "--revert").code == 0
    assert all(
        torch.equal(tensor, load_file(place / "w.safetensors")[name]) for name, tensor in load_file(back).items()
    )


def test_json_is_one_object_with_the_settings(run, place):
    words = ["adapt", *network_options(place), "--support", place / "photos", "--method", "lccs", "--accept", "always"]
    settings = [word for pair in ("epochs=1", "init=none", "n=0.9", "classifier=source") for word in ("--set", pair)]
    done = run(*words, "--json", *settings)
    facts = json.loads(done.stdout)
    assert facts["accepted"] is True
    assert facts["settings"] | {"epochs": 1, "init": None, "n": 0.9, "classifier": "source"} == facts["settings"]
    assert [layer["name"] for layer in facts["layers"]] == ["bn1", "bn2"]


def test_results_go_to_stdout_and_nothing_else_does(run, place):
    done = run("predict", *network_options(place), place / "photos" / "ant")
    assert done.stdout.splitlines()[0] == "file,class,probability"
    assert len(done.stdout.splitlines()) == 7


def no_class_folders(place):
    (place / "photos2").mkdir()
    return ["--support", place / "photos2"]


def empty_class(place):
    (place / "photos" / "dog").mkdir()
    return ["--support", place / "photos"]


def unknown_class(place):
    (place / "photos" / "ant").rename(place / "photos" / "wasp")
    return ["--support", place / "photos", "--classes", "ant,bee,cat"]


def not_an_image(place):
    (place / "photos" / "ant" / "0.png").write_bytes(b"hello")
    return ["--support", place / "photos"]


def empty_image(place):
    (place / "photos" / "ant" / "0.png").write_bytes(b"")
    return ["--support", place / "photos"]


def truncated_image(place):
    path = place / "photos" / "ant" / "0.png"
    path.write_bytes(path.read_bytes()[:200])
    return ["--support", place / "photos"]


def one_class(place):
    for name in ("bee", "cat"):
        for file in (place / "photos" / name).iterdir():
            file.unlink()
        (place / "photos" / name).rmdir()
    return ["--support", place / "photos", "--classes", "ant,bee,cat"]


def too_many_shots(place):
    return ["--support", place / "photos", "--shots", 7]


def different_sizes(place):
    Image.new("RGB", (20, 30)).save(place / "photos" / "ant" / "0.png")
    return ["--support", place / "photos"]


def unknown_method(place):
    return ["--support", place / "photos", "--method", "magic"]


def unknown_setting(place):
    return ["--support", place / "photos", "--set", "speed=9"]


def bad_setting(place):
    return ["--support", place / "photos", "--method", "lccs", "--set", "grid=1"]


def bad_condition(place):
    return ["--support", place / "photos", "--accept", "perhaps"]


def bad_size(place):
    return ["--support", place / "photos", "--method", "adabn", "--size", "small"]


def bad_seed(place):
    return ["--support", place / "photos", "--seed", -1]


def mistyped(place):
    return ["--support", place / "photo"]


def unwritable(place):
    return ["--support", place / "photos", "--out", place / "no" / "where.safetensors"]


BAD = {
    no_class_folders: "has no class folders",
    empty_class: "'dog'",
    unknown_class: "'wasp'",
    not_an_image: "0.png",
    empty_image: "0.png",
    truncated_image: "0.png",
    one_class: "every support image is of class 'ant'",
    too_many_shots: "has 6 images, 7 shots asked: add 1 or ask for 6",
    unknown_method: "there is no method 'magic'",
    unknown_setting: "no setting 'speed'",
    bad_setting: "grid=1 is too small",
    bad_condition: "--accept perhaps",
    bad_size: "not of adabn",
    bad_seed: "--seed -1",
    mistyped: "photo does not exist: did you mean",
    unwritable: "cannot write",
}


USAGE = {unknown_method, unknown_setting, bad_setting, bad_condition, bad_size, bad_seed, mistyped, unwritable}


@pytest.mark.parametrize("mistake", BAD, ids=lambda function: function.__name__)
def test_a_mistake_is_one_sentence_and_nothing_written_and_the_exit_code_tells_usage(run, place, mistake):
    words = mistake(place)
    before = sorted(place.rglob("*"))
    done = run(
        "adapt", *network_options(place), *words, *([] if "--out" in words else ["--out", place / "d.safetensors"])
    )
    assert done.code == (2 if mistake in USAGE else 1)
    assert BAD[mistake] in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert sorted(place.rglob("*")) == before


def test_different_sizes_without_a_crop_are_refused(run, place):
    words = different_sizes(place)
    options = ["--model", FACTORY, "--weights", place / "w.safetensors", "--mean", "0.5,0.5,0.5", "--std", "1,1,1"]
    done = run("adapt", *options, *words)
    assert done.code == 1
    assert "crop" in done.stderr


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


def test_a_pickle_is_never_unpickled(run, place):
    (place / "w.pth").write_bytes(pickle.dumps({"x": Bomb()}))
    done = run("adapt", "--model", FACTORY, "--weights", place / "w.pth", "--support", place / "photos", *SIZES)
    assert done.code == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert not Path("exploded").exists()


def test_a_delta_for_another_network_is_refused(run, place):
    delta = place / "d.safetensors"
    run("adapt", *network_options(place), "--support", place / "photos", "--out", delta)
    save_file(
        {name: tensor + 0 if "num" in name else tensor * 1.5 for name, tensor in small_network().state_dict().items()},
        place / "w.safetensors",
    )
    done = run("predict", *network_options(place), "--delta", delta, place / "photos")
    assert done.code == 1
    assert "other weights" in done.stderr


def test_usage_errors_exit_with_two(run):
    assert run("adapt").code == 2
    assert run("fly").code == 2
    assert run("list", "clouds").code == 2


@pytest.mark.parametrize(
    ("words", "typo"),
    [
        (["adapt", "--support", "photos"], "--support"),
        (["adapt", "--support", "photos", "--unlabelled", "photos"], "--unlabelled"),
        (["adapt", "--support", "photos", "--validate", "photos"], "--validate"),
        (["evaluate", "photos", "--delta", "w.safetensors"], "--delta"),
        (["predict", "photos"], "photos"),
        (["compare", "--support", "photos"], "--weights"),
    ],
)
def test_a_mistyped_path_is_noticed_before_the_network_is_built(run, place, words, typo):
    full = ["--model", "tests.helpers.commands:never", "--weights", "w.safetensors", *words[1:]]
    paths = [place / word if (place / word).exists() else word for word in full]
    at = paths.index(typo) + 1 if typo.startswith("-") else paths.index(place / typo)
    paths[at] = Path(f"{paths[at]}x")
    done = run(words[0], *paths)
    assert done.code == 2
    assert f"{paths[at]} does not exist: did you mean {str(paths[at])[:-1]}?" in done.stderr


def test_list_methods_names_every_method_with_its_paper_and_settings(run):
    rows = json.loads(run("list", "methods", "--json").stdout)["methods"]
    assert [row["name"] for row in rows] == list(fewshift.METHODS)
    assert next(row for row in rows if row["name"] == "lccs")["settings"]["epochs"] == 10
    text = run("list", "methods").stdout
    assert all(name in text for name in fewshift.METHODS)


def test_inspect_tells_layers_head_and_counts(run):
    done = run("inspect", "--model", FACTORY, "--size", 16, "--json")
    facts = json.loads(done.stdout)
    assert facts["head"] == "fc"
    assert facts["coefficients"] == 8
    assert "bn1" in run("inspect", "--model", FACTORY, "--size", 16).stdout


def test_the_demo_prints_its_table_and_writes_its_report(run, place, monkeypatch):
    quick = Auto(epochs=1)
    monkeypatch.setattr(digits, "source_network", lambda: make_tiny(10, channels=1))
    monkeypatch.setattr(demo, "adapt", partial(fewshift.adapt, method=quick, validate=None))
    monkeypatch.setattr(demo, "PLAN", (*demo.PLAN[:2], demo.Plan(quick, 5)))
    done = run("demo", "--draws", 1, "--out", place / "demo.html")
    assert done.code == 0, done.stderr
    assert "auto" in done.stdout
    assert str(place / "demo.html") in done.stdout
    assert (place / "demo.html").stat().st_size > 10_000
    assert digits.WEIGHTS.stat().st_size <= 1_000_000


def test_help_and_import_stay_light():
    """Neither the package nor the command line imports torch before it is needed."""
    code = "import sys, fewshift, fewshift.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_interrupting_leaves_no_partial_output(run, place, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    done = run("adapt", *network_options(place), "--support", place / "photos", "--out", place / "d.safetensors")
    assert done.code not in (0, 3)
    assert sorted(path.name for path in place.iterdir()) == ["photos", "w.safetensors"]


def test_evaluate_uses_the_classes_and_the_preprocessing_of_the_delta(run, place):
    delta = place / "d.safetensors"
    source = ["--model", FACTORY, "--weights", place / "w.safetensors"]
    run("adapt", *network_options(place), "--support", place / "photos", "--out", delta)
    whole = json.loads(run("evaluate", *source, "--delta", delta, place / "photos", "--json").stdout)
    options = network_options(place)
    assert whole == json.loads(run("evaluate", *options, "--delta", delta, place / "photos", "--json").stdout)
    for file in (place / "photos" / "ant").iterdir():
        file.unlink()
    (place / "photos" / "ant").rmdir()
    part = json.loads(run("evaluate", *source, "--delta", delta, place / "photos", "--json").stdout)
    assert part["per_class"] == {name: whole["per_class"][name] for name in ("bee", "cat")}
    refused = run("evaluate", *options, place / "photos")
    assert refused.code == 1
    assert "2 classes and the network 3 outputs" in refused.stderr


def test_evaluate_refuses_images_that_were_adapted_to(run, place):
    shown = [*network_options(place), "--support", place / "photos"]
    evaluated = run("evaluate", *shown, place / "photos")
    assert evaluated.code == 1
    assert "18 of the 18 support images are also among the 18 evaluation images" in evaluated.stderr
    assert "Traceback" not in evaluated.stderr

    generator = torch.Generator().manual_seed(9)
    for name in CLASSES:
        (place / "new" / name).mkdir(parents=True)
        pixels = torch.randint(0, 255, (16, 16, 3), generator=generator)
        Image.fromarray(pixels.byte().numpy()).save(place / "new" / name / "0.png")
    assert run("evaluate", *shown, place / "new").code == 0


def test_evaluate_warns_in_one_sentence_of_images_that_look_like_those_adapted_to(run, place):
    again = place / "again"
    for name in CLASSES:
        (again / name).mkdir(parents=True)
        Image.open(place / "photos" / name / "0.png").resize((64, 64)).save(again / name / "larger.png")
    evaluated = run(
        "evaluate", *network_options(place), "--classes", ",".join(CLASSES), "--support", place / "photos", again
    )
    assert evaluated.code == 0
    assert re.match("warning: 3 of the 18 support images .* 3 evaluation", evaluated.stderr)
    assert evaluated.stderr.count("\n") == 1


@pytest.mark.parametrize("form", ["same file", "weights", "device", "folder", "long name"])
def test_outputs_that_would_destroy_something_are_refused_before_the_work(run, place, form):
    words = {
        "same file": ["--out", place / "x", "--report", place / "x"],
        "weights": ["--out", place / "w.safetensors"],
        "device": ["--out", "/dev/null"],
        "folder": ["--out", place / "photos"],
        "long name": ["--out", place / ("x" * 300)],
    }[form]
    before = (place / "w.safetensors").read_bytes()
    done = run("adapt", *network_options(place), "--support", place / "photos", *words)
    assert done.code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert (place / "w.safetensors").read_bytes() == before
    assert not Path("/dev/null").is_file()
    assert sorted(path.name for path in place.iterdir()) == ["photos", "w.safetensors"]


def test_a_link_is_written_through(run, place):
    (place / "link").symlink_to(place / "real")
    run("adapt", *network_options(place), "--support", place / "photos", "--out", place / "link")
    assert (place / "link").is_symlink()
    assert (place / "real").is_file()


def test_a_broken_link_among_the_images_is_named(run, place):
    (place / "photos" / "ant" / "gone.png").symlink_to(place / "nowhere.png")
    done = run("adapt", *network_options(place), "--support", place / "photos")
    assert done.code == 1
    assert "gone.png" in done.stderr


def test_random_weights_are_what_inspect_and_a_curious_user_may_ask_for(run):
    assert run("inspect", "--model", FACTORY, "--weights", "random", "--size", 16).code == 0


def test_unlabelled_images_suffice_for_adabn(run, place):
    done = run("adapt", *network_options(place), "--unlabelled", place / "photos", "--method", "adabn")
    assert done.code == 0, done.stderr
    assert "18 unlabelled images" in done.stdout
    assert run("adapt", *network_options(place)).code == 2


def test_the_page_of_methods_is_what_the_classes_say():
    from fewshift.methods import catalog as catalogue

    page = Path(__file__).parents[2] / "docs" / "methods.md"
    assert page.read_text() == catalogue.markdown() + "\n", "run `make docs`"


def test_bench_and_report_run_a_grid_with_no_data_and_only_once(run, place):
    grid, folder = place / "small.toml", place / "run"
    grid.write_text(SMALL_GRID)
    first = run("bench", grid, "--out", folder, "--workers", 1, "--json")
    assert first.code == 0, first.stderr
    assert json.loads(first.stdout) == {"folder": str(folder), "cells": 4, "run": 4, "failed": 0, "missing": 0}
    assert json.loads(run("bench", grid, "--out", folder, "--json").stdout)["run"] == 0
    table = run("report", folder)
    assert "| AdaBN | 5 |" in table.stdout
    assert {"small.md", "small.csv", "small.tex"} == {path.name for path in (folder / "tables").iterdir()}
    assert (folder / "report.html").is_file()
    lines = json.loads(run("report", folder, "--json").stdout)["tables"]["small"]["lines"]
    assert [len(line["entries"]["uci"]["values"]) for line in lines] == [2, 2]
    nothing = run("report", place)
    assert nothing.code == 1
    assert "give the folder that `fewshift bench` named" in nothing.stderr


def test_list_grids_tells_what_can_be_run(run):
    grids = {grid["name"]: grid for grid in json.loads(run("list", "grids", "--json").stdout)["grids"]}
    assert grids["smoke"]["cells"] == 15
    assert "features_digits" in grids
    assert run("list", "grids", "--folder", "nowhere").code == 2


@pytest.mark.parametrize(
    ("options", "sentence"), [(["--engine", "magic"], "no engine"), (["--address", "x"], "address")]
)
def test_an_engine_that_is_none_is_named(run, place, options, sentence):
    done = run("bench", "smoke", "--out", place / "run", *options)
    assert done.code == 1
    assert sentence in done.stderr


def test_a_grid_without_its_data_fails_cell_by_cell_in_one_sentence(run, place):
    grid = place / "g.toml"
    head = 'title = "x"\ndataset = "pacs"\nsource = "pacs-{target}"\ntargets = ["photo"]\nseeds = [0]\n'
    grid.write_text(head + '[[rows]]\nmethod = "source"\n')
    done = run("bench", grid, "--out", place / "run")
    assert done.code == 1
    assert done.stderr.count("\n") == 1
    assert "pass --weights FOLDER with pacs-photo.safetensors" in done.stderr


def test_list_datasets_tells_where_to_get_them(run):
    names = [row["name"] for row in json.loads(run("list", "datasets", "--json").stdout)["datasets"]]
    assert {"pacs", "visda", "office31", "officehome", "camelyon17", "iwildcam", "domainnet", "digits"} <= set(names)


def test_a_network_with_two_heads_has_no_delta_and_that_is_said_before_the_work(run, place):
    words = ["adapt", *network_options(place), "--support", place / "photos", "--method", "late-fusion"]
    words += ["--accept", "always"]
    done = run(*words, "--out", place / "d.safetensors")
    assert done.code == 2
    assert "--set scores=logits" in done.stderr
    assert run(*words, "--out", place / "d.safetensors", "--set", "scores=logits").code == 0


@pytest.mark.parametrize(
    "words", [["--crop", "10000000"], ["--crop", "-3"], ["--set", "lr=abc"], ["--set", "epochs=1.5"]]
)
def test_impossible_numbers_are_one_sentence(run, place, words):
    done = run("adapt", *network_options(place), "--support", place / "photos", *words)
    assert done.code in (1, 2)
    assert "Traceback" not in done.stderr

"""`fewshift train`, as a person would use it: real files, real exit codes, a real kill."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fewshift.core.labels import PIXELS
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.lab.training import ALGORITHMS
from fewshift.lab.training.checkpoint import Checkpoint
from fewshift.lab.training.recipes import find_recipe
from fewshift.lab.training.source import train_source
from fewshift.models import libraries as models
from fewshift.models.cards import known_card
from tests.helpers.networks import make_tiny, same_state


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    """Run a command in this process, in an empty folder, through the real entry point."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEWSHIFT_DATA", raising=False)
    return command


def small_network(num_classes: int = 10) -> torch.nn.Module:
    return make_tiny(num_classes, channels=1)


SMALL = ["--arch", "tests.cli.test_train_command:small_network", "--recipe", "quick"]
UCI = ["train", "digits", "--source", "uci", *SMALL, "--epochs", "3", "--set", "augment=none"]
HOME = Path(__file__).parents[2]


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_is_called_slow_where_it_is_slow(run, monkeypatch, fast):
    monkeypatch.setattr("fewshift.lab.training.recipes.bfloat16_is_fast", lambda: fast)
    done = run(*UCI, "--epochs", "1", "--set", "precision=bfloat16")
    assert done.code == 0, done.stderr
    assert ("slower in bfloat16" in done.stderr) is not fast


def test_a_short_training_makes_a_network_that_is_loaded_and_used_at_once(run, tmp_path):
    done = run("train", "digits", "--target", "mnist", "--arch", "digits", "--recipe", "quick", "--json")
    assert done.code == 0, done.stderr
    assert "starting from random weights" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["weights"] == "digits-mnist.safetensors"
    card = json.loads((tmp_path / "digits-mnist.json").read_text())
    assert summary["card"] == card
    assert (card["sources"], card["target"], card["algorithm"]) == (["uci"], "mnist", {"name": "erm"})
    assert card["images"] == {"train": 1437, "source_validation": 360}
    assert card["versions"].keys() >= {"fewshift", "torch", "timm"}
    assert card["source_validation_accuracy"] >= 75  # seeds 0 to 2 had 83.6 to 87.2

    loaded = models.load(None, tmp_path / "digits-mnist.safetensors")
    assert (known_card(loaded).arch, known_card(loaded).preprocess) == ("digits", digits.PREPROCESS)
    assert known_card(loaded).classes == tuple("0123456789")
    _, (images, labels) = digits.split("uci")
    with torch.no_grad():
        right = (loaded(digits.normalise(images)).argmax(1) == labels).double().mean()
    assert card["source_validation_accuracy"] == round(100 * float(right), 2)
    assert not (tmp_path / "digits-mnist.resume").exists()


def test_a_killed_training_goes_on_to_the_same_bits(run, tmp_path):
    assert run(*UCI, "--out", "whole.safetensors").code == 0
    state = tmp_path / "killed.resume"
    command = [sys.executable, "-m", "fewshift.cli", *UCI, "--out", "killed.safetensors"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HOME / 'src'}{os.pathsep}{HOME}"}
    child = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    patience = time.monotonic() + 120
    while not state.exists() and child.poll() is None and time.monotonic() < patience:
        time.sleep(0.005)
    child.kill()  # SIGKILL, in the second epoch: the first is on disk
    _, errors = child.communicate()
    assert state.exists(), errors.decode()
    card = json.loads((tmp_path / "killed.json").read_text())
    assert len(card["history"]) < 3
    assert not card["finished"]

    refused = run(*UCI, "--out", "killed.safetensors")
    assert refused.code == 1
    assert re.search("unfinished.*--resume.*--overwrite", refused.stderr)
    other = run(*UCI, "--out", "killed.safetensors", "--resume", "--lr", "0.2")
    assert other.code == 1
    assert re.search(r"lr 0\.1 .*0\.2", other.stderr)

    resumed = run(*UCI, "--out", "killed.safetensors", "--resume")
    assert resumed.code == 0, resumed.stderr
    assert "epoch 1 of 3" not in resumed.stderr
    assert "epoch 3 of 3" in resumed.stderr
    assert same_state(*(load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "killed")))
    assert not state.exists()

    began = (tmp_path / "killed.safetensors").stat().st_mtime_ns
    again = run(*UCI, "--out", "killed.safetensors", "--resume")
    assert again.code == 0
    assert again.stdout == resumed.stdout
    assert (tmp_path / "killed.safetensors").stat().st_mtime_ns == began


def test_a_finished_network_is_written_over_only_when_asked(run, tmp_path):
    words = ["train", "digits", "--source", "uci", *SMALL, "--epochs", 1]
    file = tmp_path / "digits-from-uci.safetensors"
    assert run(*words, "--set", "augment=none").code == 0
    assert json.loads(file.with_suffix(".json").read_text())["recipe"]["augment"] == "none"
    first = file.read_bytes()

    for more in ([], ["--resume"]):
        refused = run(*words, *more)
        assert refused.code == 1
        assert re.search("augment 'none' .*'shift'.*--out.*--overwrite", refused.stderr.splitlines()[-1])
    finished = run(*words, "--set", "augment=none")
    assert finished.code == 1
    assert finished.stderr.endswith("is finished: train it again with --overwrite\n")
    assert "choose one of them" in run(*words, "--resume", "--overwrite").stderr
    assert file.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-from-uci.json", "digits-from-uci.safetensors"]

    again = run(*words, "--overwrite")
    assert again.code == 0, again.stderr
    assert file.read_bytes() != first


def test_python_trains_what_the_command_trains(run, tmp_path):
    words = ["train", "digits", "--source", "uci", *SMALL, "--epochs", 1, "--set", "augment=none"]
    assert run(*words, "--out", "command.safetensors").code == 0
    model = train_source(
        "digits",
        sources=["uci"],
        arch=SMALL[1],
        recipe="quick",
        settings={"epochs": 1, "augment": "none"},
        out="python.safetensors",
    )
    assert same_state(model.state_dict(), load_file(tmp_path / "command.safetensors"))
    assert known_card(model).classes == tuple("0123456789")
    assert not model.training


def test_weights_that_no_card_tells_of_are_not_written_over(run, tmp_path):
    file = tmp_path / "digits-from-uci.safetensors"
    file.write_bytes(b"somebody's")
    refused = run("train", "digits", "--source", "uci", *SMALL)
    assert refused.code == 1
    assert "does not say how it was trained: choose another --out" in refused.stderr
    assert file.read_bytes() == b"somebody's"


def test_the_weights_to_begin_from_are_not_written_over_through_a_link(run, tmp_path):
    save_file(small_network().state_dict(), tmp_path / "start.safetensors")
    (tmp_path / "link.safetensors").symlink_to("start.safetensors")
    words = ["--weights", "link.safetensors", "--out", "start.safetensors", "--overwrite"]
    refused = run("train", "digits", "--source", "uci", *SMALL, *words)
    assert refused.code == 1
    assert re.search("start.safetensors .*link.safetensors .*same file", refused.stderr)


def test_two_trainings_into_one_file_are_one_sentence(run, tmp_path):
    with Checkpoint(tmp_path / "digits-from-uci.safetensors", {}).alone():
        refused = run("train", "digits", "--source", "uci", *SMALL)
    assert refused.code == 1
    assert refused.stderr.splitlines()[-1].startswith("error: another training writes digits-from-uci.safetensors: ")


def test_resume_without_anything_to_resume_begins(run):
    done = run("train", "digits", "--source", "uci", *SMALL, "--epochs", 1, "--resume")
    assert done.code == 0, done.stderr
    assert "nothing to resume in digits-from-uci.resume: starting with the first epoch" in done.stderr
    assert "--model tests.cli.test_train_command:small_network --weights digits-from-uci.safetensors" in done.stdout


@pytest.fixture
def animals(tmp_path, monkeypatch) -> Path:
    """A data set of two domains on disk: red cats and green dogs, by day and by night."""
    for brightness, domain in ((200, "day"), (60, "night")):
        for channel, name in enumerate(("cat", "dog")):
            folder = tmp_path / "data" / "animals" / domain / name
            folder.mkdir(parents=True)
            for number in range(12):
                colour = [number, number, number]
                colour[channel] += brightness
                Image.new("RGB", (40, 30 + number), tuple(colour)).save(folder / f"{number}.png")
    places = {"domains": ("day", "night"), "targets": ("day", "night"), "counts": None, "class_counts": {}}
    known = replace(COLLECTIONS["pacs"], name="animals", title="Animals", classes=("cat", "dog"), **places)
    monkeypatch.setitem(COLLECTIONS, "animals", known)
    return tmp_path / "data"


def test_a_library_network_is_used_by_its_file_alone(run, tmp_path, animals):
    start = models.load("timm:test_resnet", "random", classes=["a", "b", "c"])
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    (tmp_path / "start.json").write_text(json.dumps({"arch": "timm:test_resnet", "mean": [0.4] * 3, "std": [0.2] * 3}))
    words = ["--arch", "timm:test_resnet", "--weights", "start.safetensors", "--recipe", "quick", "--size", "32"]
    more = ["--batch-size", "8", "--epochs", "4", "--set", "held_out=0.25", "--set", "patience=3"]
    done = run("train", "animals", "--target", "night", *words, *more, "--data-root", animals)
    assert done.code == 0, done.stderr
    assert "use it: fewshift adapt --weights animals-night.safetensors --support FOLDER" in done.stdout
    assert "random" not in done.stderr

    loaded = models.load(None, tmp_path / "animals-night.safetensors")
    assert (known_card(loaded).arch, known_card(loaded).classes) == ("timm:test_resnet", ("cat", "dog"))
    assert (known_card(loaded).preprocess.resize, known_card(loaded).preprocess.crop) == (36, 32)
    assert (known_card(loaded).preprocess.mean, known_card(loaded).preprocess.std) == ((0.4,) * 3, (0.2,) * 3)
    evaluated = run("evaluate", "--weights", "animals-night.safetensors", animals / "animals" / "day", "--json")
    assert evaluated.code == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["images"] == 24


def test_a_network_that_its_algorithm_changed_is_used_by_its_file_alone(run, tmp_path):
    words = ["--recipe", "quick", "--epochs", 1, "--algorithm", "iternorm", "--set", "group=8", "--set", "layers=bn1"]
    done = run("train", "digits", "--source", "uci", *words, "--out", "d.safetensors")
    assert done.code == 0, done.stderr
    loaded = models.load(None, tmp_path / "d.safetensors")
    assert loaded.bn1.group == 8
    assert same_state(loaded.state_dict(), load_file(tmp_path / "d.safetensors"))
    _, (images, labels) = digits.split("uci")
    with torch.no_grad():
        right = (loaded(digits.normalise(images)).argmax(1) == labels).double().mean()
    assert json.loads((tmp_path / "d.json").read_text())["source_validation_accuracy"] == round(100 * float(right), 2)


def test_algorithms_and_recipes_are_listed(run):
    rows = json.loads(run("list", "algorithms", "--json").stdout)["algorithms"]
    assert [row["name"] for row in rows] == list(ALGORITHMS)
    assert all(row["paper"] and row["what it does"] for row in rows)
    assert "Vapnik" in run("list", "algorithms").stdout
    rows = json.loads(run("list", "recipes", "--json").stdout)["recipes"]
    settings = {(row["name"], row["dataset"]): row["settings"] for row in rows}
    assert settings["paper", "pacs"] == find_recipe("paper", "pacs").settings()
    assert settings["quick", "other scenes"] == find_recipe("quick", "gtav", PIXELS).settings()
    listing = run("list", "recipes", "--filter", "quick").stdout
    assert "epochs=2, lr=0.1" in listing
    assert "pacs" not in listing
    assert "camvid" not in run("list", "recipes", "--filter", "pacs").stdout


def test_a_full_disk_is_one_sentence(run, tmp_path, monkeypatch):
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    done = run("train", "digits", "--source", "uci", *SMALL, "--epochs", 1)
    assert done.code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(r"digits-from-uci\.json: No space left .*no checkpoint", errors[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--target", "moon"], "digits .*'moon'.*mnist, uci"),
        (["--target", "uci", "--source", "uci"], "'uci' is both source and target"),
        ([], "--target DOMAIN .*--source DOMAIN"),
        (["--target", "uci", "--epochs", 0], "epochs=0 .*at least 1"),
        (["--target", "uci", "--lr", "-1"], r"lr=-1\.0 .*from 0"),
        (["--target", "uci", "--size", 10**6], "1000000.*9459 pixels"),
        (["--target", "uci", "--size", 64], "28x28 pixels.* 64"),
        (["--target", "uci", "--batch-size", 9999], "4000 training images .*9999.*batch_size"),
        (["--target", "uci", "--algorithm", "magic"], "algorithm 'magic'.*erm"),
        (["--target", "uci", "--recipe", "slow"], "recipe 'slow'.*paper, quick"),
        (["--target", "uci", "--set", "magic=1"], "erm .*setting 'magic'"),
        (["--target", "uci", "--set", "epochs=none"], "epochs='none' .*whole number"),
        (["--target", "uci", "--set", "held_out=0.3"], r"digits .*fifth .*0\.2 or 0"),
        (["--target", "uci", "--set", "weight_decay=lots"], "weight_decay='lots' .*from 0"),
        (["--target", "uci", "--out", "w.pt"], r"\.safetensors"),
        (["--target", "uci", "--weights", "none.safetensors"], r"no weights at none\.safetensors"),
        (["--target", "uci", "--weights", "imagenet"], "digits .*no imagenet weights"),
    ],
)
def test_a_mistake_is_one_sentence(run, words, facts):
    done = run("train", "digits", "--arch", "digits", *words)
    assert done.code in (1, 2)
    assert re.search(facts, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_written_is_a_mistake_of_usage(run):
    done = run("train", "digits", "--arch", "digits", "--target", "uci", "--out", "no/w.safetensors")
    assert done.code == 2
    assert "folder that exists" in done.stderr


def test_a_checkpoint_of_another_architecture_is_one_sentence(run, tmp_path):
    save_file(make_tiny(10, channels=1).state_dict(), tmp_path / "tiny.safetensors")
    done = run("train", "digits", "--target", "uci", "--arch", "digits", "--weights", "tiny.safetensors")
    assert done.code == 1
    assert re.match(r"error: tiny\.safetensors .*another architecture .*digits", done.stderr)
    assert done.stderr.count("\n") == 1

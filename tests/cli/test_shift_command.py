"""`fewshift shift`: a verdict, what it means, a table, or JSON; the exit code is 0 unless an alarm is to fail."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import fewshift
from fewshift import Preprocess
from fewshift.report import prose
from tests.helpers.commands import network_options, small_network

STEPS = Preprocess(None, 16, (0.5,) * 3, (0.25,) * 3)


def test_the_verdict_comes_first_and_then_the_layers(run, place):
    done = run("shift", *network_options(place), place / "photos")
    expected = fewshift.shift(small_network(), place / "photos", preprocess=STEPS)
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == prose.shift(expected)
    assert "not that predictions are" in lines[1]
    rows = [line.split() for line in lines if line.strip().startswith("bn")]
    assert [row[0] for row in rows] == [layer.name for layer in expected.ranked]
    assert [row[1] for row in rows] == [f"{layer.score:.2f}" for layer in expected.ranked]


def test_json_is_what_the_function_returns(run, place):
    done = run("shift", *network_options(place), place / "photos", "--json")
    assert done.code == 0, done.stderr
    expected = fewshift.shift(small_network(), place / "photos", preprocess=STEPS)
    numbers = json.loads(done.stdout)
    assert numbers.pop("words") == prose.shift(expected)
    assert "not that predictions are" in numbers.pop("meaning")
    assert numbers == json.loads(json.dumps(expected.to_json()))


def test_the_exit_code_is_0_with_an_alarm_and_without(run, place):
    photos = place / "photos"
    alarm = run("shift", *network_options(place), photos, "--json")
    assert (alarm.code, json.loads(alarm.stdout)["shifted"]) == (0, True)
    silence = run("shift", *network_options(place), photos / "ant", "--source", photos / "ant", "--json")
    assert (silence.code, json.loads(silence.stdout)["shifted"]) == (0, False)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_alarm_can_be_an_exit_code(run, place, form):
    photos = place / "photos"
    assert run("shift", *network_options(place), photos, "--fail-on-alarm", *form).code == 4
    same = [photos / "ant", "--source", photos / "ant"]
    assert run("shift", *network_options(place), *same, "--fail-on-alarm", *form).code == 0


def test_an_alarm_and_silence_say_what_they_do_not_mean(run, place):
    photos = place / "photos"
    alarm = run("shift", *network_options(place), photos).stdout
    assert "not that predictions are wrong" in alarm
    silence = run("shift", *network_options(place), photos / "ant", "--source", photos / "ant").stdout
    assert "not that predictions are right" in silence
    assert "fewshift evaluate" in alarm
    assert "fewshift evaluate" in silence


def test_one_image_is_looked_at_too(run, place):
    done = run("shift", *network_options(place), place / "photos" / "ant" / "0.png")
    assert done.code == 0, done.stderr
    assert "image" in done.stdout.splitlines()[0]


def test_the_table_has_the_strongest_layers_or_all(run, place):
    options = ["--model", "tests.cli.test_shift_command:deep_network", "--weights", place / "deep.safetensors"]
    save_file(deep_network().state_dict(), place / "deep.safetensors")
    options += ["--crop", 16, "--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25", place / "photos"]
    some, every = run("shift", *options), run("shift", *options, "--all")
    assert (some.code, every.code) == (0, 0)
    assert sum("bn" in line for line in some.stdout.splitlines()[1:]) == 10
    assert sum("bn" in line for line in every.stdout.splitlines()[1:]) == 12


def deep_network(num_classes: int = 3) -> nn.Module:
    """Twelve BatchNorm layers in a row."""
    layers = OrderedDict[str, nn.Module]((f"bn{index}", nn.BatchNorm2d(3)) for index in range(12))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers["flatten"], layers["fc"] = nn.Flatten(), nn.Linear(768, num_classes)
    return nn.Sequential(layers).eval()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere does not exist: check the path"),
        (["--source", "nowhere", "photos"], "nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(run, place, words, sentence):
    words = [place / word if word == "photos" else word for word in words]
    done = run("shift", *network_options(place), *words)
    assert done.code == 2
    assert sentence in done.stderr
    assert done.stdout == ""


def test_pictures_that_are_no_pictures_are_named(run, place):
    (place / "photos" / "ant" / "broken.png").write_bytes(b"no image")
    done = run("shift", *network_options(place), place / "photos")
    assert done.code == 1
    assert "broken.png is not an image" in done.stderr


def test_label_files_of_scenes_are_not_looked_at(run, place):
    for kind in ("images", "labels"):
        (place / "scenes" / kind).mkdir(parents=True)
        Image.new("RGB", (16, 16), (90, 120, 40)).save(place / "scenes" / kind / "1.png")
    done = run("shift", *network_options(place), place / "scenes", "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["images"] == 1

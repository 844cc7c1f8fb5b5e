"""Commands on networks that label every pixel: real files in, label maps, scores and pages out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import fewshift
from fewshift.images.cityscapes import CITYSCAPES_IDS
from tests.helpers.labeller import CLASSES, forward, labeller, naive_ious, paint, read, snapshot
from tests.helpers.networks import make_tiny
from tests.helpers.pictures import picture, save, save_cityscapes

FACTORY = "tests.helpers.labeller:labeller"
STEPS = ["--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"]


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Weights of a labeller, scenes to adapt to and others to judge by, and images with one label each."""
    save_file(labeller().state_dict(), tmp_path / "labeller.safetensors")
    save_file(make_tiny().state_dict(), tmp_path / "w.safetensors")
    paint(tmp_path / "support", 5, seed=0)
    paint(tmp_path / "test", 4, seed=1)
    for index in range(6):
        save(tmp_path / "photos" / ("ant", "bee", "cat")[index % 3] / f"{index}.png", picture(9, 9, seed=index))
    return tmp_path


def options(place: Path) -> list[object]:
    weights = place / "labeller.safetensors"
    return ["--model", FACTORY, "--weights", weights, *STEPS, "--classes", ",".join(CLASSES)]


@pytest.fixture
def delta(scenes) -> Path:
    steps = fewshift.Preprocess(None, None, (0.5,) * 3, (0.25,) * 3)
    result = fewshift.adapt(labeller(), scenes / "support", method="adabn", preprocess=steps, classes=CLASSES)
    assert result.accepted
    return result.delta.save(scenes / "dusk.safetensors")


def test_adapt_predict_and_evaluate_are_one_straight_line(command, scenes):
    delta, out = scenes / "dusk.safetensors", scenes / "out"
    done = command(
        "adapt",
        *options(scenes),
        "--method",
        "adabn",
        "--support",
        scenes / "support",
        "--out",
        delta,
        "--report",
        scenes / "r.html",
    )
    assert done.code == 0, done.stderr
    assert "no evidence that it does so elsewhere" in " ".join((scenes / "r.html").read_text().split())
    done = command("predict", *options(scenes), "--delta", delta, scenes / "test/images", "--out", out)
    assert done.code == 0, done.stderr
    assert "4 images labelled" in done.stdout
    adapted = fewshift.apply(labeller(), delta)
    expected = {file.name: forward(adapted, file) for file in (scenes / "test/images").iterdir()}
    for name, labels in expected.items():
        assert np.array_equal(read(out / "labels" / name), labels)
        assert (out / "overlays" / name).with_suffix(".jpg").is_file()

    done = command("evaluate", *options(scenes), "--delta", delta, scenes / "test", "--json")
    facts = json.loads(done.stdout)
    truth = np.stack([read(scenes / "test/labels" / name) for name in expected])
    by_class = naive_ious(truth, np.stack(list(expected.values())))
    assert [facts["per_class"][name]["iou"]["adapted"] for name in CLASSES] == pytest.approx(by_class)
    assert facts["mean_iou"]["adapted"] > facts["mean_iou"]["source"] + 10
    assert (facts["images"], facts["pixels"], facts["report"]) == (4, (truth != 255).sum(), None)
    table = command("evaluate", *options(scenes), "--delta", delta, scenes / "test").stdout
    assert all(word in table for word in (*CLASSES, "mean IoU", "pixel accuracy", "source IoU", "adapted IoU"))
    assert "IoU in %, 4 images, counted at 28x20 pixels" in table


def test_the_page_says_whether_images_were_looked_for_that_were_adapted_to(command, scenes, delta):
    page = scenes / "dusk.html"
    words = ["evaluate", *options(scenes), "--delta", delta, "--report", page]
    assert command(*words, scenes / "test").code == 0
    assert "this page cannot know" in page.read_text()
    assert command(*words, "--support", scenes / "support", scenes / "test").code == 0
    assert f"None of these images is among those of {scenes / 'support'}" in page.read_text()
    refused = command(*words, "--support", scenes / "support", scenes / "support")
    assert refused.code == 1
    assert "5 of the 5 support images are also among the 5 evaluation images" in refused.stderr


def test_the_page_shows_the_images_that_changed_most(command, scenes, delta):
    page = scenes / "dusk.html"
    done = command("evaluate", *options(scenes), "--delta", delta, scenes / "test", "--report", page, "--json")
    assert json.loads(done.stdout)["report"] == str(page)
    adapted, gains = fewshift.apply(labeller(), delta), {}
    for file in sorted((scenes / "test/images").iterdir()):
        truth = read(scenes / "test/labels" / file.name)
        old, new = (np.nanmean(naive_ious(truth, forward(network, file))) for network in (labeller(), adapted))
        gains[file.name] = round(new, 1) - round(old, 1)
    text = page.read_text()
    for name in sorted(gains, key=gains.__getitem__)[-3:]:
        assert f"<b>{name}</b>" in text
        assert f"({gains[name]:+.1f})" in text
    assert f"better on {sum(gain > 0 for gain in gains.values())}" in " ".join(text.split())


def test_shots_are_images_in_all(command, scenes):
    words = ["adapt", *options(scenes), "--method", "adabn", "--support", scenes / "support", "--shots"]
    assert "2 labelled images of 3 classes" in command(*words, 2).stdout
    done = command(*words, 6)
    assert done.code == 1
    assert "5 labelled images, 6 shots asked: add 1 or ask for 5" in done.stderr


def test_images_of_different_sizes_are_adapted_to_and_judged(command, scenes):
    paint(scenes / "mixed", 2, seed=2)
    paint(scenes / "more", 1, seed=3, size=(24, 12))
    for kind in ("images", "labels"):
        (scenes / "more" / kind / "0.png").rename(scenes / "mixed" / kind / "tall.png")
    done = command(
        "adapt", *options(scenes), "--support", scenes / "mixed", "--method", "adabn", "--report", scenes / "r.html"
    )
    assert done.code == 0, done.stderr
    assert command("evaluate", *options(scenes), scenes / "mixed").code == 0


def test_cityscapes_is_read_as_it_is_published(command, scenes):
    stored = save_cityscapes(scenes / "city")
    save_file(labeller(19).state_dict(), scenes / "nineteen.safetensors")
    words = ["--model", FACTORY, "--weights", scenes / "nineteen.safetensors", *STEPS]
    facts = json.loads(command("evaluate", *words, scenes / "city", "--json").stdout)
    assert facts["per_class"]["road"]["pixels"] == 2 * (stored == 7).sum()
    assert (
        facts["pixels"] == 2 * np.isin(stored, [raw for raw, number in CITYSCAPES_IDS.items() if number != 255]).sum()
    )


@pytest.mark.parametrize(("name", "side"), [("coarse", 4), ("labeller", 1)])
def test_an_image_with_one_output_does_not_make_a_classifier(command, scenes, name, side):
    paint(scenes / "tiny", 2, seed=4)
    Image.new("RGB", (side, side)).save(scenes / "tiny/images/0.png")
    Image.new("L", (side, side)).save(scenes / "tiny/labels/0.png")
    words = ["--model", f"tests.helpers.labeller:{name}", *STEPS, "--classes", ",".join(CLASSES)]
    for more in ([], ["--window", 1, "--stride", 1]):
        assert command("evaluate", *words, scenes / "tiny", *more).code == 0
    done = command("adapt", *words, "--support", scenes / "tiny", "--method", "adabn", "--accept", "always")
    assert done.code == 0, done.stderr
    save(scenes / "classes/grass/0.png", picture(side, side))
    assert "labels every pixel" in command("evaluate", *words, scenes / "classes").stderr


def test_a_broken_image_is_an_error_at_the_end_and_the_rest_is_done(command, scenes):
    good = (scenes / "test/images/0.png").read_bytes()
    (scenes / "test/images/0.png").write_bytes(good[:60])
    words = ["predict", *options(scenes), scenes / "test/images", "--out", scenes / "out"]
    done = command(*words)
    assert done.code == 5
    assert "3 images labelled" in done.stdout
    assert "1 image of 4 left out" in done.stderr
    assert "0.png is damaged" in done.stderr
    (scenes / "test/images/0.png").write_bytes(good)
    assert command(*words, "--resume").code == 0
    assert len(list((scenes / "out/labels").iterdir())) == len(list((scenes / "out/overlays").iterdir())) == 4
    assert command(*words, "--window", 8, "--overwrite").code == 0


def test_predict_leaves_out_a_crop_and_says_so(command, scenes):
    done = command("predict", *options(scenes), "--crop", 8, scenes / "test/images", "--out", scenes / "out")
    assert done.code == 0, done.stderr
    assert done.stderr.strip() == "the crop to 8 pixels is left out: every pixel of an image gets a label"
    for file in (scenes / "test/images").iterdir():
        assert np.array_equal(read(scenes / "out/labels" / file.name), forward(labeller(), file))
    done = command("evaluate", *options(scenes), "--crop", 8, scenes / "test")
    assert "counted at 8x8 pixels, as the network sees them (files: 28x20)" in done.stdout


def test_classes_without_names_are_numbers(command, scenes):
    words = ["--model", FACTORY, "--weights", scenes / "labeller.safetensors", *STEPS]
    assert set(json.loads(command("evaluate", *words, scenes / "test", "--json").stdout)["per_class"]) == {
        "0",
        "1",
        "2",
    }


MISTAKES = {
    "no folder": (["predict", "test/images"], "pass --out FOLDER"),
    "over weights": (["predict", "test/images", "--out", "labeller.safetensors"], "is read as well"),
    "labels": (["predict", "support/images", "--out", "test", "--resume"], "is not by this network, classes and opt"),
    "stride alone": (["predict", "test/images", "--out", "out", "--stride", 5], "without a window"),
    "report alone": (["evaluate", "test", "--report", "r.html"], "pass --delta"),
    "class folders": (["evaluate", "photos", "--classes", "ant,bee,cat"], "labels every pixel"),
    "too many names": (["predict", "test/images", "--out", "out", "--classes", "a,b,c,d"], "does not fit"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_nothing_is_written(command, scenes, mistake):
    (name, *words), sentence = MISTAKES[mistake]
    before = snapshot(scenes)
    words = [
        scenes / word if isinstance(word, str) and not word.startswith("-") and "," not in word else word
        for word in words
    ]
    done = command(name, *options(scenes), *words)
    assert done.code == (2 if mistake in {"over weights", "report alone"} else 1)
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert snapshot(scenes) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["predict", "photos", "--window", 4], "one output per image: leave out --window"),
        (["evaluate", "photos", "--window", 4], "one output per image: leave out --window"),
        (["evaluate", "test"], "has pixel labels"),
        (["adapt", "--support", "test"], "has pixel labels"),
    ],
)
def test_a_network_with_one_output_per_image_is_told_apart(command, scenes, words, sentence):
    network = ["--model", "tests.helpers.networks:make_tiny", "--weights", scenes / "w.safetensors", *STEPS]
    name, *rest = words
    done = command(name, *network, *(scenes / word if word in {"photos", "test"} else word for word in rest))
    assert done.code == 1
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1

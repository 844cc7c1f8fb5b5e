"""What looks wrong, on the command line and on the page."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from fewshift.lab.datasets import digits
from tests.helpers.commands import CLASSES, FACTORY, network_options


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Five digits of each class, in folders a to j."""
    root = tmp_path_factory.mktemp("digits")
    images, labels = digits.split()[1]
    for label in range(10):
        folder = root / "abcdefghij"[label]
        folder.mkdir()
        for index in (labels == label).nonzero().flatten()[:5].tolist():
            Image.fromarray((255 * images[index, 0]).round().byte().numpy()).save(folder / f"{index}.png")
    return root


def adapt(run, support, *more):
    return run("adapt", "--model", "digits", "--method", "adabn", "--validate", "none", "--support", support, *more)


def test_adapt_refuses_folders_in_another_order_unless_it_is_told_not_to_check(run, folders, tmp_path):
    wrong = "jabcdefghi"  # output 0 is called j: folder a holds zeros and is output 1
    done = adapt(run, folders, "--classes", ",".join(wrong))
    assert done.code == 1
    assert "'a' looks like the network's 'j'" in done.stderr
    done = adapt(run, folders, "--classes", ",".join(wrong), "--no-check")
    assert done.code == 0
    assert "warning: the labels do not fit the network's outputs" in done.stderr


def test_warnings_are_printed_written_as_json_and_shown_on_the_page(run, folders, tmp_path):
    shutil.copytree(folders, tmp_path / "some")
    shutil.rmtree(tmp_path / "some" / "c")
    options = [tmp_path / "some", "--classes", "a,b,c,d,e,f,g,h,i,j", "--report", tmp_path / "r.html"]
    assert "warning: nothing is known about c" in adapt(run, *options).stderr
    text = (tmp_path / "r.html").read_text()
    assert text.index("Nothing is known about c") < text.index("<h2>Evidence")
    (warning,) = json.loads(adapt(run, *options, "--json").stdout)["warnings"]
    assert (warning["kind"], warning["classes"]) == ("unseen", ["c"])


def test_what_is_assumed_without_a_card_is_noted(run, folders, place):
    assert "note: no card says" in adapt(run, folders).stderr
    done = run(
        "adapt", "--model", FACTORY, "--weights", place / "w.safetensors", "--crop", "16", "--mean", "0.5,0.5,0.5",
        "--support", place / "photos", "--method", "adabn", "--validate", "none",
    )  # fmt: skip
    assert "is not known: took std 0.5,0.5,0.5" in done.stderr


def test_predict_and_evaluate_say_that_options_contradict_the_delta(run, place):
    delta = place / "d.safetensors"
    network = network_options(place)
    names = ["--classes", ",".join(CLASSES)]
    run(
        "adapt", *network, *names, "--support", place / "photos", "--method", "adabn", "--validate", "none",
        "--out", delta,
    )  # fmt: skip
    for command in ("predict", "evaluate"):
        done = run(command, place / "photos", *network[:4], "--delta", delta)
        assert "warning" not in done.stderr
        done = run(command, place / "photos", *network[:4], "--delta", delta, "--std", "0.5,0.5,0.5")
        assert "warning: the preprocessing is not the delta's: std" in done.stderr

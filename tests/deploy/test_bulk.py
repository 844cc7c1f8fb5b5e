"""Predicting files is a loop over the images: the same classes, in the size of each file, written once."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fewshift
from fewshift.deploy import pixels
from fewshift.images.scenes import scene_folder
from fewshift.models.cards import Card, with_card
from tests.helpers.labeller import CLASSES, STEPS, coarse, forward, labeller, paint, read, snapshot
from tests.helpers.networks import make_support, make_tiny, same_state, state
from tests.helpers.pictures import picture, save

# --- one output per image

SMALL = fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
NAMES = ("ant", "bee", "cat")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for index in range(7):
        save(tmp_path / "photos" / f"{index}.png", picture(8 + index % 2, 8, seed=index))
    return tmp_path / "photos"


def loop(model: nn.Module, folder: Path) -> list[tuple[str, str, float]]:
    """One image after the other: file, class, probability."""
    rows = []
    for file in sorted(folder.iterdir()):
        with torch.no_grad():
            probabilities = model(SMALL(Image.open(file))[None]).softmax(1)[0]
        rows.append((file.name, NAMES[int(probabilities.argmax())], float(probabilities.max())))
    return rows


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_predictions_are_those_of_a_loop_over_the_images(photos: Path, batch_size: int) -> None:
    model = make_tiny()
    result = fewshift.predict(model, photos, preprocess=SMALL, classes=NAMES, batch_size=batch_size)
    assert isinstance(result, fewshift.ImagePredictions)
    expected = loop(model, photos)
    assert [(row.file.name, row.name) for row in result.rows] == [row[:2] for row in expected]
    assert [row.probability for row in result.rows] == pytest.approx([row[2] for row in expected], abs=1e-6)


def test_a_delta_is_applied_to_a_copy_and_brings_its_classes_and_preprocessing(photos: Path, tmp_path: Path) -> None:
    model = make_tiny().train()
    before = state(model)
    adapted = fewshift.adapt(
        make_tiny(), replace(make_support(), classes=NAMES), method="adabn", preprocess=SMALL, validate=None
    )
    file = adapted.delta.save(tmp_path / "d.safetensors")
    results = [fewshift.predict(model, photos, delta=delta) for delta in (file, adapted.delta)]
    assert results[0] == results[1]
    assert [row.name for row in results[0].rows] == [row[1] for row in loop(adapted.model, photos)]
    assert model.training
    assert same_state(state(model), before)


def test_the_card_of_a_network_brings_classes_and_preprocessing(photos: Path) -> None:
    model = make_tiny()
    with pytest.raises(fewshift.FewshiftError, match="Tiny wants its images is not known: pass preprocess="):
        fewshift.predict(model, photos)
    assert fewshift.predict(with_card(model, Card(preprocess=SMALL, classes=NAMES)), photos) == fewshift.predict(
        make_tiny(), photos, preprocess=SMALL, classes=NAMES
    )


def test_the_table_is_written_and_some_files_are_enough(photos: Path, tmp_path: Path) -> None:
    files = [photos / "3.png", str(photos / "1.png")]
    result = fewshift.predict(make_tiny(), files, preprocess=SMALL, out=tmp_path / "table.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [(row["file"], row["class"]) for row in rows] == [(str(row.file), row.name) for row in result.rows]
    assert [Path(row["file"]).name for row in rows] == ["3.png", "1.png"]
    assert {row["class"] for row in rows} <= {"0", "1", "2"}  # outputs without names are numbers


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"window": 4}, "one output per image.*window"),
        ({"top": 4}, "top=4 of 3 classes: give 1 to 3"),
        ({"with_source": True}, "with_source.*pass a delta"),
        ({"workers": -1}, "workers=-1"),
        ({"device": "abacus"}, "device abacus cannot be used"),
        ({"as_json": True, "resume": True}, "JSON .*cannot be resumed"),
        ({"classes": ["a", "b"]}, "2 class names .*3 outputs"),
        ({"out": Path("nowhere/at/all.csv")}, r"cannot write .*all\.csv"),
    ],
)
def test_options_that_do_not_fit_a_table_are_refused(photos: Path, options: dict[str, Any], facts: str) -> None:
    with pytest.raises(fewshift.FewshiftError, match=facts):
        fewshift.predict(make_tiny(), photos, preprocess=SMALL, **options)


# --- one output per pixel


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return paint(tmp_path / "scenes", 4, seed=1)


def label(images: Any, out: Path, model: nn.Module | None = None, **options: Any) -> fewshift.PixelPredictions:
    options = {"preprocess": STEPS, "classes": CLASSES, **options}
    result = fewshift.predict(model or labeller(), images, out=out, **options)
    assert isinstance(result, fewshift.PixelPredictions)
    return result


def test_label_maps_are_those_of_a_loop_over_the_images(scenes: Path, tmp_path: Path) -> None:
    result = label(scenes, tmp_path / "out")  # the label files of the folder are left out
    expected = {file.name: forward(labeller(), file) for file in (scenes / "images").iterdir()}
    assert {row.file.name for row in result.images} == expected.keys()
    for row in result.images:
        assert np.array_equal(read(row.labels), expected[row.file.name])
        assert read(row.overlay).shape == (20, 28, 3)
    counts = np.bincount(np.stack(list(expected.values())).ravel(), minlength=3)
    assert result.pixels == dict(zip(CLASSES, counts.tolist(), strict=True))


def test_label_maps_can_be_read_back_as_labels(scenes: Path, tmp_path: Path) -> None:
    label(scenes / "images", tmp_path / "out")
    (scenes / "images").rename(tmp_path / "out" / "images")
    again = scene_folder(tmp_path / "out", STEPS)
    assert again.classes == CLASSES
    assert np.array_equal(again[3][1].numpy(), forward(labeller(), again.files[3]))


def test_label_maps_have_the_size_of_the_original_image(tmp_path: Path) -> None:
    Image.new("RGB", (31, 17), (60, 90, 210)).save(tmp_path / "wide.jpg")
    result = label(tmp_path / "wide.jpg", tmp_path / "out", preprocess=replace(STEPS, resize=8, crop=8))
    assert read(tmp_path / "out/labels/wide.png").shape == (17, 31)
    assert result.pixels == {"grass": 0, "water": 31 * 17, "stone": 0}
    assert result.crop == 8  # left out: every pixel gets a label


def test_a_window_changes_nothing_for_a_network_without_context(scenes: Path, tmp_path: Path) -> None:
    whole, parts = label(scenes, tmp_path / "whole"), label(scenes, tmp_path / "parts", window=7, stride=5)
    assert whole.pixels == parts.pixels
    for one, other in zip(whole.images, parts.images, strict=True):
        assert np.array_equal(read(one.labels), read(other.labels))


def test_files_whose_names_collide_stay_apart(tmp_path: Path) -> None:
    for name in ("a/x.png", "b/x.png", "b/x.jpg", "y.png"):
        save(tmp_path / "many" / name, picture(4, 4))
    label(tmp_path / "many", tmp_path / "out")
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    names = ("a/x", "b/x.png", "b/x.jpg", "y")
    expected = {f"labels/{name}.png" for name in names} | {f"overlays/{name}.jpg" for name in names}
    assert written == expected | {"palette.txt"}


@pytest.mark.parametrize(("network", "side"), [(coarse, 4), (labeller, 1)])
def test_an_image_with_one_output_does_not_make_a_classifier(tmp_path: Path, network: Any, side: int) -> None:
    save(tmp_path / "tiny" / "a.png", picture(side, side))
    label(tmp_path / "tiny", tmp_path / "out", network())
    assert read(tmp_path / "out/labels/a.png").shape == (side, side)


# --- going on


def test_a_run_that_was_stopped_goes_on_where_it_was(scenes: Path, tmp_path: Path, monkeypatch: Any) -> None:
    expected = label(scenes, tmp_path / "whole")
    real, calls = pixels.label_map, []

    def stopping(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(pixels, "label_map", stopping)
    with pytest.raises(KeyboardInterrupt):
        label(scenes, tmp_path / "parts")
    assert len(list((tmp_path / "parts/labels").iterdir())) == 3
    (tmp_path / "parts/labels/2.png").unlink()  # as if stopped between the overlay and the labels
    result = label(scenes, tmp_path / "parts", resume=True)
    assert len(calls) == 4 + 4 - 2
    assert result.pixels == expected.pixels
    assert [row.confidence for row in result.images] == [row.confidence for row in expected.images]
    whole, parts = (
        {path.relative_to(tmp_path / name): content for path, content in snapshot(tmp_path / name).items()}
        for name in ("whole", "parts")
    )
    assert parts == whole


def test_only_label_maps_of_the_same_run_are_resumed(scenes: Path, tmp_path: Path) -> None:
    label(scenes, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    other = labeller()
    with torch.no_grad():
        other.head.bias[0] += 9  # type: ignore[union-attr, operator]
    changes: list[dict[str, Any]] = [{"model": other}, {"window": 8}, {"classes": ["a", "b", "c"]}]
    for change in (*changes, {"preprocess": replace(STEPS, resize=10)}):
        with pytest.raises(fewshift.FewshiftError, match=r"0\.png is not by this network, classes and options"):
            label(scenes, tmp_path / "out", resume=True, **change)
    assert snapshot(tmp_path / "out") == before
    label(scenes, tmp_path / "out", other, overwrite=True)
    Image.new("RGB", (28, 20), (60, 90, 210)).save(scenes / "images/3.png")  # another image of the same name
    label(scenes, tmp_path / "out", other, resume=True)
    for file in (scenes / "images").iterdir():
        assert np.array_equal(read(tmp_path / "out/labels" / file.name), forward(other, file))


def test_an_image_that_cannot_be_read_is_listed_and_the_rest_is_done(scenes: Path, tmp_path: Path) -> None:
    file = scenes / "images/0.png"
    good = file.read_bytes()
    file.write_bytes(good[:60])
    result = label(scenes, tmp_path / "out")
    assert [(row.file, "is damaged" in row.error) for row in result.broken] == [(file, True)]
    assert len(result.images) == 3
    with pytest.raises(fewshift.FewshiftError, match=r"0\.png is damaged"):
        label(scenes, tmp_path / "strict", strict=True)
    file.write_bytes(good)
    assert len(label(scenes, tmp_path / "out", resume=True).images) == 4


@pytest.mark.parametrize(
    ("images", "out", "options", "facts"),
    [
        ("scenes", None, {}, "labels every pixel: pass .*out="),
        ("scenes", "a.txt", {}, r"a\.txt is not a folder"),
        ("scenes", "scenes/out", {}, "lies among the images"),
        ("scenes/images", "scenes", {"overwrite": True}, "has the labels of these images"),
        ("more/images", "scenes", {}, r"0\.png exists already: pass --resume .*--overwrite"),
        ("more/images", "scenes", {"resume": True}, "is not by this network"),
        ("scenes", "out", {"window": 4, "stride": 5}, "leaves gaps"),
        ("scenes", "out", {"stride": 5}, "without a window"),
        ("scenes", "out", {"top": 2}, "labels every pixel: leave out --top"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    scenes: Path, tmp_path: Path, images: str, out: str | None, options: dict[str, Any], facts: str
) -> None:
    (tmp_path / "a.txt").touch()
    paint(tmp_path / "more", 1, seed=2)
    before = snapshot(tmp_path)
    with pytest.raises(fewshift.FewshiftError, match=facts):
        label(tmp_path / images, tmp_path / out if out else out, **options)  # type: ignore[arg-type]
    assert snapshot(tmp_path) == before

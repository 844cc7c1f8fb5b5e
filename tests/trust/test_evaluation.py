"""Evaluation is a loop over labelled images: the same accuracies and IoUs, before and after a delta."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewshift
from fewshift.core.delta import Delta
from fewshift.images.folders import labelled_folder
from fewshift.images.scenes import scene_folder
from fewshift.trust.evaluation import PixelEvaluation
from tests.helpers.labeller import CLASSES, STEPS, forward, labeller, naive_ious, paint, read
from tests.helpers.networks import make_support, make_tiny, same_state, state
from tests.helpers.pictures import picture, save

SMALL = fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
NAMES = ("ant", "bee", "cat", "dog")


def delta_of(model: nn.Module, support: Any, **options: Any) -> Delta:
    options = {"method": "adabn", "validate": None, "accept": "always", **options}
    return fewshift.adapt(model, support, **options).delta


# --- one label per image


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for index in range(11):  # no dogs
        save(tmp_path / "photos" / NAMES[index % 3] / f"{index}.png", picture(9, 8, seed=index))
    return tmp_path / "photos"


def test_accuracies_are_those_of_a_loop_over_the_images(photos: Path) -> None:
    source = make_tiny(classes=4).train()
    before = state(source)
    support = make_support(classes=4)
    delta = delta_of(make_tiny(classes=4), replace(support, classes=NAMES), preprocess=SMALL)
    result = fewshift.evaluate(source, photos, delta=delta)
    folder = labelled_folder(photos, SMALL, NAMES)
    images, labels = folder.tensors()
    for name, network in {"source": make_tiny(classes=4), "adapted": delta.apply(make_tiny(classes=4))}.items():
        with torch.no_grad():
            right = [
                int(network(image[None]).argmax()) == int(label) for image, label in zip(images, labels, strict=True)
            ]
        assert result.accuracy[name] == pytest.approx(100 * np.mean(right))
        per_class = [
            100 * np.mean([hit for hit, label in zip(right, labels, strict=True) if label == k]) for k in range(3)
        ]
        assert [values[name] for values in result.to_json()["per_class"].values()] == pytest.approx(per_class)
        assert result.mean[name] == pytest.approx(np.mean(per_class))
    assert [(name, count) for name, count, _ in result.rows] == [("ant", 4), ("bee", 4), ("cat", 3)]
    assert source.training
    assert same_state(state(source), before)


def test_folders_datasets_tensors_and_supports_have_one_score(photos: Path) -> None:
    folder = labelled_folder(photos, SMALL, NAMES)
    tensors = folder.tensors()
    scores = [
        fewshift.evaluate(make_tiny(classes=4), labelled, preprocess=SMALL, classes=NAMES).to_json()
        for labelled in (photos, folder, tensors, fewshift.Support(*tensors))
    ]
    assert scores[0]["images"] == 11
    assert all(score == scores[0] for score in scores)


def test_more_outputs_than_classes_are_refused(photos: Path) -> None:
    with pytest.raises(fewshift.FewshiftError, match=r"3 classes and the network 4 outputs"):
        fewshift.evaluate(make_tiny(classes=4), photos, preprocess=SMALL)
    with pytest.raises(fewshift.FewshiftError, match=r"one output per image.*window"):
        fewshift.evaluate(make_tiny(classes=3), photos, preprocess=SMALL, window=4)
    with pytest.raises(fewshift.FewshiftError, match=r"Labeller labels every pixel"):
        fewshift.evaluate(labeller(), photos, preprocess=SMALL)


def test_an_image_that_was_adapted_to_is_refused(photos: Path, tmp_path: Path) -> None:
    model = make_tiny(classes=4)
    support = labelled_folder(photos, SMALL, NAMES)
    for form in (photos, support, support.tensors()):
        with pytest.raises(fewshift.FewshiftError, match=r"11 of the 11 support images are also among the 11"):
            fewshift.evaluate(model, photos, support=form, preprocess=SMALL, classes=NAMES)
    for index in range(4):
        save(tmp_path / "new" / NAMES[index % 2] / f"{index}.png", picture(9, 8, seed=50 + index))
    assert fewshift.evaluate(model, tmp_path / "new", support=photos, preprocess=SMALL, classes=NAMES).labels[:2] == [
        2,
        2,
    ]


# --- one label per pixel


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return paint(tmp_path / "scenes", 4, seed=1)


def test_ious_are_those_of_a_loop_over_the_images(scenes: Path) -> None:
    delta = delta_of(labeller(), scenes, preprocess=STEPS, classes=CLASSES)
    result = fewshift.evaluate(labeller(), scenes, delta=delta)
    assert isinstance(result, PixelEvaluation)
    files = sorted((scenes / "images").iterdir())
    truth = np.stack([read(scenes / "labels" / file.name) for file in files])
    for name, network in {"source": labeller(), "adapted": delta.apply(labeller())}.items():
        labels = np.stack([forward(network, file) for file in files])
        expected = naive_ious(truth, labels)
        assert [values[list(result.tallies).index(name)] for _, _, values in result.rows] == pytest.approx(expected)
        assert result.mean[name] == pytest.approx(np.mean(expected))
        assert result.accuracy[name] == pytest.approx(100 * (truth == labels)[truth != 255].mean())
        each = [np.nanmean(naive_ious(*pair)) / 100 for pair in zip(truth, labels, strict=True)]
        assert result.images[name] == pytest.approx(each)
    assert sum(result.labels) == (truth != 255).sum()


def test_pixels_are_counted_as_the_network_sees_them(scenes: Path) -> None:
    result = fewshift.evaluate(labeller(), scenes, preprocess=replace(STEPS, crop=8), classes=CLASSES)
    assert result.to_json()["sizes"] == {"counted": [(8, 8)], "files": [(28, 20)]}
    assert sum(result.labels) <= 4 * 8 * 8


def test_a_window_changes_no_score_of_a_network_without_context(scenes: Path) -> None:
    whole, parts = (
        fewshift.evaluate(labeller(), scenes, preprocess=STEPS, classes=CLASSES, **options).to_json()
        for options in ({}, {"window": 9, "stride": 4})
    )
    assert whole == parts


def test_tensors_with_pixel_labels_have_the_scores_of_their_folder(scenes: Path) -> None:
    folder = scene_folder(scenes, STEPS, CLASSES)
    pairs = [folder[index] for index in range(len(folder))]
    tensors = torch.stack([image for image, _ in pairs]), torch.stack([labels for _, labels in pairs])
    expected = fewshift.evaluate(labeller(), scenes, preprocess=STEPS, classes=CLASSES)
    assert fewshift.evaluate(labeller(), tensors).mean == expected.mean
    assert [row[0] for row in fewshift.evaluate(labeller(), tensors).rows] == ["0", "1", "2"]


def test_images_are_ranked_by_what_they_gained_and_lost() -> None:
    nan = float("nan")
    images = {"source": [0.5, 0.5, nan, 0.5, 0.5, 0.5], "adapted": [0.6, 0.4, nan, 0.9, 0.5, 0.1]}
    scores = PixelEvaluation(CLASSES, {}, images)
    assert scores.extremes(1) == ([3], [5])
    assert scores.extremes(5) == ([3, 0], [5, 1])
    assert (scores.better, scores.worse, scores.same) == (2, 2, 2)


def test_scenes_without_a_label_are_refused(scenes: Path) -> None:
    images, labels = torch.rand(2, 3, 4, 5), torch.full((2, 4, 5), 255)
    with pytest.raises(fewshift.FewshiftError, match="no pixel of the 2 images is labelled"):
        fewshift.evaluate(labeller(), (images, labels))

"""Scenes: images and label files that belong together, found by name and checked before use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.scenes import scene_folder, scene_layout
from tests.helpers.pictures import AS_IS, by_hand, pattern, save, save_cityscapes, save_scene

NAMES = ("road", "sky", "tree")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("b", "a", "more/c")):
        save_scene(tmp_path, name, pattern(9, 12 + index, seed=index))
    return tmp_path


def test_scenes_are_pairs_in_the_order_of_their_names(folder: Path) -> None:
    scenes = scene_folder(folder, AS_IS, NAMES)
    assert [file.name for file in scenes.files] == ["a.png", "b.png", "c.png"]
    assert scenes.label_files[2] == folder / "labels" / "more" / "c.png"
    assert (len(scenes), scenes.classes, len(scenes.palette)) == (3, NAMES, 3)
    assert [scenes.size(index) for index in range(3)] == [(13, 9), (12, 9), (14, 9)]
    for (pixels, numbers), file in zip(map(scenes.pixels, range(3)), scenes.files, strict=True):
        assert (pixels.dtype, numbers.dtype) == (torch.uint8, torch.uint8)
        assert np.array_equal(numbers.numpy() * 10, np.asarray(Image.open(file))[..., 0])
        assert torch.equal(pixels[0], numbers * 10)
    image, labels = scenes[1]
    assert torch.equal(image, scenes.pixels(1)[0] / 255)
    assert (labels.dtype, labels.shape) == (torch.int64, image.shape[1:])


@pytest.mark.parametrize("order", [[2, 0], torch.tensor([2, 0])])
def test_a_subset_has_the_scenes_asked_for(folder: Path, order: list[int] | torch.Tensor) -> None:
    scenes = scene_folder(folder, AS_IS, NAMES)
    part = scenes.subset(order)
    assert [file.stem for file in part.files] == [file.stem for file in part.label_files] == ["c", "a"]
    assert scenes.without(order).tolist() == [1]


def test_a_mask_is_not_taken_for_indices(folder: Path) -> None:
    with pytest.raises(FewshiftError, match="mask"):
        scene_folder(folder, AS_IS, NAMES).subset(torch.tensor([True, False, True]))


def test_sizes_that_differ_within_a_pair_are_refused_before_resizing(folder: Path) -> None:
    save(folder / "labels" / "a.png", pattern(18, 26))
    scenes = scene_folder(folder, replace(AS_IS, resize=8, crop=8), NAMES)
    with pytest.raises(FewshiftError, match=r"images/a\.png is 13x9 .*labels/a\.png is 26x18"):
        scenes[0]


def test_labels_of_a_photograph_that_EXIF_turns_must_be_turned(folder: Path) -> None:  # noqa: N802 - its name
    (folder / "images" / "a.png").unlink()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (13, 9)).save(folder / "images" / "a.jpg", exif=turned)
    with pytest.raises(FewshiftError, match=r"a\.jpg is 9x13 .*EXIF.* is 13x9: turn the labels"):
        scene_folder(folder, AS_IS, NAMES)[0]


def test_files_without_a_partner_are_counted_and_named(folder: Path) -> None:
    (folder / "labels" / "b.png").unlink()
    (folder / "labels" / "more" / "c.png").unlink()
    with pytest.raises(FewshiftError, match=r"2 of 3 images .*no label PNG, the first is b\.png"):
        scene_folder(folder, AS_IS, NAMES)
    save(folder / "labels" / "z.png", pattern(9, 9))
    with pytest.raises(FewshiftError, match=r"b\.png, and 1 of 2 label files .*no image, the first is z\.png"):
        scene_folder(folder, AS_IS, NAMES)


def test_hidden_files_are_no_labels_and_twins_are_refused(folder: Path) -> None:
    save(folder / "labels" / "._a.png", pattern(9, 9))
    assert len(scene_folder(folder, AS_IS, NAMES)) == 3
    save(folder / "images" / "a.jpg", pattern(9, 9))
    with pytest.raises(FewshiftError, match=r"a\.jpg and .*a\.png have the same name"):
        scene_folder(folder, AS_IS, NAMES)


def test_classes_are_never_guessed(folder: Path) -> None:
    with pytest.raises(FewshiftError, match=r"pass classes.*or write .*palette\.txt"):
        scene_folder(folder, AS_IS)
    with pytest.raises(FewshiftError, match="no labelled scenes"):
        scene_folder(folder / "images", AS_IS, NAMES)
    with pytest.raises(FewshiftError, match=r"b\.png: .*value 2 \(\d+ pixels\)"):
        scene_folder(folder, AS_IS, NAMES[:2])[1]
    with pytest.raises(FewshiftError, match="256 classes"):
        scene_folder(folder, AS_IS, [str(number) for number in range(256)])


# --- Cityscapes as it is published


@pytest.mark.parametrize(
    ("inside", "count"), [(".", 2), ("leftImg8bit", 2), ("leftImg8bit/val", 1), ("leftImg8bit/val/lindau", 1)]
)
def test_cityscapes_needs_no_names(tmp_path: Path, inside: str, count: int) -> None:
    stored = save_cityscapes(tmp_path)
    scenes = scene_folder(tmp_path / inside, AS_IS)
    assert (len(scenes), scenes.classes, scenes.palette) == (count, cityscapes.CLASSES, cityscapes.PALETTE)
    assert np.array_equal(scenes.pixels(0)[1].numpy(), by_hand(stored, cityscapes.CITYSCAPES_IDS))


@pytest.mark.parametrize("inside", ["", "val", "val/lindau"])
def test_the_label_folder_of_cityscapes_points_to_its_images(tmp_path: Path, inside: str) -> None:
    save_cityscapes(tmp_path)
    images = tmp_path / "leftImg8bit" / inside
    with pytest.raises(FewshiftError, match=f"labels of Cityscapes.*give {images}$"):
        scene_layout(tmp_path / "gtFine" / inside)


def test_cityscapes_follows_the_order_of_the_network(tmp_path: Path) -> None:
    stored = save_cityscapes(tmp_path, "labelTrainIds")
    scenes = scene_folder(tmp_path, AS_IS, cityscapes.CLASSES[::-1])
    assert np.array_equal(scenes.pixels(0)[1].numpy(), 18 - stored)
    assert scenes.palette == cityscapes.PALETTE[::-1]
    with pytest.raises(FewshiftError, match=r"'sidewalk'.*the known classes are road, sky, tree"):
        scene_folder(tmp_path, AS_IS, NAMES)

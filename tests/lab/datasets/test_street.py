"""Street scenes are read where their archives put them, and every raw label becomes its published class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fewshift.core.losses import IGNORE
from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.scenes import Scenes
from fewshift.lab.datasets import street
from fewshift.lab.datasets.catalog import COLLECTIONS, Collection, describe
from fewshift.lab.datasets.copies import load_domain, load_scenes
from tests.helpers.pictures import (
    AS_IS,
    Array,
    by_hand,
    pattern,
    save,
    save_16_bits,
    save_cityscapes,
    save_scene,
)


def small(name: str) -> Collection:
    """The collection as it is described, but for the number of images."""
    return replace(COLLECTIONS[name], counts=None)


def test_the_label_maps_are_the_published_ones() -> None:
    # road, sidewalk, wall, traffic light, rider, train, bicycle of each
    assert [cityscapes.CITYSCAPES_IDS[number] for number in (7, 8, 12, 19, 25, 31, 33)] == [0, 1, 3, 6, 12, 16, 18]
    assert [street.SYNTHIA_IDS[number] for number in (3, 4, 21, 15, 17, 20, 11)] == [0, 1, 3, 6, 12, 16, 18]
    assert [street.MAPILLARY_IDS[number] for number in (13, 15, 6, 48, 20, 58, 52)] == [0, 1, 3, 6, 12, 16, 18]
    for ids, count in ((cityscapes.CITYSCAPES_IDS, 34), (street.SYNTHIA_IDS, 23), (street.MAPILLARY_IDS, 66)):
        assert list(ids) == list(range(count))
        assert set(ids.values()) == {*range(19), IGNORE}
    assert len(street.CAMVID_COLOURS) == 32
    assert set(street.CAMVID_COLOURS.values()) == {*range(11), IGNORE}
    assert [len(names) for names in (cityscapes.CLASSES, cityscapes.PALETTE, street.CAMVID_CLASSES)] == [19, 19, 11]


def check(scenes: Scenes, numbers: Array, count: int = 1) -> None:
    assert len(scenes) == count
    assert np.array_equal(scenes.pixels(0)[1].numpy(), numbers)


@pytest.mark.parametrize("above", [("", ""), ("leftImg8bit_trainvaltest/", "gtFine_trainvaltest/")])
@pytest.mark.parametrize(
    ("kind", "ids"), [("labelIds", cityscapes.CITYSCAPES_IDS), ("labelTrainIds", cityscapes.TRAIN_IDS)]
)
def test_cityscapes_is_read(tmp_path: Path, above: tuple[str, str], kind: str, ids: Mapping[int, int]) -> None:
    stored = save_cityscapes(tmp_path / "Cityscapes", kind, above)
    for domain in ("train", "val"):
        check(load_scenes(small("cityscapes"), domain, tmp_path, AS_IS), by_hand(stored, ids))
    with pytest.raises(FewshiftError, match=r"'val' of Cityscapes has 1 images in .*val, 500 expected"):
        load_scenes("cityscapes", "val", tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "end"),
    [
        ("images/val", "labels/val", "_train_id"),
        ("seg/images/val", "seg/labels/val", "_train_id"),
        ("images/10k/val", "labels/sem_seg/masks/val", ""),
    ],
)
def test_bdd100k_is_read(tmp_path: Path, images: str, labels: str, end: str) -> None:
    stored = pattern(12, 15, classes=19)
    stored[3:5] = IGNORE
    save_scene(tmp_path / "bdd100k", "7d06fefd-f7be05a6", stored, images, labels, end)
    check(load_scenes(small("bdd100k"), "val", tmp_path, AS_IS), stored)
    facts = r"'train' of BDD100K, segmentation \(7,000 images\) is not in .*, 2 domains expected and 1 found \(val\)"
    with pytest.raises(FewshiftError, match=facts):
        load_scenes("bdd100k", "train", tmp_path)


@pytest.mark.parametrize("labels", ["validation/labels", "validation/v1.2/labels"])
def test_mapillary_is_read(tmp_path: Path, labels: str) -> None:
    stored = pattern(30, 20, classes=66)
    save_scene(tmp_path / "mapillary", "a", stored, "validation/images", labels)
    table = Image.fromarray(stored)
    table.putpalette([8, 9, 10] * 256)
    table.save(tmp_path / "mapillary" / labels / "a.png")
    check(load_scenes(small("mapillary"), "val", tmp_path, AS_IS), by_hand(stored, street.MAPILLARY_IDS))
    published = load_scenes(small("mapillary"), "val", tmp_path)
    numbers = published.pixels(0)[1]
    assert numbers.shape == (1536, 1536)
    assert (numbers[:, 300:1200] != IGNORE).any()
    assert (numbers[:, :256] == IGNORE).all()  # upright: 1024 columns in the middle
    assert (numbers[:, -256:] == IGNORE).all()
    save(tmp_path / "mapillary" / labels / "a.png", np.full((30, 20), 123))  # version 2.0 has 124 ids
    with pytest.raises(FewshiftError, match=r"value 123 \(600 pixels\), outside the classes: use 0 to 65"):
        published.pixels(0)


@pytest.mark.parametrize("split", ["val.txt", "gtav_split_val.txt", "split.mat"])
def test_gtav_is_read_by_its_split(tmp_path: Path, split: str) -> None:
    stored = pattern(12, 15, classes=35)  # 34 is a licence plate
    for name in ("00001", "00022", "00023"):
        save_scene(tmp_path / "gtav", name, stored)
    if split == "split.mat":
        savemat(tmp_path / "gtav" / split, {"valIds": np.array([[22], [23]]), "trainIds": np.array([[1]])})
    else:
        (tmp_path / "gtav" / split).write_text("00022.png\n00023\n\n")
    scenes = load_scenes(small("gtav"), "val", tmp_path, AS_IS)
    assert [file.stem for file in scenes.files] == ["00022", "00023"]
    check(scenes, by_hand(stored, cityscapes.CITYSCAPES_IDS), count=2)
    colours = np.array([(20, 20, 20), *cityscapes.PALETTE], np.uint8)[pattern(12, 15, classes=20)]
    save(tmp_path / "gtav" / "labels" / "00022.png", colours)
    known = {colour: number for number, colour in enumerate(cityscapes.PALETTE)}
    check(scenes, by_hand(colours, known), count=2)
    with pytest.raises(FewshiftError, match=r"'val' of GTAV has 2 images in .*, 6,382 expected"):
        load_scenes("gtav", "val", tmp_path)


def test_a_split_that_is_missing_or_names_what_is_missing_is_told(tmp_path: Path) -> None:
    save_scene(tmp_path / "gtav", "00001", pattern(9, 9))
    with pytest.raises(FewshiftError, match=r"are those of 'val' is not known, val.txt is not there"):
        load_scenes(small("gtav"), "val", tmp_path)
    (tmp_path / "gtav" / "split.mat").write_bytes(b"no matrix")
    with pytest.raises(FewshiftError, match=r"split.mat does not say which images are those of 'val'"):
        load_scenes(small("gtav"), "val", tmp_path)
    (tmp_path / "gtav" / "val.txt").write_text("00001\n00007\n00005\n")
    facts = r"3 images of 'val' are listed and 1 found in .*images, the first that is missing is 00005"
    with pytest.raises(FewshiftError, match=facts):
        load_scenes(small("gtav"), "val", tmp_path)


@pytest.mark.parametrize("home", ["synthia", "RAND_CITYSCAPES", "synthia/RAND_CITYSCAPES"])
def test_synthia_is_read_by_its_lists(tmp_path: Path, home: str) -> None:
    stored = np.random.default_rng(5).integers(0, 300, (12, 15, 3))
    stored[..., 0] = pattern(12, 15, classes=23)
    for name in ("0000000", "0000003"):
        save(tmp_path / home / "RGB" / f"{name}.png", np.zeros((12, 15, 3)))
        save_16_bits(tmp_path / home / "GT" / "LABELS" / f"{name}.png", stored)
    lists = tmp_path / home.removesuffix("/RAND_CITYSCAPES")
    (lists / "val.txt").write_text("0000003.png\n")
    (lists / "train.txt").write_text("0000000.png\n")
    numbers = by_hand(stored[..., 0], street.SYNTHIA_IDS)
    check(load_scenes(small("synthia"), "train", tmp_path, AS_IS), numbers)
    check(load_scenes(small("synthia"), "val", tmp_path, AS_IS), numbers)


def test_camvid_is_read_from_folders(tmp_path: Path) -> None:
    stored = pattern(12, 15, classes=12)
    for place, name in (("day", "0006R0_f00930"), ("dusk", "0001TP_006690")):
        save_scene(tmp_path / "camvid" / place, name, stored)
        check(load_scenes(small("camvid"), place, tmp_path, AS_IS), np.where(stored == 11, IGNORE, stored))
    both = load_scenes(small("camvid"), "day+dusk", tmp_path, AS_IS)
    assert [file.stem for file in both.files] == ["0006R0_f00930", "0001TP_006690"]
    assert [file.stem for file in both.label_files] == ["0006R0_f00930", "0001TP_006690"]


def test_streets_score_what_the_simulator_and_the_city_both_have(tmp_path: Path) -> None:
    stored = np.array([[0, 11, 12, 13], [14, 18, 255, 5]], dtype=np.uint8)
    expected = np.array([[0, 11, IGNORE, 12], [IGNORE, IGNORE, IGNORE, 5]])
    for place in ("carla", "cityscapes"):
        save_scene(tmp_path / "streets" / place, "frame", stored)
        check(load_scenes(small("streets"), place, tmp_path, AS_IS), expected)
    assert COLLECTIONS["streets"].classes[12] == "car"


def test_camvid_is_read_as_published(tmp_path: Path) -> None:
    colours = np.array(list(street.CAMVID_COLOURS), np.uint8)[pattern(24, 30, classes=32)]
    home = tmp_path / "CamVid"
    for name in ("0006R0_f00930", "0016E5_00390", "Seq05VD_f00000", "0001TP_006690"):
        save(home / "701_StillsRaw_full" / f"{name}.png", np.zeros((24, 30, 3)))
        save(home / "LabeledApproved_full" / f"{name}_L.png", colours)
    numbers = by_hand(colours, street.CAMVID_COLOURS)
    check(load_scenes(small("camvid"), "day", tmp_path, AS_IS), numbers, count=3)
    check(load_scenes(small("camvid"), "dusk", tmp_path, AS_IS), numbers)
    with pytest.raises(FewshiftError, match=r"'dusk' of CamVid has 1 images in .*701_StillsRaw_full, 124 expected"):
        load_scenes("camvid", "dusk", home)
    (home / "LabeledApproved_full" / "0001TP_006690_L.png").unlink()
    assert len(load_scenes(small("camvid"), "day", tmp_path, AS_IS)) == 3  # dusk is no business of day's
    with pytest.raises(FewshiftError, match=r"1 of 1 image in .* has no label PNG, the first is 0001TP_006690.png"):
        load_scenes(small("camvid"), "dusk", tmp_path)


def test_each_kind_of_data_has_its_reader(tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match=r"camvid .*pixel.*load_scenes"):
        load_domain("camvid", "day", tmp_path)
    with pytest.raises(FewshiftError, match=r"pacs .*image.*load_domain"):
        load_scenes("pacs", "photo", tmp_path)
    with pytest.raises(FewshiftError, match="camvid has no domain 'night': use one of day, dusk"):
        load_scenes("camvid", "day+night", tmp_path)


def test_support_is_drawn_from_train_where_val_is_judged() -> None:
    for name in ("cityscapes", "bdd100k", "mapillary", "synthia"):
        assert COLLECTIONS[name].support_domain("val") == "train"
    assert COLLECTIONS["camvid"].support_domain("dusk") == "dusk"
    rows = {row["name"]: row for row in describe()}
    assert rows["cityscapes"]["support_from"] == {"val": "train"}
    assert rows["pacs"]["support_from"] == {}

"""Every pixel keeps its class, through values, colours and palettes; a pixel that has none is named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewshift.core.losses import IGNORE
from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.label_files import (
    FIRST_COLOURS,
    Encoding,
    default_palette,
    origin_of,
    overlay,
    palette_of,
    read_labels,
    read_palette,
    resized_labels,
    write_labels,
    write_palette,
)
from fewshift.images.scenes import scene_folder
from tests.helpers.pictures import AS_IS, Array, by_hand, pattern, save, save_16_bits, save_scene

# --- values and colours


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_index_files_are_looked_up_value_by_value(tmp_path: Path, mode: str) -> None:
    known = {7: 0, 8: 1, 21: 2, 200: 1, 0: IGNORE}
    values = np.random.default_rng(1).choice([*known, IGNORE], (23, 31))
    image = Image.fromarray(values.astype(np.uint16 if mode == "I;16" else np.uint8))
    if mode == "P":
        image.putpalette(list(range(256)) * 3)
    image.save(tmp_path / "a.png")
    assert np.array_equal(Encoding(known).read(tmp_path / "a.png"), by_hand(values, known))
    assert np.array_equal(Encoding(known, {(1, 2, 3): 0}).read(tmp_path / "a.png"), by_hand(values, known))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_are_looked_up_pixel_by_pixel(tmp_path: Path, mode: str) -> None:
    known = {(0, 0, 0): IGNORE, (255, 255, 255): 0, (0, 0, 255): 1, (1, 0, 255): 2, (128, 64, 128): 253}
    colours = np.array(list(known), np.uint8)[np.random.default_rng(2).integers(0, 5, (23, 31))]
    image = Image.fromarray(colours)
    image = image.quantize(8) if mode == "P" else image.convert(mode)
    image.save(tmp_path / "a.png")
    assert np.array_equal(Encoding(colours=known).read(tmp_path / "a.png"), by_hand(colours, known))


def test_a_lenient_encoding_ignores_what_it_does_not_list() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert np.array_equal(Encoding({3: 1}, strict=False).decode(values), by_hand(values, {3: 1}))
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    known = {tuple(colours[4, 4].tolist()): 5}
    assert np.array_equal(Encoding(colours=known, strict=False).decode(colours), by_hand(colours, known))


@pytest.mark.parametrize("channels", [3, 4])
def test_the_first_channel_of_16_bits_is_the_class(tmp_path: Path, channels: int) -> None:
    known = {number: number % 19 for number in range(23)}
    stored = np.random.default_rng(3).integers(0, 65_536, (9, 11, channels))
    stored[..., 0] = np.random.default_rng(4).integers(0, 23, (9, 11))  # the others number instances
    save_16_bits(tmp_path / "a.png", stored)
    encoding, expected = Encoding(known, first_channel=True), by_hand(stored[..., 0], known)
    assert np.array_equal(encoding.read(tmp_path / "a.png"), expected)
    for plain in (stored[..., 0], stored[..., :3] % 256):  # copies that were saved with 8 bits
        assert np.array_equal(encoding.read(save(tmp_path / "b.png", plain)), expected)


def test_values_outside_the_classes_are_counted(tmp_path: Path) -> None:
    labels = pattern(20, 20)
    labels[:10, :12], labels[19, 16:] = 37, 90
    with pytest.raises(FewshiftError, match=r"a\.png: .*values 37 \(120 pixels\), 90 \(4 pixels\).*use 0 to 2"):
        Encoding.index(3).read(save(tmp_path / "a.png", labels))
    with pytest.raises(FewshiftError, match=r"value -1 \(1 pixel\).*use 0, 3, 9"):
        Encoding({0: 0, 3: 1, 9: 2}).decode(np.array([[-1, 3]]))
    with pytest.raises(FewshiftError, match=r"values 3 \(1 pixel\), .*7 \(1 pixel\) and 2 more"):
        Encoding.index(3).decode(np.arange(10).reshape(2, 5))


def test_colours_outside_the_palette_are_counted(tmp_path: Path) -> None:
    colours = np.zeros((8, 8, 3), np.uint8)
    colours[0, 0], colours[4:] = (1, 2, 3), (250, 0, 9)
    with pytest.raises(FewshiftError, match=r"a\.png: .*colours 1 2 3 \(1 pixel\), 250 0 9 \(32 pixels\)"):
        Encoding(colours={(0, 0, 0): 0}).read(save(tmp_path / "a.png", colours))


def test_a_colour_image_without_a_palette_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match=r"a\.png: .*colours.*write palette\.txt"):
        Encoding.index(3).read(save(tmp_path / "a.png", np.zeros((4, 4, 3))))


def test_broken_label_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"no image")
    (tmp_path / "c.png").write_bytes(save(tmp_path / "whole.png", pattern(90, 90)).read_bytes()[:120])
    for name, fact in {"b": "is not an image", "c": "is damaged", "d": "no such image"}.items():
        with pytest.raises(FewshiftError, match=fact) as error:
            Encoding.index(3).read(tmp_path / f"{name}.png")
        assert f"{name}.png" in str(error.value)


# --- palette files

PALETTE = """# made by hand
128 64 128 road
0 0 0 void
70 130 180\tthe sky

0 128 0 tree
128 128 0 tree
"""
COLOURS = np.array([(128, 64, 128), (0, 0, 0), (70, 130, 180), (0, 128, 0), (128, 128, 0)], np.uint8)
LINES = [tuple(colour) for colour in COLOURS.tolist()]
MEANING = np.array([0, IGNORE, 1, 2, 2], np.uint8)  # of the lines


@pytest.fixture
def painted(tmp_path: Path) -> tuple[Path, Array]:
    """Two label files of the same classes, colour.png by colour and index.png by line number, and these classes."""
    lines = pattern(12, 15, classes=5)
    save_scene(tmp_path, "index", lines)
    save_scene(tmp_path, "colour", lines)
    save(tmp_path / "labels" / "colour.png", COLOURS[lines])
    (tmp_path / "palette.txt").write_text(PALETTE)
    return tmp_path, MEANING[lines]


def test_a_palette_names_classes_of_colours_and_of_values(painted: tuple[Path, Array]) -> None:
    scenes = scene_folder(painted[0], AS_IS)
    assert scenes.classes == ("road", "the sky", "tree")
    assert scenes.palette == ((128, 64, 128), (70, 130, 180), (0, 128, 0))
    for index in range(2):
        assert np.array_equal(scenes.pixels(index)[1].numpy(), painted[1])


def test_a_palette_follows_the_order_of_the_network(painted: tuple[Path, Array]) -> None:
    order = ("tree", "car", "The_Sky", "road")
    scenes = scene_folder(painted[0], AS_IS, order)
    assert scenes.classes == order
    assert scenes.palette[0] == (0, 128, 0)
    numbers = by_hand(painted[1], {0: 3, 1: 2, 2: 0, IGNORE: IGNORE})
    assert all(np.array_equal(scenes.pixels(index)[1].numpy(), numbers) for index in range(2))
    with pytest.raises(FewshiftError, match=r"palette\.txt.*'the sky'.*or void, the known classes are road, tree"):
        scene_folder(painted[0], AS_IS, ("road", "tree"))


def test_a_palette_names_classes_that_are_only_numbers(painted: tuple[Path, Array]) -> None:
    assert scene_folder(painted[0], AS_IS, ("0", "1", "2")).classes == ("road", "the sky", "tree")
    with pytest.raises(FewshiftError, match=r"3 classes.*4 outputs without names"):
        scene_folder(painted[0], AS_IS, ("0", "1", "2", "3"))


def save_table(path: Path, values: Array, table: Sequence[Sequence[int]]) -> None:
    """An index file with a colour table, which ends in black: Pillow cuts values that have no colour."""
    image = Image.fromarray(values.astype(np.uint8))
    image.putpalette(np.array([*table, *[(0, 0, 0)] * (256 - len(table))], np.uint8).tobytes())
    image.save(path)


@pytest.mark.parametrize(
    "table", [LINES, [(1, 2, 3), *LINES[1:]], [(9, 9, 200)] * 5], ids=["own", "one differs", "other"]
)
def test_an_index_file_whose_table_does_not_contradict_it_has_line_numbers(
    painted: tuple[Path, Array], table: Sequence[Sequence[int]]
) -> None:
    root, meaning = painted
    values = pattern(12, 15, classes=5)
    values[0], meaning[0] = IGNORE, IGNORE
    save_table(root / "labels" / "index.png", values, table)
    assert np.array_equal(scene_folder(root, AS_IS).pixels(1)[1].numpy(), meaning)


def test_values_that_are_no_lines_are_read_by_their_colours(painted: tuple[Path, Array]) -> None:
    root, meaning = painted
    save_table(root / "labels" / "index.png", pattern(12, 15, classes=5) + 7, [(1, 1, 1)] * 7 + LINES)
    assert np.array_equal(scene_folder(root, AS_IS).pixels(1)[1].numpy(), meaning)


@pytest.mark.parametrize(
    ("values", "table", "facts"),
    [
        ([0, 1], [(0, 128, 0), (9, 9, 9)], "value 0 .*colour 0 128 0"),
        ([0, 0], [(0, 0, 0)], "value 0 .*colour 0 0 0"),
        ([0, 255], [(9, 9, 9)] * 255 + [(0, 128, 0)], "value 255 .*colour 0 128 0"),
        ([7, 8], [(7, 7, 7)] * 9, r"values 7 \(6 pixels\), 8 \(6 pixels\)"),
    ],
)
def test_a_table_that_contradicts_the_values_is_refused(
    painted: tuple[Path, Array], values: list[int], table: Sequence[Sequence[int]], facts: str
) -> None:
    file = painted[0] / "labels" / "index.png"
    save_table(file, np.array(values).repeat(6).reshape(3, 4), table)
    with pytest.raises(FewshiftError, match=rf"index\.png: .*{facts}"):
        scene_folder(painted[0], AS_IS).encoding.read(file)


def test_a_palette_may_lie_elsewhere(painted: tuple[Path, Array]) -> None:
    root, _ = painted
    (root / "palette.txt").rename(root / "colours.txt")
    assert scene_folder(root, AS_IS, palette=root / "colours.txt").classes == ("road", "the sky", "tree")
    with pytest.raises(FewshiftError, match=r"no such palette .*none\.txt"):
        scene_folder(root, AS_IS, palette=root / "none.txt")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("128 64 128 road\n1 2 3\n", r"line 2 of .*palette\.txt is '1 2 3'"),
        ("128 64 256 road\n", "line 1 of"),
        ("road 1 2 3\n", "line 1 of"),
        ("0 0 0 Void\n", "names no classes"),
        ("1 2 3 road\n1 2 3 sky\n", r"two classes \(1, 2, 3\).*'sky'"),
    ],
)
def test_impossible_palettes_are_refused(painted: tuple[Path, Array], text: str, facts: str) -> None:
    (painted[0] / "palette.txt").write_text(text)
    with pytest.raises(FewshiftError, match=facts):
        scene_folder(painted[0], AS_IS)


# --- colours

# Machado, Oliveira and Fernandes 2009, table 1: linear RGB as seen without red and without green cones
WITHOUT = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "nothing": np.eye(3).tolist(),
}


@pytest.mark.parametrize("cones", WITHOUT)
def test_the_first_colours_differ_for_every_eye(cones: str) -> None:
    share = np.array([*FIRST_COLOURS, (0, 0, 0)]) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    seen = (linear @ np.array(WITHOUT[cones]).T).clip(0, 1)
    xyz = seen @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T
    ratio = xyz / [0.9505, 1, 1.089]
    root = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    x, y, z = root.T
    lab = np.stack([116 * y, 500 * (x - y), 200 * (y - z)], 1)
    apart = [np.linalg.norm(one - other) for one, other in itertools.combinations(lab, 2)]
    assert min(apart) > 15  # two colours that differ by 2.3 can just be told apart side by side


def test_every_class_has_a_colour_of_its_own_and_keeps_it() -> None:
    colours = default_palette(255)
    assert len({*colours, (0, 0, 0)}) == 256
    assert all(default_palette(count) == colours[:count] for count in (0, 1, 11, 12, 60))
    assert colours[11:14] == ((128, 0, 0), (0, 128, 0), (128, 128, 0))  # Pascal VOC's aeroplane, bicycle, bird


def test_classes_of_the_street_have_the_colours_people_know() -> None:
    car, road, light = (cityscapes.PALETTE[cityscapes.CLASSES.index(name)] for name in ("car", "road", "traffic light"))
    assert palette_of(["car", "Traffic_Light", "road"]) == (car, light, road)
    assert palette_of(["car", "boat"]) == default_palette(2)


# --- writing


def test_a_label_file_holds_classes_and_shows_colours(tmp_path: Path) -> None:
    labels = torch.from_numpy(pattern(9, 12).copy())
    labels[0] = IGNORE
    colours = default_palette(3)
    file = write_labels(tmp_path / "l.png", labels, colours, origin=("me today", 0.25))
    assert torch.equal(read_labels(file), labels)
    assert origin_of(file) == ("me today", 0.25)
    with Image.open(file) as image:
        shown = np.asarray(image.convert("RGB"))
    expected = {**dict(enumerate(colours)), IGNORE: (0, 0, 0)}
    for row, column in itertools.product(range(9), range(12)):
        assert tuple(shown[row, column]) == expected[int(labels[row, column])]


def test_a_file_that_does_not_say_who_made_it_has_no_origin(tmp_path: Path) -> None:
    plain = write_labels(tmp_path / "l.png", torch.zeros(2, 2).byte(), default_palette(1))
    (tmp_path / "broken.png").write_text("x")
    assert [origin_of(file) for file in (plain, tmp_path / "broken.png", tmp_path / "none.png")] == [None] * 3


def test_a_palette_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = write_palette(tmp_path / "palette.txt", ["the sea", "été"], default_palette(2))
    assert read_palette(file) == list(zip(["the sea", "été"], default_palette(2), strict=True))


def test_an_overlay_is_half_image_half_colour_and_leaves_unlabelled_pixels_alone() -> None:
    pixels = np.full((1, 2, 3), 100, np.uint8)
    shown = np.asarray(overlay(Image.fromarray(pixels), torch.tensor([[0, IGNORE]]), [(200, 0, 50)]))
    assert shown.tolist() == [[[150, 50, 75], [100, 100, 100]]]


def test_resizing_labels_makes_no_new_ones() -> None:
    labels = torch.tensor([[0, 9], [255, 4]], dtype=torch.uint8)
    assert resized_labels(labels, (4, 2)).tolist() == [[0, 0, 9, 9], [255, 255, 4, 4]]
    assert set(resized_labels(labels, (7, 5)).unique().tolist()) == {0, 4, 9, 255}

"""Every pixel keeps its label: through files, palettes, resizing and crops; what cannot be meant is named."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fewshift.core.losses import IGNORE
from fewshift.errors import FewshiftError
from fewshift.images import Encoding, Preprocess, Scenes, scene_folder, street
from fewshift.images.inputs import as_support, as_unlabelled
from fewshift.lab.datasets.catalog import COLLECTIONS, describe
from fewshift.lab.datasets.collection import Collection
from fewshift.lab.datasets.copies import load_domain, load_scenes

AS_IS = Preprocess(None, None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
NAMES = ("road", "sky", "tree")


def pattern(height: int, width: int, classes: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    """Class numbers in patches of a few pixels."""
    coarse = np.random.default_rng(seed).integers(0, classes, (height // 3 + 1, width // 3 + 1), dtype=np.uint8)
    return coarse.repeat(3, 0).repeat(3, 1)[:height, :width]


def save(path: Path, pixels: np.ndarray[Any, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def scene(
    root: Path,
    name: str,
    labels: np.ndarray[Any, Any],
    images: str = "images",
    its_labels: str = "labels",
    end: str = "",
) -> None:
    """A picture in which brightness is the class, and its label file."""
    save(root / images / f"{name}.png", np.stack([labels.astype(np.uint8) * 10] * 3, -1))
    save(root / its_labels / f"{name}{end}.png", labels)


def small(name: str) -> Collection:
    """The collection as it is described, but for the number of images."""
    return replace(COLLECTIONS[name], counts=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("b", "a", "more/c")):
        scene(tmp_path, name, pattern(9, 12 + index, seed=index))
    return tmp_path


# --- geometry


@pytest.mark.parametrize("size", [(30, 44), (44, 30), (13, 40), (40, 13), (30, 30), (11, 9)])
@pytest.mark.parametrize(
    ("resize", "crop", "rule"),
    [
        (None, None, {}),
        (None, 25, {}),  # cuts, or pads
        (22, None, {}),
        (20, 16, {}),
        (16, 21, {}),  # wider than the shorter side
        (24, 24, {"side": "height"}),  # upright pictures are padded
        (15, 12, {"squeeze": True}),
    ],
)
def test_labels_end_where_the_pixels_of_their_picture_end(
    size: tuple[int, int], resize: int | None, crop: int | None, rule: Mapping[str, Any]
) -> None:
    labels = 1 + pattern(*size)  # 0 is left for what lies outside the picture
    steps = Preprocess(resize, crop, (0.0,), (1.0,), "nearest", **rule)
    picture = steps.pixels(Image.fromarray(labels * 10))[0]
    numbers = steps.labels(labels)
    assert numbers.dtype == torch.uint8
    assert torch.equal(torch.where(numbers == IGNORE, 0, numbers * 10), picture)


def test_padding_is_ignored_and_never_a_class() -> None:
    steps = Preprocess(4, 6, (0.0,), (1.0,))
    expected = torch.full((6, 6), IGNORE, dtype=torch.uint8)
    expected[1:5] = 2
    assert torch.equal(steps.labels(np.full((4, 8), 2)), expected)


def test_labels_are_those_of_torchvision() -> None:
    from torchvision.transforms import v2

    labels = pattern(31, 47, classes=9)
    theirs = v2.Compose([v2.Resize(20, v2.InterpolationMode.NEAREST_EXACT), v2.CenterCrop(16)])
    ours = Preprocess(20, 16, (0.0,), (1.0,)).labels(labels)
    assert torch.equal(ours, theirs(torch.from_numpy(labels)[None])[0])


@pytest.mark.parametrize(("size", "resized"), [((20, 40), (10, 20)), ((40, 20), (10, 5)), ((40, 1), (10, 1))])
def test_by_height_upright_pictures_become_narrower_than_high(size: tuple[int, int], resized: tuple[int, int]) -> None:
    steps = Preprocess(10, None, (0.0,), (1.0,), side="height")
    assert steps.labels(np.zeros(size, np.uint8)).shape == resized
    assert steps.pixels(Image.new("L", size[::-1])).shape[1:] == resized


@pytest.mark.parametrize("mode", ["L", "P", "I", "I;16", "1"])
def test_label_images_of_every_mode_are_numbers(mode: str) -> None:
    labels = pattern(6, 7, classes=2)
    kind = {"I": np.int32, "I;16": np.uint16, "1": np.bool_}.get(mode, np.uint8)
    image = Image.fromarray(labels.astype(kind))
    if mode == "P":
        image.putpalette([9, 9, 9] * 256)  # what it looks like is not what it means
    assert image.mode == mode
    assert torch.equal(AS_IS.labels(image), torch.from_numpy(labels))


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.zeros((3, 4, 3), np.uint8), "shape .3, 4, 3. and uint8 values: give one class number for each pixel"),
        (np.zeros((3, 4)), "float64 values"),
        (np.full((3, 4), 256), "from 256 to 256: use 0 to 254, 255 to ignore"),
        (np.full((3, 4), -1), "from -1 to -1"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(labels: np.ndarray[Any, Any], told: str) -> None:
    with pytest.raises(FewshiftError, match=told):
        AS_IS.labels(labels)


# --- label files


def by_hand(pixels: np.ndarray[Any, Any], known: Mapping[Any, int], other: int = IGNORE) -> np.ndarray[Any, Any]:
    """One pixel after the other."""
    found = np.empty(pixels.shape[:2], np.uint8)
    for row in range(pixels.shape[0]):
        for column in range(pixels.shape[1]):
            value = pixels[row, column]
            found[row, column] = known.get(tuple(value.tolist()) if value.ndim else int(value), other)
    return found


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_index_files_are_looked_up_value_by_value(tmp_path: Path, mode: str) -> None:
    known = {7: 0, 8: 1, 21: 2, 200: 1, 0: IGNORE}
    values = (
        np.random.default_rng(1).choice([*known, IGNORE], (23, 31)).astype(np.uint16 if mode == "I;16" else np.uint8)
    )
    image = Image.fromarray(values)
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


def test_what_a_lenient_encoding_does_not_list_is_ignored() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert np.array_equal(Encoding({3: 1}, strict=False).decode(values), by_hand(values, {3: 1}))
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    known = {tuple(colours[4, 4].tolist()): 5}
    assert np.array_equal(Encoding(colours=known, strict=False).decode(colours), by_hand(colours, known))


def test_values_outside_the_classes_are_counted(tmp_path: Path) -> None:
    labels = pattern(20, 20)
    labels[:10, :12] = 37
    labels[19, 16:] = 90
    file = save(tmp_path / "a.png", labels)
    told = (
        f"{file}: the labels have values 37 (120 pixels), 90 (4 pixels), outside the classes: use 0 to 2, and 255 "
        "where nothing is labelled, or tell in palette.txt what they mean"
    )
    with pytest.raises(FewshiftError) as error:
        Encoding.index(3).read(file)
    assert str(error.value) == told


def test_colours_outside_the_palette_are_counted(tmp_path: Path) -> None:
    colours = np.zeros((8, 8, 3), np.uint8)
    colours[0, 0], colours[4:] = (1, 2, 3), (250, 0, 9)
    file = save(tmp_path / "a.png", colours)
    told = (
        f"{file}: the labels have colours 1 2 3 (1 pixel), 250 0 9 (32 pixels), not among the 1 of the palette: add to "
        "it or repaint what is wrong"
    )
    with pytest.raises(FewshiftError) as error:
        Encoding(colours={(0, 0, 0): 0}).read(file)
    assert str(error.value) == told


def test_many_unknown_values_are_not_all_told() -> None:
    with pytest.raises(FewshiftError, match=r"values 3 \(1 pixel\), .*7 \(1 pixel\) and 2 more, outside"):
        Encoding.index(3).decode(np.arange(10).reshape(2, 5))
    with pytest.raises(FewshiftError, match=r"value -1 \(1 pixel\), outside the classes: use 0, 3, 9, and 255"):
        Encoding({0: 0, 3: 1, 9: 2}).decode(np.array([[-1, 3]]))


def test_a_colour_image_without_a_palette_asks_for_one(tmp_path: Path) -> None:
    file = save(tmp_path / "a.png", np.zeros((4, 4, 3)))
    with pytest.raises(FewshiftError, match=r"a.png: the labels are colours, .*: write palette.txt"):
        Encoding.index(3).read(file)
    with pytest.raises(FewshiftError, match="neither values nor colours"):
        Encoding()


def test_broken_label_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "b.png").write_bytes(b"no image")
    (tmp_path / "c.png").write_bytes(save(tmp_path / "whole.png", pattern(90, 90)).read_bytes()[:120])
    for name, told in {"a": "is empty", "b": "is not an image", "c": "is damaged", "d": "no such image"}.items():
        with pytest.raises(FewshiftError, match=told) as error:
            Encoding.index(3).read(tmp_path / f"{name}.png")
        assert f"{name}.png" in str(error.value)


def save_16_bits(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    """A colour PNG with 16 bits a channel, which Pillow does not write."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize("channels", [3, 4])
def test_the_first_channel_of_16_bits_is_the_class(tmp_path: Path, channels: int) -> None:
    stored = np.random.default_rng(3).integers(0, 65_536, (9, 11, channels))
    stored[..., 0] = np.random.default_rng(4).integers(0, 23, (9, 11))  # the others number instances
    save_16_bits(tmp_path / "a.png", stored)
    encoding = Encoding(street.SYNTHIA_IDS, first_channel=True)
    assert np.array_equal(encoding.read(tmp_path / "a.png"), by_hand(stored[..., 0], street.SYNTHIA_IDS))
    for plain in (stored[..., 0], stored[..., :3] % 256):  # copies that were saved with 8 bits
        save(tmp_path / "b.png", plain)
        assert np.array_equal(encoding.read(tmp_path / "b.png"), by_hand(stored[..., 0], street.SYNTHIA_IDS))


# --- scenes


def test_scenes_are_pairs_in_the_order_of_their_names(folder: Path) -> None:
    scenes = scene_folder(folder, AS_IS, NAMES)
    assert [file.name for file in scenes.files] == ["a.png", "b.png", "c.png"]
    assert scenes.label_files[2] == folder / "labels" / "more" / "c.png"
    assert (len(scenes), scenes.classes, len(scenes.palette)) == (3, NAMES, 3)
    for (pixels, numbers), file in zip(map(scenes.pixels, range(3)), scenes.files, strict=True):
        assert (pixels.dtype, numbers.dtype) == (torch.uint8, torch.uint8)
        assert np.array_equal(numbers.numpy() * 10, np.asarray(Image.open(file))[..., 0])
        assert torch.equal(pixels[0], numbers * 10)
    image, labels = scenes[1]
    assert torch.equal(image, scenes.preprocess.normalise(scenes.pixels(1)[0]))
    assert (labels.dtype, labels.shape) == (torch.int64, image.shape[1:])
    assert scenes.original(1).size == (12, 9)


def test_images_of_different_sizes_keep_them(folder: Path) -> None:
    assert [tuple(image.shape[1:]) for image, _ in scene_folder(folder, AS_IS, NAMES)] == [(9, 13), (9, 12), (9, 14)]  # type: ignore[attr-defined]


def test_a_subset_is_the_scenes_asked_for(folder: Path) -> None:
    scenes = scene_folder(folder, AS_IS, NAMES)
    for order in ([2, 0], torch.tensor([2, 0])):
        part = scenes.subset(order)
        assert [file.stem for file in part.files] == [file.stem for file in part.label_files] == ["c", "a"]
    assert scenes.without([2]).tolist() == [0, 1]
    with pytest.raises(FewshiftError, match="indices are a mask"):
        scenes.subset(torch.tensor([True, False, True]))


def test_sizes_that_differ_within_a_pair_are_told_before_resizing(folder: Path) -> None:
    save(folder / "labels" / "a.png", pattern(18, 26))
    scenes = scene_folder(folder, replace(AS_IS, resize=8, crop=8), NAMES)
    with pytest.raises(FewshiftError) as error:
        scenes[0]
    pair = f"{folder / 'images' / 'a.png'} is 13x9 pixels and {folder / 'labels' / 'a.png'} is 26x18"
    assert str(error.value) == f"{pair}: label every image in its own size"


def test_labels_of_a_photograph_as_stored_are_told_to_turn(folder: Path) -> None:
    (folder / "images" / "a.png").unlink()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (13, 9)).save(folder / "images" / "a.jpg", exif=turned)
    with pytest.raises(
        FewshiftError, match=r"a.jpg is 9x13 pixels upright, by its EXIF orientation, and .* is 13x9: t"
    ):
        scene_folder(folder, AS_IS, NAMES)[0]


def test_what_is_alone_is_counted_and_named(folder: Path) -> None:
    (folder / "labels" / "b.png").unlink()
    (folder / "labels" / "more" / "c.png").unlink()
    told = f"2 of 3 images in {folder / 'images'} have no label PNG, the first is b.png"
    with pytest.raises(FewshiftError, match=f"^{told}: add what is missing or remove what is alone$"):
        scene_folder(folder, AS_IS, NAMES)
    save(folder / "labels" / "z.png", pattern(9, 9))
    more = f"{told}, and 1 of 2 label files in {folder / 'labels'} has no image, the first is z.png: add"
    with pytest.raises(FewshiftError, match=more):
        scene_folder(folder, AS_IS, NAMES)
    for name in ("b", "more/c"):
        (folder / "images" / f"{name}.png").unlink()
    with pytest.raises(FewshiftError, match=r"^1 of 2 label files"):
        scene_folder(folder, AS_IS, NAMES)


def test_hidden_files_are_no_labels_and_twins_are_refused(folder: Path) -> None:
    save(folder / "labels" / "._a.png", pattern(9, 9))
    assert len(scene_folder(folder, AS_IS, NAMES)) == 3
    save(folder / "images" / "a.jpg", pattern(9, 9))
    with pytest.raises(FewshiftError, match=r"a.jpg and .*a.png have the same name: rename one"):
        scene_folder(folder, AS_IS, NAMES)


def test_classes_are_asked_for_and_never_guessed(folder: Path) -> None:
    with pytest.raises(FewshiftError, match=r"is not known: pass classes, .*, or write .*palette.txt"):
        scene_folder(folder, AS_IS)
    with pytest.raises(FewshiftError, match=r"has no labelled scenes: put images into .*/images and label PNGs"):
        scene_folder(folder / "images", AS_IS, NAMES)
    with pytest.raises(FewshiftError, match=r"b.png: the labels have value 2 \(\d+ pixels\), outside"):
        scene_folder(folder, AS_IS, NAMES[:2])[1]
    with pytest.raises(FewshiftError, match="256 classes"):
        scene_folder(folder, AS_IS, [str(number) for number in range(256)])


# --- palettes

PALETTE = """# made by hand
128 64 128 road
0 0 0 void
70 130 180\tthe sky

0 128 0 tree
128 128 0 tree
"""
COLOURS = np.array([(128, 64, 128), (0, 0, 0), (70, 130, 180), (0, 128, 0), (128, 128, 0)], np.uint8)
MEANING = np.array([0, IGNORE, 1, 2, 2], np.uint8)  # of the lines


@pytest.fixture
def painted(tmp_path: Path) -> tuple[Path, np.ndarray[Any, Any]]:
    lines = pattern(12, 15, classes=5)
    scene(tmp_path, "index", lines)
    scene(tmp_path, "colour", lines)
    save(tmp_path / "labels" / "colour.png", COLOURS[lines])
    (tmp_path / "palette.txt").write_text(PALETTE)
    return tmp_path, MEANING[lines]


def test_a_palette_names_classes_of_colours_and_of_values(painted: tuple[Path, np.ndarray[Any, Any]]) -> None:
    scenes = scene_folder(painted[0], AS_IS)
    assert scenes.classes == ("road", "the sky", "tree")
    assert scenes.palette == ((128, 64, 128), (70, 130, 180), (0, 128, 0))
    for index in range(2):
        assert np.array_equal(scenes.pixels(index)[1].numpy(), painted[1])


def test_a_palette_follows_the_order_of_the_network(painted: tuple[Path, np.ndarray[Any, Any]]) -> None:
    order = ("tree", "car", "The_Sky", "road")
    scenes = scene_folder(painted[0], AS_IS, order)
    assert scenes.classes == order
    assert scenes.palette[0] == (0, 128, 0)
    numbers = by_hand(painted[1], {0: 3, 1: 2, 2: 0, IGNORE: IGNORE})
    assert all(np.array_equal(scenes.pixels(index)[1].numpy(), numbers) for index in range(2))
    unknown = r"palette.txt has a class 'the sky' that is none of the network's 2 \(road, tree\): give it the network's"
    with pytest.raises(FewshiftError, match=unknown):
        scene_folder(painted[0], AS_IS, ("road", "tree"))


def test_a_palette_names_classes_that_are_mere_numbers(painted: tuple[Path, np.ndarray[Any, Any]]) -> None:
    assert scene_folder(painted[0], AS_IS, ("0", "1", "2")).classes == ("road", "the sky", "tree")
    with pytest.raises(
        FewshiftError, match="names 3 classes, and the network has 4 outputs without names: pass --classes"
    ):
        scene_folder(painted[0], AS_IS, ("0", "1", "2", "3"))


def save_table(path: Path, values: np.ndarray[Any, Any], table: Sequence[Sequence[int]]) -> None:
    """An index file with a colour table, which ends in black: Pillow cuts values that have no colour."""
    image = Image.fromarray(values.astype(np.uint8))
    image.putpalette(np.array([*table, *[(0, 0, 0)] * (256 - len(table))], np.uint8).tobytes())
    image.save(path)


GREY = [(it, it, it) for it in range(256)]
LIST = [tuple(it) for it in COLOURS.tolist()]


@pytest.mark.parametrize("order", [(4, 2, 0, 1, 3), (1, 0, 2, 3, 4)])
def test_a_file_that_shows_colours_of_the_palette_means_them(
    painted: tuple[Path, np.ndarray[Any, Any]], order: tuple[int, ...]
) -> None:
    root, meaning = painted
    lines, file = pattern(12, 15, classes=5), root / "labels" / "index.png"
    save_table(file, np.argsort(order)[lines], [LIST[it] for it in order])
    assert np.array_equal(np.asarray(Image.open(file).convert("RGB")), COLOURS[lines])
    assert np.array_equal(scene_folder(root, AS_IS).pixels(1)[1].numpy(), meaning)
    Image.fromarray(COLOURS[lines]).quantize(5).save(file)
    assert np.array_equal(scene_folder(root, AS_IS).pixels(1)[1].numpy(), meaning)


@pytest.mark.parametrize(
    "table",
    [GREY, [(0, 0, 0)], [(9, 9, 200), (7, 7, 0)], LIST, LIST + GREY[5:], [(1, 2, 3), *LIST[1:]]],
    ids=["grey", "black", "other", "own", "own and grey", "one differs"],
)
def test_a_table_that_shows_other_colours_leaves_values_the_numbers_of_lines(
    painted: tuple[Path, np.ndarray[Any, Any]], table: Sequence[Sequence[int]]
) -> None:
    root, meaning = painted
    values = pattern(12, 15, classes=5)
    values[0], meaning[0] = IGNORE, IGNORE
    save_table(root / "labels" / "index.png", values, table)
    assert np.array_equal(scene_folder(root, AS_IS).pixels(1)[1].numpy(), meaning)


@pytest.mark.parametrize(
    ("values", "table", "told"),
    [
        (
            [0, 1],
            [(0, 128, 0), (9, 9, 9)],
            "value 0 means one thing by its number and another by the colour 0 128 0 that the file's",
        ),
        ([0, 0], [(0, 0, 0)], "value 0 means one thing by its number and another by the colour 0 0 0"),
        ([7, 8], [*GREY[:7], (0, 128, 0), (1, 2, 3)], r"colour 1 2 3 \(6 pixels\), not among the 5 of the palette"),
        ([7, 8], GREY, r"values 7 \(6 pixels\), 8 \(6 pixels\), outside the classes"),
    ],
)
def test_a_table_that_contradicts_the_lines_is_refused(
    painted: tuple[Path, np.ndarray[Any, Any]], values: list[int], table: Sequence[Sequence[int]], told: str
) -> None:
    root, _ = painted
    save_table(root / "labels" / "index.png", np.array(values).repeat(6).reshape(3, 4), table)
    with pytest.raises(FewshiftError, match=rf"index.png: .*{told}"):
        scene_folder(root, AS_IS).encoding.read(root / "labels" / "index.png")


def test_a_mask_of_black_and_white_is_not_taken_for_one_without_labels(painted: tuple[Path, Any]) -> None:
    root, _ = painted
    file = root / "labels" / "index.png"
    save_table(file, pattern(9, 9, classes=2) * 255, GREY)
    (root / "palette.txt").write_text("0 0 0 ground\n255 255 255 house\n")
    with pytest.raises(
        FewshiftError, match="value 255 means one thing by its number and another by the colour 255 255"
    ):
        scene_folder(root, AS_IS).encoding.read(file)
    Image.fromarray(pattern(9, 9, classes=2) * 255).convert("RGB").quantize(2).save(file)
    assert np.array_equal(scene_folder(root, AS_IS).encoding.read(file), pattern(9, 9, classes=2))


def test_tables_are_not_asked_where_values_have_a_meaning_of_their_own(tmp_path: Path) -> None:
    values = pattern(12, 15, classes=11)
    scene(tmp_path / "camvid" / "dusk", "0001TP_006690", values)
    file = tmp_path / "camvid" / "dusk" / "labels" / "0001TP_006690.png"
    save_table(file, values, street.CAMVID_PALETTE[::-1])
    check(load_scenes(small("camvid"), "dusk", tmp_path, AS_IS), values)


def test_a_palette_may_lie_elsewhere(painted: tuple[Path, np.ndarray[Any, Any]]) -> None:
    root, _ = painted
    (root / "palette.txt").rename(root / "colours.txt")
    assert scene_folder(root, AS_IS, palette=root / "colours.txt").classes == ("road", "the sky", "tree")
    with pytest.raises(FewshiftError, match=r"no such palette .*none.txt"):
        scene_folder(root, AS_IS, palette=root / "none.txt")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("128 64 128 road\n1 2 3\n", r"line 2 of .*palette.txt is '1 2 3': write red, green and blue"),
        ("128 64 256 road\n", "line 1 of"),
        ("road 1 2 3\n", "line 1 of"),
        ("0 0 0 Void\n", "names no classes"),
        ("", "names no classes"),
        ("1 2 3 road\n1 2 3 sky\n", r"paints two classes \(1, 2, 3\), the second is 'sky'"),
    ],
)
def test_palettes_that_cannot_be_meant_are_refused(folder: Path, text: str, told: str) -> None:
    (folder / "palette.txt").write_text(text)
    with pytest.raises(FewshiftError, match=told):
        scene_folder(folder, AS_IS)


# --- Cityscapes as it is published


def cityscapes(root: Path, kind: str = "labelIds", above: Sequence[str] = ("", "")) -> np.ndarray[Any, Any]:
    """Two cities; the label files of other kinds lie beside those that are read."""
    stored = pattern(12, 15, classes=34 if kind == "labelIds" else 19)
    for part, city in (("train", "aachen"), ("val", "lindau")):
        name = f"{part}/{city}/{city}_000000_000019"
        scene(root, name, stored, f"{above[0]}raw", f"{above[1]}gtFine", f"_gtFine_{kind}")
        picture = root / f"{above[0]}leftImg8bit" / f"{name}_leftImg8bit.png"
        picture.parent.mkdir(parents=True)
        (root / f"{above[0]}raw" / f"{name}.png").rename(picture)
        save(root / f"{above[1]}gtFine" / f"{name}_gtFine_color.png", np.zeros((12, 15, 3)))
    return stored


@pytest.mark.parametrize(
    ("inside", "count"), [(".", 2), ("leftImg8bit", 2), ("leftImg8bit/val", 1), ("leftImg8bit/val/lindau", 1)]
)
def test_cityscapes_needs_no_names(tmp_path: Path, inside: str, count: int) -> None:
    stored = cityscapes(tmp_path)
    scenes = scene_folder(tmp_path / inside, AS_IS)
    assert (len(scenes), scenes.classes, scenes.palette) == (count, street.CLASSES, street.PALETTE)
    assert np.array_equal(scenes.pixels(0)[1].numpy(), by_hand(stored, street.CITYSCAPES_IDS))


@pytest.mark.parametrize("inside", ["", "val", "val/lindau"])
def test_labels_of_cityscapes_point_to_its_images(tmp_path: Path, inside: str) -> None:
    cityscapes(tmp_path)
    images = tmp_path / "leftImg8bit" / inside
    with pytest.raises(FewshiftError, match=f"has the labels of Cityscapes, not its images: give {images}$"):
        as_support(tmp_path / "gtFine" / inside, AS_IS, None, None)


def test_cityscapes_follows_the_order_of_the_network(tmp_path: Path) -> None:
    stored = cityscapes(tmp_path, "labelTrainIds")
    scenes = scene_folder(tmp_path, AS_IS, street.CLASSES[::-1])
    assert np.array_equal(scenes.pixels(0)[1].numpy(), 18 - stored)
    assert scenes.palette == street.PALETTE[::-1]
    with pytest.raises(FewshiftError, match="has a class 'sidewalk' that is none of the network's 3"):
        scene_folder(tmp_path, AS_IS, NAMES)


def test_the_label_maps_are_the_published_ones() -> None:
    # road, sidewalk, wall, traffic light, rider, train, bicycle of each
    assert [street.CITYSCAPES_IDS[it] for it in (7, 8, 12, 19, 25, 31, 33)] == [0, 1, 3, 6, 12, 16, 18]
    assert [street.SYNTHIA_IDS[it] for it in (3, 4, 21, 15, 17, 20, 11)] == [0, 1, 3, 6, 12, 16, 18]
    assert [street.MAPILLARY_IDS[it] for it in (13, 15, 6, 48, 20, 58, 52)] == [0, 1, 3, 6, 12, 16, 18]
    for ids, count in ((street.CITYSCAPES_IDS, 34), (street.SYNTHIA_IDS, 23), (street.MAPILLARY_IDS, 66)):
        assert list(ids) == list(range(count))
        assert set(ids.values()) == {*range(19), IGNORE}
    assert len(street.CAMVID_COLOURS) == 32
    assert set(street.CAMVID_COLOURS.values()) == {*range(11), IGNORE}
    assert [len(it) for it in (street.CLASSES, street.PALETTE, street.CAMVID_CLASSES)] == [19, 19, 11]


# --- data sets


def check(scenes: Scenes, numbers: np.ndarray[Any, Any], count: int = 1) -> None:
    assert len(scenes) == count
    assert np.array_equal(scenes.pixels(0)[1].numpy(), numbers)


@pytest.mark.parametrize("above", [("", ""), ("leftImg8bit_trainvaltest/", "gtFine_trainvaltest/")])
@pytest.mark.parametrize(("kind", "ids"), [("labelIds", street.CITYSCAPES_IDS), ("labelTrainIds", street.TRAIN_IDS)])
def test_cityscapes_is_read(tmp_path: Path, above: Sequence[str], kind: str, ids: Mapping[int, int]) -> None:
    stored = cityscapes(tmp_path / "Cityscapes", kind, above)
    for domain in ("train", "val"):
        check(load_scenes(small("cityscapes"), domain, tmp_path, AS_IS), by_hand(stored, ids))
    with pytest.raises(
        FewshiftError, match=r"'val' of Cityscapes has 1 images in .*val, 500 expected: get leftImg8bit"
    ):
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
    scene(tmp_path / "bdd100k", "7d06fefd-f7be05a6", stored, images, labels, end)
    check(load_scenes(small("bdd100k"), "val", tmp_path, AS_IS), stored)
    told = r"'train' of BDD100K, segmentation \(7,000 images\) is not in .*, 2 domains expected and 1 found \(val\)"
    with pytest.raises(FewshiftError, match=told):
        load_scenes("bdd100k", "train", tmp_path)


@pytest.mark.parametrize("labels", ["validation/labels", "validation/v1.2/labels"])
def test_mapillary_is_read(tmp_path: Path, labels: str) -> None:
    stored = pattern(30, 20, classes=66)
    scene(tmp_path / "mapillary", "a", stored, "validation/images", labels)
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
        scene(tmp_path / "gtav", name, stored)
    if split == "split.mat":
        savemat(tmp_path / "gtav" / split, {"valIds": np.array([[22], [23]]), "trainIds": np.array([[1]])})
    else:
        (tmp_path / "gtav" / split).write_text("00022.png\n00023\n\n")
    scenes = load_scenes(small("gtav"), "val", tmp_path, AS_IS)
    assert [file.stem for file in scenes.files] == ["00022", "00023"]
    check(scenes, by_hand(stored, street.CITYSCAPES_IDS), count=2)
    colours = np.array([(20, 20, 20), *street.PALETTE], np.uint8)[pattern(12, 15, classes=20)]
    save(tmp_path / "gtav" / "labels" / "00022.png", colours)
    known = {colour: number for number, colour in enumerate(street.PALETTE)}
    check(scenes, by_hand(colours, known), count=2)
    with pytest.raises(
        FewshiftError, match=r"'val' of GTAV has 2 images in .*, 6,382 expected: get images, labels and"
    ):
        load_scenes("gtav", "val", tmp_path)


def test_a_split_that_is_missing_or_names_what_is_missing_is_told(tmp_path: Path) -> None:
    scene(tmp_path / "gtav", "00001", pattern(9, 9))
    with pytest.raises(FewshiftError, match=r"are those of 'val' is not known, val.txt is not there: get images"):
        load_scenes(small("gtav"), "val", tmp_path)
    (tmp_path / "gtav" / "split.mat").write_bytes(b"no matrix")
    with pytest.raises(
        FewshiftError, match=r"split.mat does not say which images are those of 'val': extract it again"
    ):
        load_scenes(small("gtav"), "val", tmp_path)
    (tmp_path / "gtav" / "val.txt").write_text("00001\n00007\n00005\n")
    told = r"3 images of 'val' are listed and 1 found in .*images, the first that is missing is 00005: get images"
    with pytest.raises(FewshiftError, match=told):
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
        scene(tmp_path / "camvid" / place, name, stored)
        check(load_scenes(small("camvid"), place, tmp_path, AS_IS), np.where(stored == 11, IGNORE, stored))
    both = load_scenes(small("camvid"), "day+dusk", tmp_path, AS_IS)
    assert [file.stem for file in both.files] == ["0006R0_f00930", "0001TP_006690"]
    assert [file.stem for file in both.label_files] == ["0006R0_f00930", "0001TP_006690"]


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
    with pytest.raises(FewshiftError, match="camvid has labels for pixels: read it with load_scenes"):
        load_domain("camvid", "day", tmp_path)
    with pytest.raises(FewshiftError, match="pacs has labels for images: read it with load_domain"):
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


# --- as support


def test_a_folder_of_scenes_is_a_dense_support(folder: Path) -> None:
    support = as_support(folder, replace(AS_IS, resize=8, crop=8), None, NAMES)
    assert isinstance(support.images, torch.Tensor)
    assert isinstance(support.labels, torch.Tensor)
    assert (support.kind.unit == "pixel", support.classes) == (True, NAMES)
    assert (support.images.shape, support.labels.shape) == ((3, 3, 8, 8), (3, 8, 8))
    assert support.labels.dtype == torch.int64


def test_cityscapes_is_a_dense_support(tmp_path: Path) -> None:
    cityscapes(tmp_path)
    support = as_support(str(tmp_path / "leftImg8bit" / "train"), AS_IS, None, None)
    assert (len(support), support.kind.unit == "pixel", support.classes) == (1, True, street.CLASSES)


def test_scenes_and_pairs_of_different_sizes_stay_ragged(folder: Path) -> None:
    scenes = scene_folder(folder, AS_IS, NAMES)
    pairs = [scenes[index] for index in range(3)]
    pictures = [
        (Image.open(file), Image.open(labels)) for file, labels in zip(scenes.files, scenes.label_files, strict=True)
    ]
    for given, steps in ((scenes, None), (scenes, AS_IS), (pairs, None), (pairs, AS_IS), (pictures, AS_IS)):
        support = as_support(given, steps, None, None)
        assert isinstance(support.images, tuple)
        assert isinstance(support.labels, tuple)
        for index, (image, labels) in enumerate(pairs):
            assert torch.equal(support.images[index], image)
            assert torch.equal(support.labels[index], labels)


def test_scenes_are_read_with_the_steps_given(folder: Path) -> None:
    scenes = scene_folder(folder, AS_IS, NAMES)
    steps = replace(AS_IS, resize=6, crop=6)
    support = as_support(scenes, steps, None, None)
    assert torch.equal(support.images[2], replace(scenes, preprocess=steps)[2][0])
    with pytest.raises(FewshiftError, match=r"resized with the images: pass preprocess=fewshift.Preprocess"):
        as_support(scenes, lambda image: image, None, None)


def test_a_dataset_may_have_arrays_as_labels() -> None:
    items = [(torch.rand(3, 5, 6), pattern(5, 6).astype(np.int32)) for _ in range(2)]
    support = as_support(items, None, None, NAMES)
    assert isinstance(support.labels, torch.Tensor)
    assert np.array_equal(support.labels.numpy(), np.stack([labels for _, labels in items]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_list_of_images_and_one_of_labels_are_columns(count: int) -> None:
    maps = [pattern(5 + index, 6) for index in range(count)]
    images = [torch.rand(3, *labels.shape) for labels in maps]
    for given in ((images, maps), [images, [Image.fromarray(it) for it in maps]], list(zip(images, maps, strict=True))):
        support = as_support(given, None, None, NAMES)
        assert len(support) == count
        for index, labels in enumerate(maps):
            assert torch.equal(support.images[index], images[index])
            assert np.array_equal(support.labels[index].numpy(), labels)
    with pytest.raises(FewshiftError, match=f"there are {count} images and {count + 1} labels: give one for each"):
        as_support((images, [*maps, maps[0]]), None, None, NAMES)
    numbers = as_support(([images[0]] * 2, [0, 1]), None, None, NAMES)
    assert numbers.labels.tolist() == [0, 1]


def test_tensors_that_do_not_belong_together_are_told() -> None:
    images, labels = torch.rand(2, 3, 5, 6), torch.zeros(2, 4, 6, dtype=torch.long)
    told = "image 0 is 6x5 pixels and its labels are 6x4: give one label for each pixel"
    for support in ((images, labels), list(zip(images, labels, strict=True))):
        with pytest.raises(FewshiftError, match=told):
            as_support(support, None, None, None)
    with pytest.raises(FewshiftError, match="the labels of image 0 are float32, not integers: give a class number"):
        as_support([(images[0], torch.rand(5, 6))], None, None, None)
    with pytest.raises(FewshiftError, match="the labels of image 0 are float64, not integers"):
        as_support((images, torch.rand(2, 5, 6).double()), None, None, None)
    small_label = Image.new("L", (6, 4))
    with pytest.raises(FewshiftError, match="image 0 is 7x5 pixels and its labels are 6x4"):
        as_support([(Image.new("RGB", (7, 5)), small_label)], replace(AS_IS, resize=4, crop=4), None, None)


def test_label_files_are_not_taken_for_unlabelled_pictures(folder: Path) -> None:
    steps = replace(AS_IS, resize=6, crop=6)
    for given in (folder, scene_folder(folder, AS_IS, NAMES)):
        found = as_unlabelled(given, steps, None)
        assert found is not None
        assert len(found) == 3
        assert found.batch(torch.arange(3)).shape == (3, 3, 6, 6)

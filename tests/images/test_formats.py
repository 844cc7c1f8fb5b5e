"""HEIC and AVIF photographs, and files that are left out: counted, and named where they are images."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

import fewshift
from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files, labelled_folder, open_image
from fewshift.images.inputs import as_support, as_unlabelled
from tests.helpers.pictures import AS_IS, save

needs_avif = pytest.mark.skipif(not features.check("avif"), reason="this Pillow was built without AVIF")


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)


def save_heic(path: Path, turned: bool = False) -> Path:
    """A red photograph of 64x48 pixels with a blue left half; turned, the camera was held upright."""
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    image = Image.new("RGB", (64, 48), "red")
    image.paste("blue", (0, 0, 32, 48))
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    image.info["exif"] = exif.tobytes()  # pillow-heif turns this one into HEIC's own orientation, as cameras do
    return save(path, image)


def test_a_heic_photograph_is_read_upright(tmp_path: Path) -> None:
    plain = np.asarray(open_image(save_heic(tmp_path / "a.heic"), "RGB")).astype(int)
    assert plain.shape == (48, 64, 3)
    assert abs(plain[24, 10] - [0, 0, 255]).max() < 12
    assert abs(plain[24, 54] - [255, 0, 0]).max() < 12
    turned = np.asarray(open_image(save_heic(tmp_path / "b.HEIC", turned=True), "RGB")).astype(int)
    assert turned.shape == (64, 48, 3)
    assert abs(turned[10, 24] - [0, 0, 255]).max() < 12  # left is up after a quarter turn clockwise


@needs_avif
def test_an_avif_picture_needs_nothing_but_pillow(tmp_path: Path, without_extra: None) -> None:
    path = save(tmp_path / "a.avif", Image.new("RGB", (16, 16), (0, 255, 0)))
    assert image_files(tmp_path) == [path]
    assert abs(np.asarray(open_image(path, "RGB")).astype(int) - [0, 255, 0]).max() < 12


def test_heic_photographs_of_a_folder_are_images_like_others(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    wanted = [save_heic(tmp_path / "cat" / "1.heic"), save(tmp_path / "cat" / "2.png")]
    assert image_files(tmp_path) == wanted
    assert fewshift.left_out(tmp_path) is None


def test_without_the_extra_the_message_names_it(tmp_path: Path, without_extra: None) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.heic").write_bytes(b"some photograph")
    for read in (
        lambda: image_files(tmp_path / "cat" / "1.heic"),
        lambda: image_files(tmp_path),
        lambda: labelled_folder(tmp_path, AS_IS),
        lambda: open_image(tmp_path / "cat" / "1.heic", "RGB"),
    ):
        with pytest.raises(FewshiftError, match=r'pip install "fewshift\[heic\]"'):
            read()


def test_files_that_are_left_out_are_counted_and_images_named(tmp_path: Path, without_extra: None) -> None:
    for name in ("cat/1.png", "dog/1.png"):
        save(tmp_path / name)
    images = [tmp_path / "cat" / "b.heic", tmp_path / "dog" / "a.JP2", tmp_path / "dog" / "raw.nef"]
    others = [tmp_path / "cat" / "notes.txt", tmp_path / "dog" / "._1.jpg", tmp_path / ".DS_Store"]
    for path in (*images, *others):
        path.write_bytes(b"x")
    support, unlabelled = as_support(tmp_path, AS_IS), as_unlabelled(tmp_path, AS_IS, None)
    assert unlabelled is not None
    for left in (support.left_out, unlabelled.left_out, fewshift.left_out(tmp_path)):
        assert left is not None
        assert (left.count, left.files) == (6, tuple(images))


def test_where_every_file_is_an_image_nothing_is_left_out(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/1.png"):
        save(tmp_path / name)
    assert fewshift.left_out(tmp_path) is None
    assert as_support(tmp_path, AS_IS).left_out is None

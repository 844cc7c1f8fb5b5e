"""Folders of images: read upright, in order, whole; anything wrong is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files, labelled_folder, open_image
from fewshift.images.preprocess import IMAGENET
from tests.helpers.pictures import AS_IS, picture, png, save

# --- one image


def test_a_photograph_taken_sideways_stands_upright(tmp_path: Path) -> None:
    upright = Image.new("RGB", (6, 4), "black")
    upright.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate a quarter clockwise to show
    path = tmp_path / "turned.png"
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    assert np.array_equal(np.asarray(open_image(path, "RGB")), np.asarray(upright))


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)
    path = save(tmp_path / "deep.png", Image.fromarray(values))
    assert np.asarray(open_image(path, "RGB"))[0].tolist() == [[v, v, v] for v in (0, 1, 128, 255)]


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(open_image(save(tmp_path / "a.png", image), "RGB")).tolist() == [[[255] * 3, [10, 20, 30]]]


def test_a_palette_is_looked_up_transparent_or_not(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([9, 8, 7, 200, 100, 50])
    image.putpixel((1, 0), 1)
    assert np.asarray(open_image(save(tmp_path / "p.png", image), "RGB")).tolist() == [[[9, 8, 7], [200, 100, 50]]]
    image.save(tmp_path / "t.png", transparency=b"\0\xff")
    assert np.asarray(open_image(tmp_path / "t.png", "RGB")).tolist() == [[[255] * 3, [200, 100, 50]]]


def test_floating_point_pixels_are_refused_with_the_file_named(tmp_path: Path) -> None:
    path = save(tmp_path / "heat.tiff", Image.new("F", (3, 3)))
    with pytest.raises(FewshiftError, match=r"heat\.tiff: .*floating-point"):
        open_image(path, "RGB")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.jpg").write_text("not a picture")
    (tmp_path / "blank.png").touch()
    facts = {"notes.jpg": "is not an image", "blank.png": "is empty", "never.png": "no such image"}
    for name, fact in facts.items():
        with pytest.raises(FewshiftError, match=fact) as error:
            open_image(tmp_path / name, "RGB")
        assert name in str(error.value)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_half_an_image_is_refused_and_named(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"half{suffix}", picture(64, 64))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FewshiftError, match=rf"half\{suffix} is (damaged|not an image)"):
        open_image(path, "RGB")


@pytest.mark.parametrize("side", [13_400, 20_000])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_hundred_bytes_that_claim_gigabytes_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, guarded: bool
) -> None:
    if not guarded:  # other libraries switch Pillow's guard off
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    path = tmp_path / "bomb.png"
    path.write_bytes(png(side, side, 8, 3, b"\0"))
    with pytest.raises(FewshiftError, match=r"bomb\.png claims more than 179 million pixels"):
        open_image(path, "RGB")


def test_a_photograph_of_108_megapixels_is_read(tmp_path: Path) -> None:
    Image.new("L", (12_000, 9_000), 7).save(tmp_path / "large.jpg")
    image = open_image(tmp_path / "large.jpg", "L")
    assert (image.size, image.getpixel((11_999, 8_999))) == ((12_000, 9_000), 7)


# --- folders


def test_images_are_found_at_any_depth_in_order_without_hidden_ones(tmp_path: Path) -> None:
    wanted = [save(tmp_path / name) for name in ("b/2.png", "a.JPG", "b/c/1.webp")]
    for other in (".hidden.png", ".cache/x.png"):
        save(tmp_path / other)
    (tmp_path / "readme.txt").touch()
    assert image_files(tmp_path) == sorted(wanted)


def test_one_image_is_a_list_of_one(tmp_path: Path) -> None:
    path = save(tmp_path / "one.png")
    assert image_files(path) == [path]


def test_a_folder_above_may_be_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / ".cache" / "cat" / "1.png")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert len(image_files("../.cache")) == len(labelled_folder("../.cache", AS_IS)) == 1


def test_no_images_no_folder_and_no_image_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FewshiftError, match=r"no images below .*put some there"):
        image_files(tmp_path)
    with pytest.raises(FewshiftError, match=r"no such folder .*nowhere"):
        image_files(tmp_path / "nowhere")
    with pytest.raises(FewshiftError, match=r"notes\.txt is not an image: give a folder or one of .*\.jpg"):
        image_files(tmp_path / "notes.txt")


def test_classes_are_the_sorted_folder_names(tmp_path: Path) -> None:
    for name in ("zebra/1.png", "Ant/1.png", "cat/2.png", "cat/1.png"):
        save(tmp_path / name)
    folder = labelled_folder(tmp_path, AS_IS)
    assert folder.classes == ("Ant", "cat", "zebra")
    assert [(path.parent.name, path.name) for path in folder.files] == [
        ("Ant", "1.png"), ("cat", "1.png"), ("cat", "2.png"), ("zebra", "1.png"),
    ]  # fmt: skip
    assert folder.labels == (0, 1, 1, 2)


def test_labels_are_positions_in_the_classes_of_the_network(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/1.png"):
        save(tmp_path / name)
    folder = labelled_folder(tmp_path, AS_IS, classes=["dog", "owl", "cat"])
    assert folder.classes == ("dog", "owl", "cat")
    assert folder.labels == (2, 0)


def test_an_item_is_the_preprocessed_image_and_its_label(tmp_path: Path) -> None:
    for index, name in enumerate(("cat/1.png", "dog/1.png")):
        save(tmp_path / name, picture(8, 5, seed=index))
    folder = labelled_folder(tmp_path, AS_IS)
    image, label = folder[1]
    expected = torch.from_numpy(np.array(picture(8, 5, seed=1))).permute(2, 0, 1) / 255
    torch.testing.assert_close(image, expected)
    images, labels = folder.tensors()
    assert (label, labels.tolist(), labels.dtype) == (1, [0, 1], torch.int64)
    assert torch.equal(images[1], image)


def test_an_unknown_class_is_named_with_the_known_ones(tmp_path: Path) -> None:
    save(tmp_path / "otter" / "1.png")
    with pytest.raises(FewshiftError, match=r"class 'otter' .*known classes are cat, dog$"):
        labelled_folder(tmp_path, AS_IS, classes=["cat", "dog"])
    with pytest.raises(FewshiftError, match=r"c18, c19 and 980 more$"):
        labelled_folder(tmp_path, AS_IS, classes=[f"c{index}" for index in range(1000)])


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "1.png")
    (tmp_path / "dog").mkdir()
    with pytest.raises(FewshiftError, match="class 'dog' has no images"):
        labelled_folder(tmp_path, AS_IS)


def test_a_folder_without_classes_shows_the_layout_it_should_have(tmp_path: Path) -> None:
    save(tmp_path / "1.png")
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FewshiftError, match=r"one folder per class, such as .*/cat/1\.jpg"):
            labelled_folder(root, AS_IS)


def test_an_image_beside_the_class_folders_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "1.png")
    save(tmp_path / "stray.png")
    with pytest.raises(FewshiftError, match=r"stray\.png lies beside the class folders"):
        labelled_folder(tmp_path, AS_IS)


def test_images_of_different_sizes_cannot_be_stacked(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "1.png", picture(8, 5))
    save(tmp_path / "cat" / "2.png", picture(8, 6))
    with pytest.raises(FewshiftError, match=r"1\.png is 8x5 pixels and .*2\.png is 8x6: give a crop size"):
        labelled_folder(tmp_path, AS_IS).tensors()


def test_a_strip_is_not_enlarged_until_memory_ends(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "strip.png", Image.new("RGB", (50_000, 1)))
    with pytest.raises(FewshiftError, match=r"strip\.png: the image is 50000x1 pixels, a strip"):
        labelled_folder(tmp_path, IMAGENET).tensors()


# --- names of classes


def test_a_name_that_differs_in_case_alone_is_the_networks_class(tmp_path: Path) -> None:
    for name in ("DOG/1.png", "Golden Retriever/1.png"):
        save(tmp_path / name)
    folder = labelled_folder(tmp_path, AS_IS, classes=["golden retriever", "cat", "dog"])
    assert folder.classes == ("golden retriever", "cat", "dog")
    assert folder.labels == (2, 0)


@pytest.mark.parametrize("name", ["Golden_Retriever", "golden retrievers", "goldenretriever", "golden retreiver"])
def test_a_near_miss_is_an_error_that_asks_did_you_mean(tmp_path: Path, name: str) -> None:
    save(tmp_path / name / "1.png")
    with pytest.raises(FewshiftError, match=f"class '{name}' .*did you mean 'golden retriever'?"):
        labelled_folder(tmp_path, AS_IS, classes=["cat", "golden retriever", "puppy"])


@pytest.mark.parametrize(("plural", "single"), [("puppies", "puppy"), ("foxes", "fox"), ("dogs", "dog")])
def test_a_plural_is_a_near_miss_in_both_directions(tmp_path: Path, plural: str, single: str) -> None:
    for name, known in ((plural, single), (single, plural)):
        save(tmp_path / name / name / "1.png")
        with pytest.raises(FewshiftError, match=f"did you mean '{known}'?"):
            labelled_folder(tmp_path / name, AS_IS, classes=["ant", known])


def test_case_that_leaves_doubt_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "one" / "DOG" / "1.png")
    with pytest.raises(FewshiftError, match="class 'DOG' that the network does not know"):
        labelled_folder(tmp_path / "one", AS_IS, classes=["dog", "Dog"])
    for name in ("dog", "Dog"):
        save(tmp_path / "two" / name / "1.png")
    with pytest.raises(FewshiftError, match="has 'Dog' and 'dog', and the network one class 'dog'"):
        labelled_folder(tmp_path / "two", AS_IS, classes=["cat", "dog"])

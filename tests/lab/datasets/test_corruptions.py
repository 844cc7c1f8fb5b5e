"""Corruptions: stronger is worse, the same twice, and exact where the result is known."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as ops

from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.corruptions import CORRUPTIONS, corrupted
from fewshift.lab.datasets.domain import Domain

KINDS = tuple(dict.fromkeys(name.split()[0] for name in CORRUPTIONS))
each_corruption = pytest.mark.parametrize("corruption", CORRUPTIONS)


def domain_of(pixels: torch.Tensor) -> Domain:
    channels = pixels.shape[1]
    steps = Preprocess(pixels.shape[-1], pixels.shape[-1], (0.5,) * channels, (0.5,) * channels)
    return Domain(pixels, torch.zeros(len(pixels), dtype=torch.long), ("thing",), steps)


def smooth(channels: int, size: int, count: int = 3) -> torch.Tensor:
    """Pictures with structure in them: noise, enlarged and spread over all of [0, 1]."""
    coarse = torch.rand(count, channels, 12, 12, generator=torch.Generator().manual_seed(5))
    fine = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)
    return (fine - fine.min()) / (fine.max() - fine.min())


GREY, COLOUR = smooth(1, 28), smooth(3, 48)
PICTURES = {"grey": GREY, "colour": COLOUR, "digits": digits.uci()[0][:20]}


def test_every_corruption_has_three_strengths():
    assert {f"{kind} {strength}" for kind in KINDS for strength in (1, 2, 3)} == set(CORRUPTIONS)
    assert len(CORRUPTIONS) == 3 * len(KINDS)


@pytest.mark.parametrize(
    ("kind", "pictures"),
    [
        pytest.param(kind, pictures, id=f"{kind}-{name}")
        for kind in KINDS
        for name, pictures in PICTURES.items()
        if kind != "colour" or pictures.shape[1] == 3  # grey has no hue
    ],
)
def test_a_greater_strength_takes_an_image_farther_from_the_clean_one(kind, pictures):
    clean = domain_of(pictures)
    far = [float((corrupted(clean, f"{kind} {strength}").source - pictures).norm()) for strength in (1, 2, 3)]
    assert 0.005 * float(pictures.norm()) < far[0] < far[1] < far[2]


@each_corruption
def test_an_image_is_corrupted_in_the_same_way_twice_and_nobodys_randomness_is_used(corruption):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first, second = (corrupted(domain_of(COLOUR), corruption).source for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


@each_corruption
@pytest.mark.parametrize("pictures", [GREY, COLOUR], ids=["grey", "colour"])
def test_floats_stay_in_the_unit_interval_and_bytes_are_the_nearest_to_them(corruption, pictures):
    as_bytes = (pictures * 255).round().to(torch.uint8)
    floats = corrupted(domain_of(as_bytes / 255), corruption).source
    whole = corrupted(domain_of(as_bytes), corruption).source
    assert floats.dtype == pictures.dtype
    assert (float(floats.min()), float(floats.max())) >= (0.0, 0.0)
    assert float(floats.max()) <= 1
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, (floats * 255).round().to(torch.uint8))
    assert whole.shape == floats.shape == pictures.shape


def test_labels_and_preprocessing_stay_and_the_clean_images_too():
    clean, before = domain_of(GREY), GREY.clone()
    changed = corrupted(clean, "blur 2")
    assert (changed.labels is clean.labels, changed.classes, changed.preprocess) == (
        True,
        clean.classes,
        clean.preprocess,
    )
    assert torch.equal(clean.source, before)


# exact cases


def test_the_strongest_inversion_is_the_negative():
    torch.testing.assert_close(corrupted(domain_of(COLOUR), "inversion 3").source, 1 - COLOUR)
    whole = (GREY * 255).round().to(torch.uint8)
    assert torch.equal(corrupted(domain_of(whole), "inversion 3").source, 255 - whole)


@pytest.mark.parametrize(("strength", "left"), [(1, 0.75), (2, 0.5), (3, 0.25)])
def test_less_contrast_moves_every_pixel_towards_the_mean_of_the_grey_picture(strength, left):
    changed = corrupted(domain_of(COLOUR), f"contrast {strength}").source
    red, green, blue = COLOUR.unbind(1)
    grey = (0.2989 * red + 0.587 * green + 0.114 * blue).mean((1, 2))[:, None, None, None]
    torch.testing.assert_close(changed, left * COLOUR + (1 - left) * grey)


@pytest.mark.parametrize(("strength", "times"), [(1, 1.5), (2, 2), (3, 3)])
def test_brightness_multiplies_until_white(strength, times):
    changed = corrupted(domain_of(COLOUR), f"brightness {strength}").source
    torch.testing.assert_close(changed, (times * COLOUR).clamp(max=1))


@pytest.mark.parametrize(
    ("size", "corruption", "block"),
    [(28, "pixelation 1", 2), (28, "pixelation 3", 4), (224, "pixelation 2", 7), (224, "pixelation 3", 14)],
)
def test_pixelation_makes_constant_blocks(size, corruption, block):
    changed = corrupted(domain_of(smooth(1, size)), corruption).source
    corners = changed[..., ::block, ::block]
    assert torch.equal(changed, corners.repeat_interleave(block, -2).repeat_interleave(block, -1))
    assert len(corners.unique()) > 10


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
@pytest.mark.parametrize("pictures", [GREY, COLOUR], ids=["grey", "colour"])
def test_jpeg_is_what_another_library_makes_of_it(pictures):
    whole = (pictures * 255).round().to(torch.uint8)
    changed = corrupted(domain_of(whole), "jpeg 1").source
    expected = torch.stack([ops.jpeg(image, 20) for image in whole])
    assert float((changed.int() - expected.int()).abs().float().mean()) < 1  # decoders round colours differently


def test_noise_has_its_deviation_and_every_image_its_own():
    grey = torch.full((8, 1, 64, 64), 0.5)
    noise = corrupted(domain_of(grey), "noise 2").source - 0.5
    assert float(noise.std()) == pytest.approx(0.12, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.002)
    assert not torch.equal(noise[0], noise[1])


def test_blur_keeps_the_mean_of_what_lies_inside():
    dot = torch.zeros(1, 1, 224, 224)
    dot[..., 112, 112] = 1
    changed = corrupted(domain_of(dot), "blur 2").source[0, 0]
    places = torch.arange(224.0) - 112
    assert float(changed.sum()) == pytest.approx(1, abs=1e-4)
    assert float((changed.sum(0) * places**2).sum()) ** 0.5 == pytest.approx(0.015 * 224, rel=0.03)


def test_darkness_is_a_power_of_the_light():
    torch.testing.assert_close(corrupted(domain_of(COLOUR), "darkness 2").source, COLOUR**2.4)


@pytest.mark.parametrize(("strength", "values"), [(1, 8), (2, 4), (3, 2)])
def test_posterisation_leaves_a_few_values(strength, values):
    ramp = torch.linspace(0, 1, 256).view(1, 1, 16, 16)
    assert len(corrupted(domain_of(ramp), f"posterisation {strength}").source.unique()) == values


def test_rotation_turns_about_the_middle_and_leaves_no_black_corner():
    bar = torch.zeros(1, 1, 65, 65)
    bar[..., 32, 40:56] = 1  # to the right of the middle
    turned = corrupted(domain_of(bar), "rotation 3").source[0, 0]
    rows, columns = (index.float() for index in turned.nonzero().unbind(1))
    angle = torch.atan2(32 - rows.mean(), columns.mean() - 32).rad2deg()
    assert float(angle) == pytest.approx(40, abs=1.5)
    white = torch.ones(1, 1, 33, 33)
    torch.testing.assert_close(corrupted(domain_of(white), "rotation 2").source, white)


def test_motion_spreads_a_point_along_a_line():
    dot = torch.zeros(1, 1, 101, 101)
    dot[..., 50, 50] = 1
    line = corrupted(domain_of(dot), "motion 2").source[0, 0]  # 7 % of 101 pixels, to the next odd number
    expected = torch.zeros(101, 101)
    expected[50, 46:55] = 1 / 9
    torch.testing.assert_close(line, expected)


def test_dirt_hides_about_its_share_in_another_place_of_each_image():
    white = torch.ones(20, 1, 64, 64)
    hidden = corrupted(domain_of(white), "dirt 2").source < 1
    share = float(hidden.float().mean())
    assert 0.6 * 0.25 < share < 0.25  # spots overlap, and reach over the border
    assert not torch.equal(hidden[0], hidden[1])


def test_half_a_turn_of_the_colour_circle_makes_red_cyan():
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    cyan = torch.tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    torch.testing.assert_close(corrupted(domain_of(red), "colour 3").source, cyan)


@pytest.mark.parametrize("name", ["fog 1", "blur", "blur 4"])
def test_a_corruption_that_does_not_exist_is_named(name):
    with pytest.raises(FewshiftError, match=f"'{name}' is unknown: choose one of noise 1"):
        corrupted(domain_of(GREY), name)


@pytest.mark.parametrize(("strength", "share"), [(1, 0.3), (2, 0.5), (3, 0.7)])
def test_haze_lies_between_the_picture_and_bright_air(strength, share):
    changed = corrupted(domain_of(COLOUR), f"haze {strength}").source
    torch.testing.assert_close(changed, COLOUR + share * (0.85 - COLOUR))


def test_a_vignette_leaves_the_centre_and_takes_the_light_of_corners():
    changed = corrupted(domain_of(torch.ones(1, 3, 33, 65)), "vignette 2").source[0]
    assert changed[:, 16, 32].tolist() == [1, 1, 1]
    torch.testing.assert_close(changed[:, 0, 0], torch.full((3,), 0.25))
    torch.testing.assert_close(changed[:, 16, 0], torch.full((3,), 1 - 0.75 / 2))


def test_grain_makes_as_many_pixels_black_as_white_and_leaves_the_others():
    grey = torch.full((8, 3, 64, 64), 0.5)
    changed = corrupted(domain_of(grey), "grain 3").source
    black, white = (float((changed == value).double().mean()) for value in (0, 1))
    assert (black, white) == (pytest.approx(0.06, rel=0.1), pytest.approx(0.06, rel=0.1))
    assert float((changed == 0.5).double().mean()) == pytest.approx(1 - black - white)
    assert torch.equal(changed[:, 0], changed[:, 2])


def test_zoom_shows_the_middle_alone():
    ramp = torch.linspace(0, 1, 40).expand(1, 1, 40, 40)
    changed = corrupted(domain_of(ramp), "zoom 3").source[0, 0, 0]
    assert float(changed[0]) == pytest.approx(float(ramp[0, 0, 0, 10]), abs=0.01)
    assert float(changed[-1]) == pytest.approx(float(ramp[0, 0, 0, 29]), abs=0.01)


def test_tint_keeps_red_and_takes_green_and_blue():
    changed = corrupted(domain_of(COLOUR), "tint 2").source
    torch.testing.assert_close(changed, torch.stack([COLOUR[:, 0], 0.7 * COLOUR[:, 1], 0.4 * COLOUR[:, 2]], 1))
    torch.testing.assert_close(corrupted(domain_of(GREY), "tint 2").source, 0.7 * GREY)

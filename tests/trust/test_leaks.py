"""The leak guard: the same picture is found in whatever form it comes, a similar one is told, others are left alone."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy.fft import dctn
from torch import Tensor

from fewshift import FewshiftError, Preprocess, Support
from fewshift.core.support import Unlabelled
from fewshift.images.folders import labelled_folder
from fewshift.images.scenes import scene_folder
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.domain import Domain
from fewshift.trust.leaks import (
    LeakWarning,
    content_hash,
    find_leaks,
    fingerprints,
    refuse_leaks,
)
from tests.helpers.networks import make_support

STEPS = Preprocess(None, 24, (0.5,) * 3, (0.25,) * 3)


def picture(seed: int, size: int = 40) -> Image.Image:
    """Soft blots of colour: as smooth as photographs are, and each different."""
    rough = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(rough).resize((size, size), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(io.BytesIO(file.getvalue()))


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of class folders without a common picture."""
    for part, seeds in (("support", range(6)), ("evaluation", range(10, 22))):
        for seed in seeds:
            file = tmp_path / part / ("ant", "bee")[seed % 2] / f"{seed}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture(seed).save(file)
    return tmp_path / "support", tmp_path / "evaluation"


# --- one image


def test_the_same_picture_has_the_same_hash_in_every_file_and_form(tmp_path):
    image = picture(0)
    for name in ("a.png", "b.png", "c.bmp", "d.tif"):
        image.save(tmp_path / name, **({"compress_level": 1} if name == "b.png" else {}))
    forms = [Image.open(file) for file in tmp_path.iterdir()]
    forms += [image, np.array(image), torch.from_numpy(np.array(image)).permute(2, 0, 1)]
    assert len({content_hash(form) for form in forms}) == 1
    assert len({int(fingerprints([form]).perceptual[0]) for form in forms}) == 1


def test_a_grey_picture_equals_the_colour_picture_of_the_same_shades():
    grey = picture(0).convert("L")
    shades = np.array(grey)
    forms = [grey, grey.convert("RGB"), grey.convert("P"), shades, shades[..., None], torch.from_numpy(shades)[None]]
    assert len({content_hash(form) for form in forms}) == 1


def test_one_pixel_makes_another_hash():
    pixels = np.array(picture(0))
    other = pixels.copy()
    other[3, 4, 1] ^= 1
    assert content_hash(pixels) != content_hash(other)
    assert content_hash(pixels) != content_hash(pixels.transpose(1, 0, 2))
    assert content_hash(torch.zeros(2, 8)) != content_hash(torch.zeros(8, 2))


def test_tensors_are_compared_by_value():
    image = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))
    image[0, 0, 0] = 0.0
    negative = image.clone()
    negative[0, 0, 0] = -0.0
    strange = image.unsqueeze(0).contiguous(memory_format=torch.channels_last)[0].requires_grad_(True)
    assert content_hash(image) == content_hash(negative) == content_hash(strange) == content_hash(image.double())


def test_perceptual_bits_are_the_signs_of_the_lowest_frequencies():
    grey = np.array(picture(0, 32).convert("RGB"), float) @ [0.299, 0.587, 0.114]
    table = dctn(grey, type=2)
    places = sorted(((i, j) for i in range(32) for j in range(32) if i + j), key=lambda place: (sum(place), place))[:64]
    expected = int("".join(str(int(table[place] > 0)) for place in places), 2)
    assert fingerprints([picture(0, 32)]).perceptual.tolist() == [expected]


@pytest.mark.parametrize("thing", ["a word", object(), [[1], [2, 3]]])
def test_what_is_no_image_is_one_sentence(thing):
    with pytest.raises(FewshiftError, match="is no image: give"):
        content_hash(thing)


# --- two sets of images


AGAIN = {
    "JPEG": lambda image: jpeg(image, 30),
    "half the size": lambda image: image.resize((20, 20)),
    "twice the size": lambda image: image.resize((80, 80)),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
    "grey": lambda image: image.convert("L"),
}


@pytest.mark.parametrize("how", AGAIN)
def test_a_picture_that_was_saved_again_is_nearly_the_same(how):
    support, evaluation = [picture(seed) for seed in range(4)], [picture(seed) for seed in range(10, 20)]
    evaluation[7] = AGAIN[how](picture(2))
    leaks = find_leaks(support, evaluation)
    assert leaks.identical == ()
    assert [pair[:2] for pair in leaks.near] == [(2, 7)]


def test_different_pictures_are_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leaks = find_leaks([picture(seed) for seed in range(40)], [picture(seed) for seed in range(100, 200)])
        refuse_leaks(leaks)
    assert not leaks


def test_different_digits_are_rarely_flagged_and_copies_always_are():
    (train, _), (held_out, _) = digits.split()
    train, held_out = digits.normalise(train[:300]), digits.normalise(held_out[:700])
    leaks = find_leaks(train, held_out)
    assert leaks.identical == ()
    assert len(leaks.near) <= 2
    leaking = torch.cat([held_out, train[[5, 250]]])
    assert find_leaks(train, leaking).identical == ((5, 700), (250, 701))


def test_single_shades_are_alike_only_if_they_are_the_same():
    shades = [torch.full((3, 9, 9), value) for value in (0.1, 0.7, 0.7)]
    leaks = find_leaks(shades[:2], shades[2:])
    assert leaks.identical == ((1, 0),)
    assert leaks.near == ()


def test_tensors_that_are_no_pictures_are_compared_by_content_alone():
    vectors = torch.eye(6)
    leaks = find_leaks(vectors[:3], vectors[2:])
    assert leaks.identical == ((2, 0),)
    assert leaks.near == ()


def as_domain(folder: Path) -> Domain:
    read = labelled_folder(folder, STEPS)
    return Domain(read.files, torch.tensor(read.labels), read.classes, STEPS)


def as_tensors(folder: Path) -> Tensor:
    return labelled_folder(folder, STEPS).tensors()[0]


FORMS = {
    "a folder": lambda folder: folder,
    "its name": str,
    "files": lambda folder: sorted(folder.rglob("*.png")),
    "a dataset": lambda folder: labelled_folder(folder, STEPS),
    "a domain": as_domain,
    "tensors": as_tensors,
    "arrays": lambda folder: list(as_tensors(folder).numpy()),
    "images and labels": lambda folder: labelled_folder(folder, STEPS).tensors(),
    "a support": lambda folder: Support(*labelled_folder(folder, STEPS).tensors()),
    "unlabelled": lambda folder: Unlabelled(as_tensors(folder)),
    "fingerprints": lambda folder: fingerprints(folder, STEPS),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_leak_is_found_in_every_form(places, form):
    support, evaluation = places
    Image.open(support / "ant" / "2.png").save(evaluation / "bee" / "copy.png", compress_level=0)
    position = sorted(evaluation.rglob("*.png")).index(evaluation / "bee" / "copy.png")
    for one, other in ((FORMS[form](support), as_tensors(evaluation)), (as_tensors(support), FORMS[form](evaluation))):
        assert find_leaks(one, other, preprocess=STEPS).identical == ((1, position),)
    if form != "fingerprints":
        assert find_leaks(FORMS[form](support), FORMS[form](evaluation)).identical == ((1, position),)


def test_scenes_are_compared_by_their_images(tmp_path):
    for part in ("a", "b"):
        for kind in ("images", "labels"):
            (tmp_path / part / kind).mkdir(parents=True)
        picture(0 if part == "a" else 5).save(tmp_path / part / "images" / "one.png")
        picture(3).save(tmp_path / part / "images" / "two.png")
        for name in ("one", "two"):
            Image.new("L", (40, 40), 1).save(tmp_path / part / "labels" / f"{name}.png")
    left, right = (scene_folder(tmp_path / part, STEPS, ["grass", "water"]) for part in ("a", "b"))
    assert find_leaks(left, right).identical == ((1, 1),)
    assert find_leaks(tmp_path / "a", tmp_path / "b").identical == ((1, 1),)


def test_on_disk_pictures_are_compared_whatever_a_network_sees_of_them(places):
    """A centre crop hides the margin, where these two differ."""
    support, evaluation = places
    pixels = np.array(Image.open(support / "ant" / "0.png"))
    pixels[0] = 255 - pixels[0]
    Image.fromarray(pixels).save(evaluation / "ant" / "margin.png")
    left, right = labelled_folder(support, STEPS), labelled_folder(evaluation, STEPS)
    assert find_leaks(left, right).identical == ()
    assert len(find_leaks(left.tensors()[0], right).identical) == 1


# --- what is said


def test_an_image_in_both_sets_is_an_error_that_names_it(places):
    support, evaluation = places
    for seed in range(5):
        picture(seed).save(evaluation / "ant" / f"copy{seed}.png")
    with pytest.raises(FewshiftError) as error:
        refuse_leaks(find_leaks(support, evaluation))
    sentence = str(error.value)
    assert sentence.startswith("5 of the 6 support images are also among the 17 evaluation images (")
    assert f"{support / 'ant' / '0.png'} and {evaluation / 'ant' / 'copy0.png'}" in sentence
    assert "and 2 more" in sentence
    assert "remove them from one of the two" in sentence


def test_a_similar_image_is_a_warning_that_names_it(places):
    support, evaluation = places
    jpeg(picture(4), 60).save(evaluation / "bee" / "again.jpg")
    leaks = find_leaks(support, evaluation)
    with pytest.warns(LeakWarning, match=r"1 of the 6 support images is nearly the same .*4\.png and .*again\.jpg\)"):
        refuse_leaks(leaks)
    facts = json.loads(json.dumps(leaks.to_json()))
    assert facts["identical"] == []
    assert facts["near"][0][:2] == [str(support / "ant" / "4.png"), str(evaluation / "bee" / "again.jpg")]


def test_images_without_files_are_named_by_number():
    images = make_support().images
    with pytest.raises(FewshiftError, match=r"\(support image 3 .* and evaluation image 0 .*\)"):
        refuse_leaks(find_leaks(images[:4], images[3:]))


BAD = {
    "files and tensors": (
        lambda one, _: find_leaks(one, torch.zeros(2, 3, 8, 8)),
        "compared with tensors: pass prepro",
    ),
    "nothing": (lambda *_: find_leaks(torch.zeros(0, 3, 8, 8), torch.zeros(1, 3, 8, 8)), "no images to compare"),
    "a number": (lambda *_: find_leaks(7, 8), "cannot read images from int"),
    "no folder": (lambda one, _: find_leaks(one / "nowhere", one), "no such folder"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_one_sentence(places, mistake):
    act, sentence = BAD[mistake]
    with pytest.raises(FewshiftError, match=sentence):
        act(*places)

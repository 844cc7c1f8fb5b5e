"""Pictures of pixel labels: exact for programs, distinguishable and described for people."""

from __future__ import annotations

import base64
import io
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fewshift import Adaptation, Preprocess, Support, adapt
from fewshift.core.labels import PIXELS
from fewshift.core.metrics import pixel_tally
from fewshift.images import street
from fewshift.images.palettes import FIRST_COLOURS, default_palette, palette_of
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.report import adaptation_page
from fewshift.report.pages import PICTURED, evaluation_page
from fewshift.report.scenes import (
    LARGEST,
    Scene,
    Scores,
    Sizes,
    image_iou,
    indexed,
    overlay,
    resized_labels,
    side_by_side,
    thumbnail,
    write_labels,
)
from tests.report.test_pages import EVIL, Page

CLASSES = ("road", "<i>sky</i>", "car", "never")


def scene(name: str = "a.png", seed: int = 0, size: tuple[int, int] = (9, 12)) -> Scene:
    """The adapted network is right but for one pixel, the source network wrong in a third of them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, size, generator=generator)
    adapted = labels.clone()
    adapted[-1, -1] = (labels[-1, -1] + 1) % 3
    source = torch.where(torch.rand(size, generator=generator) < 1 / 3, (labels + 1) % 3, labels)
    labels[0] = 255
    pixels = torch.randint(0, 256, (3, *size), generator=generator).byte()
    return Scene(name, pixels, labels, {"source": source, "adapted": adapted})


def page_of(fragment: str, folder: Path) -> Page:
    file = folder / "page.html"
    file.write_text(fragment)
    return Page(file)


def picture(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))


# --- colours


def test_every_class_has_a_colour_of_its_own_and_keeps_it():
    colours = default_palette(255)
    assert len({*colours, (0, 0, 0)}) == 256
    assert all(default_palette(count) == colours[:count] for count in (0, 1, 11, 12, 60))


# Machado, Oliveira and Fernandes 2009, table 1: linear RGB as seen without red and without green cones
WITHOUT = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "nothing": np.eye(3).tolist(),
}


@pytest.mark.parametrize("cones", WITHOUT)
def test_the_first_colours_differ_for_every_eye(cones):
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


def test_classes_of_the_street_have_the_colours_people_know():
    assert palette_of(["car", "road"]) == (street.PALETTE[13], street.PALETTE[0])
    assert palette_of(["car", "boat"]) == default_palette(2)
    assert palette_of(["Traffic_Light", "sky"]) == (street.PALETTE[6], street.PALETTE[10])
    assert palette_of(street.CAMVID_CLASSES) == COLLECTIONS["camvid"].palette == street.CAMVID_PALETTE
    assert palette_of(street.CAMVID_CLASSES[::-1]) == street.CAMVID_PALETTE[::-1]
    for collection in (it for it in COLLECTIONS.values() if it.labels is PIXELS):
        assert palette_of(collection.classes) == collection.palette


def test_no_two_of_the_first_colours_are_yellow():
    yellows = [it for it in FIRST_COLOURS if min(it[:2]) > 200 and it[2] < 200]
    assert yellows == [(240, 228, 66)]


# --- files


def test_a_label_file_holds_classes_and_shows_colours(tmp_path):
    labels = scene().labels.byte()
    colours = default_palette(3)
    with Image.open(write_labels(tmp_path / "l.png", labels, colours)) as image:
        assert image.mode == "P"
        assert np.array_equal(np.asarray(image), labels.numpy())
        shown = np.asarray(image.convert("RGB"))
    expected = {**dict(enumerate(colours)), 255: (0, 0, 0)}
    for row, column in itertools.product(range(9), range(12)):
        assert tuple(shown[row, column]) == expected[int(labels[row, column])]


def test_an_overlay_is_half_image_half_colour_and_leaves_unlabelled_pixels_alone():
    pixels = np.full((1, 2, 3), 100, np.uint8)
    shown = np.asarray(overlay(Image.fromarray(pixels), torch.tensor([[0, 255]]), [(200, 0, 50)]))
    assert shown.tolist() == [[[150, 50, 75], [100, 100, 100]]]


def test_resizing_labels_makes_no_new_ones():
    labels = torch.tensor([[0, 9], [255, 4]], dtype=torch.uint8)
    assert resized_labels(labels, (4, 2)).tolist() == [[0, 0, 9, 9], [255, 255, 4, 4]]
    assert set(resized_labels(labels, (7, 5)).unique().tolist()) == {0, 4, 9, 255}


def test_a_thumbnail_is_small_and_mixes_no_colours_of_classes():
    labels = torch.randint(0, 3, (300, 1000), generator=torch.Generator().manual_seed(0))
    found = thumbnail(indexed(labels, default_palette(3)), "x")
    image = picture(found.data)
    assert image.size == (found.width, found.height) == (LARGEST, LARGEST * 300 // 1000)
    assert {colour for _, colour in image.convert("RGB").getcolors()} == set(default_palette(3))
    assert thumbnail(indexed(labels[:4, :5], default_palette(3)), "x")[1:3] == (5, 4)


# --- scenes side by side


def test_a_row_shows_image_labels_and_answers_each_with_its_words(tmp_path):
    page = page_of(side_by_side([scene("x<y>.png"), scene("b.png", 1)], CLASSES, key="k"), tmp_path)
    assert not page.open
    assert not page.mismatched
    assert len(page.all("img")) == 2 * (4 + 2)  # and where each of two answers is wrong
    assert all(it["alt"] for it in page.all("img"))
    assert len({it["alt"] for it in page.all("img")}) == len(page.all("img"))
    assert "x<y>.png" in page.words
    assert "<y>" not in page.source
    for title in ("image", "labels", "source", "adapted"):
        assert page.source.count(f"<figcaption>{title}</figcaption>") == 2


def test_the_pictures_are_the_labels_and_the_answers(tmp_path):
    one = scene()
    page = page_of(side_by_side([one], CLASSES, key="k"), tmp_path)
    images = [np.asarray(picture(it["src"])) for it in page.all("img") if it["class"] != "photo"]
    expected = [one.labels, *(it for answer in one.answers.values() for it in (answer, wrong(one.labels, answer)))]
    assert all(np.array_equal(image, it.numpy()) for image, it in zip(images, expected, strict=True))


def wrong(labels: Tensor, answer: Tensor) -> Tensor:
    return torch.where(labels == 255, 255, (labels != answer).long())


def test_a_row_tells_the_iou_before_and_after(tmp_path):
    one = scene()
    scores = [np.mean(naive_ious(one.labels, answer)) for answer in one.answers.values()]
    words = page_of(side_by_side([one], CLASSES, key="k"), tmp_path).words
    before, after = (100 * it for it in scores)
    assert f"mean IoU {before:.1f} → {after:.1f} ({after - before:+.1f})" in words
    assert [image_iou(one.labels, it, 4) for it in one.answers.values()] == pytest.approx(scores)


def test_a_score_that_is_known_is_told_as_it_is(tmp_path):
    one = replace(scene(), scores={"source": 0.25, "adapted": 0.125})
    assert "mean IoU 25.0 → 12.5 (-12.5)" in page_of(side_by_side([one], CLASSES, key="k"), tmp_path).words


def naive_ious(labels: Tensor, answer: Tensor) -> list[float]:
    labels, answer = labels[labels != 255], answer[labels != 255]
    pairs = [
        (set((labels == it).nonzero()[:, 0].tolist()), set((answer == it).nonzero()[:, 0].tolist())) for it in range(4)
    ]
    return [len(one & other) / len(one | other) for one, other in pairs if one | other]


def test_a_change_is_that_of_the_numbers_beside_it(tmp_path):
    for before, after, told in ((0.12151, 0.12249, "12.2 → 12.2 (+0.0)"), (0.1224, 0.1216, "12.2 → 12.2 (+0.0)")):
        one = replace(scene(), scores={"source": before, "adapted": after})
        assert f"mean IoU {told}" in page_of(side_by_side([one], CLASSES, key="k"), tmp_path).words


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            Sizes([(256, 192)], [(480, 360)]),
            "counted at 256x192 pixels, as the network sees them (files: 480x360)",
        ),
        (Sizes([(9, 7)], [(9, 7)]), "counted at 9x7 pixels, the size of the files"),
        (
            Sizes([(9, 7)], [(9, 7), (18, 14)]),
            "counted at 9x7 pixels, as the network sees them (files: 2 sizes from 9x7 t",
        ),
    ],
)
def test_the_page_says_at_which_size_pixels_are_counted(tmp_path, sizes, told):
    scores = replace(scores_of([scene()]), sizes=sizes)
    assert told in Page(evaluation_page(scores, [], [], tmp_path / "e.html", origin={})).words


def test_the_legend_names_what_can_be_seen_and_nothing_else(tmp_path):
    page = page_of(side_by_side([scene()], CLASSES, key="k"), tmp_path)
    items = re.findall(r"<li><span style=\"background: (rgb\([^)]*\))\"></span>(.*?)</li>", page.source)
    colours = [f"rgb{colour}" for colour in (*default_palette(3), (0, 0, 0))]
    assert items == list(zip(colours, ["road", "&lt;i&gt;sky&lt;/i&gt;", "car", "not labelled"], strict=True))


def test_several_figures_of_a_page_keep_their_switches_apart(tmp_path):
    page = page_of(side_by_side([scene()], key="one") + side_by_side([scene()], key="two"), tmp_path)
    ids = [it["id"] for _, it in page.elements if "id" in it]
    assert len(ids) == len(set(ids)) == 2
    assert [it["for"] for it in page.all("label")] == ids


def test_an_image_without_any_label_is_shown_without_a_score(tmp_path):
    one = scene()
    bare = Scene("bare", one.pixels[:1], torch.full_like(one.labels, 255), one.answers)
    words = page_of(side_by_side([bare], CLASSES, key="k"), tmp_path).words
    assert "no labelled pixel" in words
    assert "nan" not in words


# --- pages


def scores_of(scenes: list[Scene]) -> Scores:
    tallies = {
        name: sum(pixel_tally(it.labels, it.answers[name], 4) for it in scenes) for name in ("source", "adapted")
    }
    images = {name: [image_iou(it.labels, it.answers[name], 4) for it in scenes] for name in tallies}
    return Scores(CLASSES, tallies, images)


def test_images_are_ranked_by_what_they_gained_and_lost():
    nan = float("nan")
    scores = Scores(CLASSES, {}, {"source": [0.5, 0.5, nan, 0.5, 0.5, 0.5], "adapted": [0.6, 0.4, nan, 0.9, 0.5, 0.1]})
    assert scores.extremes(1) == ([3], [5])
    assert scores.extremes(5) == ([3, 0], [5, 1])
    assert (scores.better, scores.worse, scores.same) == (2, 2, 2)


def test_the_page_of_an_evaluation_is_whole_escaped_and_honest(tmp_path):
    scenes = [scene(name, seed) for seed, name in enumerate(EVIL)]
    page = Page(
        evaluation_page(scores_of(scenes), scenes, [], tmp_path / "e.html", origin={"network": EVIL[0], "delta": None})
    )
    assert not page.open
    assert not page.mismatched
    assert "script" not in {tag for tag, _ in page.elements}
    assert all(it.keys() == {"class", "src", "width", "height", "alt"} for it in page.all("img"))
    assert "better on 4, worse on 0" in page.words
    assert "No image lost." in page.words
    assert "Whether any of these images was in the support set" in page.words
    assert not re.search(r"(src|href)=\"(?!data:|#)", page.source)


def labeller() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()


def adapted(count: int, method: str = "lccs") -> Adaptation:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, 8, 10, generator=generator) * 4 - 2
    labels = torch.randint(0, 3, (count, 8, 10), generator=generator)
    steps = Preprocess(None, None, (0.5,) * 3, (0.25,) * 3)
    return adapt(labeller(), Support(images, labels, CLASSES[:3]), method=method, preprocess=steps, validate=None)


@pytest.mark.parametrize("count", [2, PICTURED + 2])
def test_the_page_of_an_adaptation_shows_its_scenes_and_says_that_they_prove_nothing(tmp_path, count):
    result = adapted(count)
    page = Page(adaptation_page(result, tmp_path / "a.html"))
    assert len(page.all("img")) == 6 * min(count, PICTURED)
    first = f"These are the first {PICTURED} of the {count} images that the network was fitted to."
    assert (first if count > PICTURED else "These are the images that the network was fitted to.") in page.words
    assert "no evidence that it does so elsewhere" in page.words
    with torch.no_grad():
        answers = [it(result.support.images[:1]).argmax(1)[0] for it in (result.source, result.model)]
    maps = [np.asarray(picture(it["src"])) for it in page.all("img") if it["class"] == "map"][:3]
    expected = [result.support.labels[0], *answers]
    assert all(np.array_equal(image, it.numpy()) for image, it in zip(maps, expected, strict=True))


def test_a_network_left_as_it_is_answers_once(tmp_path):
    page = Page(adaptation_page(adapted(2, "source"), tmp_path / "a.html"))
    assert len(page.all("img")) == 2 * 4
    assert "What the network answers" in page.words

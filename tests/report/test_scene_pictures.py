"""Pictures of pixel labels on a page: exact, labelled and described."""

from __future__ import annotations

import base64
import io
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
from fewshift.images.label_files import default_palette, indexed
from fewshift.report.pages import PICTURED, adaptation_page, evaluation_page
from fewshift.report.scenes import (
    LARGEST,
    Scene,
    image_iou,
    side_by_side,
    thumbnail,
)
from fewshift.trust.evaluation import PixelEvaluation, Sizes
from tests.helpers.pages import EVIL, Page

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


def test_a_thumbnail_is_small_and_mixes_no_colours_of_classes():
    labels = torch.randint(0, 3, (300, 1000), generator=torch.Generator().manual_seed(0))
    small = thumbnail(indexed(labels, default_palette(3)), "x")
    image = picture(small.data)
    assert image.size == (small.width, small.height) == (LARGEST, LARGEST * 300 // 1000)
    assert {colour for _, colour in image.convert("RGB").getcolors()} == set(default_palette(3))
    assert thumbnail(indexed(labels[:4, :5], default_palette(3)), "x")[1:3] == (5, 4)


# --- scenes side by side


def test_a_row_shows_image_labels_and_answers_each_with_its_words(tmp_path):
    page = page_of(side_by_side([scene("x<y>.png"), scene("b.png", 1)], CLASSES, key="k"), tmp_path)
    assert not page.open
    assert not page.mismatched
    assert len(page.all("img")) == 2 * (4 + 2)  # and where each of two answers is wrong
    assert all(image["alt"] for image in page.all("img"))
    assert len({image["alt"] for image in page.all("img")}) == len(page.all("img"))
    assert "x<y>.png" in page.words
    assert "<y>" not in page.source
    for title in ("image", "labels", "source", "adapted"):
        assert page.source.count(f"<figcaption>{title}</figcaption>") == 2


def test_the_pictures_are_the_labels_and_the_answers(tmp_path):
    one = scene()
    page = page_of(side_by_side([one], CLASSES, key="k"), tmp_path)
    images = [np.asarray(picture(image["src"])) for image in page.all("img") if image["class"] != "photo"]
    expected = [
        one.labels,
        *(shown for answer in one.answers.values() for shown in (answer, wrong(one.labels, answer))),
    ]
    assert all(np.array_equal(image, labels.numpy()) for image, labels in zip(images, expected, strict=True))


def wrong(labels: Tensor, answer: Tensor) -> Tensor:
    return torch.where(labels == 255, 255, (labels != answer).long())


def test_a_row_tells_the_iou_before_and_after(tmp_path):
    one = scene()
    scores = [np.mean(naive_ious(one.labels, answer)) for answer in one.answers.values()]
    words = page_of(side_by_side([one], CLASSES, key="k"), tmp_path).words
    before, after = (100 * score for score in scores)
    assert f"mean IoU {before:.1f} → {after:.1f} ({after - before:+.1f})" in words
    assert [image_iou(one.labels, answer, 4) for answer in one.answers.values()] == pytest.approx(scores)


def test_a_score_that_is_known_is_told_as_it_is(tmp_path):
    one = replace(scene(), scores={"source": 0.25, "adapted": 0.125})
    assert "mean IoU 25.0 → 12.5 (-12.5)" in page_of(side_by_side([one], CLASSES, key="k"), tmp_path).words


def naive_ious(labels: Tensor, answer: Tensor) -> list[float]:
    labels, answer = labels[labels != 255], answer[labels != 255]
    pairs = [
        (set((labels == label).nonzero()[:, 0].tolist()), set((answer == label).nonzero()[:, 0].tolist()))
        for label in range(4)
    ]
    return [len(one & other) / len(one | other) for one, other in pairs if one | other]


def test_a_change_is_that_of_the_numbers_beside_it(tmp_path):
    for before, after, change in ((0.12151, 0.12249, "12.2 → 12.2 (+0.0)"), (0.1224, 0.1216, "12.2 → 12.2 (+0.0)")):
        one = replace(scene(), scores={"source": before, "adapted": after})
        assert f"mean IoU {change}" in page_of(side_by_side([one], CLASSES, key="k"), tmp_path).words


@pytest.mark.parametrize(
    ("sizes", "fact"),
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
def test_the_page_says_at_which_size_pixels_are_counted(tmp_path, sizes, fact):
    scores = replace(scores_of([scene()]), sizes=sizes)
    assert fact in Page(evaluation_page(scores, [], [], tmp_path / "e.html", origin={})).words


def test_the_legend_names_what_can_be_seen_and_nothing_else(tmp_path):
    page = page_of(side_by_side([scene()], CLASSES, key="k"), tmp_path)
    items = re.findall(r"<li><span style=\"background: (rgb\([^)]*\))\"></span>(.*?)</li>", page.source)
    colours = [f"rgb{colour}" for colour in (*default_palette(3), (0, 0, 0))]
    assert items == list(zip(colours, ["road", "&lt;i&gt;sky&lt;/i&gt;", "car", "not labelled"], strict=True))


def test_several_figures_of_a_page_keep_their_switches_apart(tmp_path):
    page = page_of(side_by_side([scene()], key="one") + side_by_side([scene()], key="two"), tmp_path)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) == 2
    assert [label["for"] for label in page.all("label")] == ids


def test_an_image_without_any_label_is_shown_without_a_score(tmp_path):
    one = scene()
    bare = Scene("bare", one.pixels[:1], torch.full_like(one.labels, 255), one.answers)
    words = page_of(side_by_side([bare], CLASSES, key="k"), tmp_path).words
    assert "no labelled pixel" in words
    assert "nan" not in words


# --- pages


def scores_of(scenes: list[Scene]) -> PixelEvaluation:
    tallies = {
        name: sum(PIXELS.tally(scene.labels, scene.answers[name], 4) for scene in scenes)
        for name in ("source", "adapted")
    }
    images = {name: [image_iou(scene.labels, scene.answers[name], 4) for scene in scenes] for name in tallies}
    return PixelEvaluation(CLASSES, tallies, images)


def test_the_page_of_an_evaluation_is_whole_escaped_and_honest(tmp_path):
    scenes = [scene(name, seed) for seed, name in enumerate(EVIL)]
    page = Page(
        evaluation_page(scores_of(scenes), scenes, [], tmp_path / "e.html", origin={"network": EVIL[0], "delta": None})
    )
    assert not page.open
    assert not page.mismatched
    assert "script" not in {tag for tag, _ in page.elements}
    assert all(image.keys() == {"class", "src", "width", "height", "alt"} for image in page.all("img"))
    assert "better on 4, worse on 0" in page.words
    assert "No image lost." in page.words
    assert "Whether any of these images was in the support set" in page.words
    assert not re.search(r"(src|href)=\"(?!data:|#)", page.source)


def labeller() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()


def adapted(count: int, method: str = "adabn") -> Adaptation:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, 8, 10, generator=generator) * 4 - 2
    labels = torch.randint(0, 3, (count, 8, 10), generator=generator)
    steps = Preprocess(None, None, (0.5,) * 3, (0.25,) * 3)
    return adapt(labeller(), Support(images, labels, CLASSES[:3]), method=method, preprocess=steps, validate=None)


@pytest.mark.parametrize("count", [2, PICTURED + 1])
def test_the_page_of_an_adaptation_shows_its_scenes_and_says_that_they_prove_nothing(tmp_path, count):
    result = adapted(count)
    page = Page(adaptation_page(result, tmp_path / "a.html"))
    assert len(page.all("img")) == 6 * min(count, PICTURED)
    first = f"These are the first {PICTURED} of the {count} images that the network was fitted to."
    assert (first if count > PICTURED else "These are the images that the network was fitted to.") in page.words
    assert "no evidence that it does so elsewhere" in page.words
    with torch.no_grad():
        answers = [network(result.support.images[:1]).argmax(1)[0] for network in (result.source, result.model)]
    maps = [np.asarray(picture(image["src"])) for image in page.all("img") if image["class"] == "map"][:3]
    expected = [result.support.labels[0], *answers]
    assert all(np.array_equal(image, labels.numpy()) for image, labels in zip(maps, expected, strict=True))


def test_a_network_left_as_it_is_answers_once(tmp_path):
    page = Page(adaptation_page(adapted(2, "source"), tmp_path / "a.html"))
    assert len(page.all("img")) == 2 * 4
    assert "What the network answers" in page.words

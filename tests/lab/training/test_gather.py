"""Source images: never the target's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fewshift import FewshiftError, Preprocess
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.datasets.collection import Collection
from fewshift.lab.training.gather import evaluation_steps, gather, load_sources, source_names, split
from fewshift.lab.training.recipes import find_recipe
from fewshift.lab.training.samples import Pool
from tests.helpers.training import (
    RECIPE,
)


@pytest.fixture
def collection(tmp_path) -> Collection:
    """Three domains of 20 images in two classes; every image of a domain has its shade."""
    for shade, domain in enumerate(("art", "photo", "sketch")):
        for name in ("cat", "dog"):
            folder = tmp_path / "data" / "animals" / domain / name
            folder.mkdir(parents=True)
            for index in range(10):
                pixels = np.full((12, 16, 3), 80 * shade + index * 4 + 2 * (name == "dog"), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return replace(
        find_collection("pacs"),
        name="animals",
        domains=("art", "photo", "sketch"),
        targets=("art", "photo", "sketch"),
        classes=("cat", "dog"),
        counts=None,
        class_counts={},
    )


def shades(pool: Pool) -> list[int]:
    return sorted(pool.batch(torch.arange(len(pool)))[0][:, 0, 4, 4].tolist())


@pytest.mark.parametrize("target", ["art", "photo", "sketch"])
def test_neither_training_nor_validation_contains_an_image_of_the_target(collection, tmp_path, target):
    names = source_names(collection, target, [])
    assert target not in names
    recipe = replace(RECIPE, size=8, held_out=0.25)
    steps = evaluation_steps(None, collection, recipe)
    sources = gather(collection, load_sources(collection, names, tmp_path / "data"), recipe, steps)
    assert (len(sources.train), len(sources.validation)) == (30, 10)
    targets = {80 * collection.domains.index(target) + step for step in range(0, 40, 2)}
    everything = shades(sources.train) + shades(sources.validation)
    assert not targets & set(everything)
    assert len(set(everything)) == 40  # no image on both sides, none missing
    assert sources.names == names
    assert sources.domains.tolist() == [0] * 15 + [1] * 15


def test_training_images_are_larger_than_what_evaluation_cuts_out_of_them(collection, tmp_path):
    recipe = replace(RECIPE, size=8, margin=1.25)
    steps = evaluation_steps(Preprocess(256, 224, (0.1,) * 3, (0.2,) * 3, "bicubic"), collection, recipe)
    assert steps == Preprocess(10, 8, (0.1,) * 3, (0.2,) * 3, "bicubic")
    sources = gather(collection, load_sources(collection, ["art"], tmp_path / "data"), recipe, steps)
    assert sources.train.batch(torch.tensor([0]))[0].shape == (1, 3, 10, 10)
    assert sources.validation.batch(torch.tensor([0]))[0].shape == (1, 3, 8, 8)


def test_the_held_out_part_is_the_same_for_every_recipe_and_of_digits_the_published_one():
    first, again = (split(find_collection("pacs"), "photo", 1670, 0.1) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert [len(part) for part in first] == [1503, 167]
    assert len(torch.cat(first).unique()) == 1670
    share = find_recipe("paper", "digits").held_out
    assert [len(part) for part in split(find_collection("digits"), "mnist", 5000, share)] == [4000, 1000]
    assert share == 1000 / 5000
    with pytest.raises(FewshiftError, match=r"held_out=0.1 cannot be: of the digits a fixed fifth validates"):
        split(find_collection("digits"), "mnist", 5000, 0.1)
    assert [len(part) for part in split(find_collection("pacs"), "photo", 50, 0.0)] == [50, 0]


@pytest.mark.parametrize(
    ("target", "sources", "sentence"),
    [
        ("moon", [], "has no domain 'moon': use one of art_painting, cartoon, photo, sketch"),
        (None, ["moon"], "has no domain 'moon'"),
        ("photo", ["photo"], "'photo' is both source and target"),
        (None, ["photo", "photo"], "source 'photo' is named twice"),
        (None, [], "neither a target nor a source is named"),
    ],
)
def test_domains_that_cannot_be_are_one_sentence(target, sources, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        source_names(find_collection("pacs"), target, sources)


def test_sources_are_those_named_or_the_official_ones_or_all_but_the_target():
    pacs, camelyon = find_collection("pacs"), find_collection("camelyon17")
    assert source_names(pacs, "sketch", []) == ("art_painting", "cartoon", "photo")
    assert source_names(pacs, "sketch", ["photo"]) == ("photo",)
    assert source_names(camelyon, "hospital2", []) == ("hospital0", "hospital3", "hospital4")

"""The same trainer learns a label for every pixel."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fewshift import FewshiftError
from fewshift.core.labels import PIXELS
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.training import ERM
from fewshift.lab.training.checkpoint import Checkpoint
from fewshift.lab.training.gather import evaluation_steps, gather
from fewshift.lab.training.recipes import Recipe
from fewshift.lab.training.samples import Pool
from fewshift.lab.training.trainer import train
from tests.helpers.networks import make_tiny
from tests.helpers.training import (
    ROOM,
    make_scenes,
)


class Painter(nn.Module):
    """One number per class for each pixel, at half the size of the image."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.bn(self.conv(images)).relu())


@pytest.mark.parametrize("sizes", [[(18, 24)] * 20, [(18, 24), (24, 18)] * 10])
def test_the_same_trainer_learns_scenes(tmp_path, sizes):
    recipe = Recipe(epochs=6, lr=0.1, batch_size=4, schedule="poly", augment="scenes", size=16, held_out=0.2)
    camvid = find_collection("camvid")
    steps = evaluation_steps(None, camvid, recipe)
    assert (steps.resize, steps.crop) == (16, None)
    sources = gather(camvid, {"day": make_scenes(tmp_path, sizes)}, recipe, steps)
    assert sources.labels is PIXELS
    torch.manual_seed(0)
    checkpoint = Checkpoint(tmp_path / "w.safetensors", {})
    done = train(Painter(), sources, recipe, ERM(), checkpoint=checkpoint)
    assert done.epochs[-1].validation > 0.8
    card = json.loads(checkpoint.card.read_text())
    assert card["source_validation_mean_iou"] == round(100 * done.epochs[-1].validation, 2)
    again = train(Painter(), replace(sources, validation=None), replace(recipe, epochs=1), ERM())
    assert again.epochs[0].validation is None


def test_scenes_are_counted_by_labelled_pixels_when_a_batch_is_accumulated(tmp_path):
    recipe = Recipe(epochs=1, lr=0.1, batch_size=4, schedule="constant", augment="scenes", size=16, held_out=0.0)
    camvid = find_collection("camvid")
    sources = gather(
        camvid, {"day": make_scenes(tmp_path, [(18, 24)] * 8)}, recipe, evaluation_steps(None, camvid, recipe)
    )
    torch.manual_seed(0)
    model = Painter()
    model.bn = nn.Identity()
    at_once, in_parts = (
        train(model, sources, replace(recipe, accumulate=parts), ERM()).model.state_dict() for parts in (1, 2)
    )
    for name in at_once:
        torch.testing.assert_close(in_parts[name], at_once[name], rtol=0, atol=1e-6)


def test_scenes_and_networks_for_images_do_not_go_together(tmp_path):
    recipe = Recipe(epochs=1, lr=0.1, batch_size=4, augment="scenes", size=16)
    camvid = find_collection("camvid")
    sources = gather(
        camvid, {"day": make_scenes(tmp_path, [(18, 24)] * 8)}, recipe, evaluation_steps(None, camvid, recipe)
    )
    with pytest.raises(FewshiftError, match=r"shape \(\), and its labels \(16, "):
        train(make_tiny(2), sources, recipe, ERM())


def test_scenes_of_different_sizes_are_padded_with_ignored_pixels():
    pairs = [
        (torch.ones(3, 2, 4).byte(), torch.zeros(2, 4).byte()),
        (torch.ones(3, 3, 2).byte(), torch.zeros(3, 2).byte()),
    ]
    images, labels = Pool(pairs, 0).batch(torch.tensor([0, 1]))
    assert images.shape == (2, 3, 3, 4)
    assert torch.equal(labels == 255, images[:, 0] == 0)
    with pytest.raises(FewshiftError, match="images have different shapes"):
        Pool([(image, torch.tensor(0)) for image, _ in pairs], ROOM).batch(torch.tensor([0, 1]))

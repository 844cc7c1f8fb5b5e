"""Augmentations change images and pixel labels alike."""

from __future__ import annotations

import pytest
import torch

from fewshift import FewshiftError
from fewshift.core.labels import IMAGES, PIXELS
from fewshift.lab.training.augment import AUGMENTATIONS, augmentation, check_augment
from tests.helpers.training import (
    pictures,
)


@pytest.mark.parametrize("name", sorted(set(AUGMENTATIONS) - {"scenes"}))
def test_augmentations_give_the_size_asked_for_and_keep_the_bytes(name):
    images = pictures(6, 0, size=18).images
    for layout in (images, images.contiguous(memory_format=torch.channels_last)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            augmented, labels = augmentation(name, (16, 16), IMAGES)(layout, torch.arange(6))
        assert augmented.shape == (6, 3, 16, 16)
        assert augmented.dtype == torch.uint8
        assert torch.equal(labels, torch.arange(6))


@pytest.fixture
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("name", ["crop", "shift"])
def test_geometry_moves_images_and_labels_alike(seeded, name):
    # every pixel has a number of its own, so a pair that was moved differently cannot stay equal
    labels = torch.arange(4 * 7 * 7).view(4, 7, 7).byte()
    images = labels[:, None].repeat(1, 3, 1, 1)
    size = (5, 6) if name == "crop" else (7, 7)
    moved, moved_labels = augmentation(name, size, PIXELS)(images, labels)
    inside = moved_labels != 255  # where something from outside came in, the image is black
    assert torch.equal(moved, (moved_labels * inside)[:, None].repeat(1, 3, 1, 1))
    assert moved_labels.shape == (4, *size)
    assert not torch.equal(moved_labels, labels[:, : size[0], : size[1]])


def test_half_of_the_images_are_enlarged_and_their_labels_with_them(seeded):
    labels = (torch.arange(16)[:, None] // 4 * 4 + torch.arange(16) // 4).byte()  # blocks of 4 x 4
    images, labels = labels[None, None].repeat(40, 1, 1, 1) * 10, labels.repeat(40, 1, 1)
    larger, larger_labels = augmentation("enlarge", (16, 16), PIXELS)(images, labels)
    mirrored = larger_labels[:, 0, 0] > larger_labels[:, 0, -1]
    larger, larger_labels = (
        torch.stack([tensor.flip(-1) if flip else tensor for tensor, flip in zip(batch, mirrored, strict=True)])
        for batch in (larger, larger_labels)
    )
    changed = (larger != images).flatten(1).any(1)
    assert 10 < changed.sum() < 30
    assert 10 < mirrored.sum() < 30
    assert torch.equal(changed, (larger_labels != labels).flatten(1).any(1))
    inside = larger == larger_labels[:, None] * 10  # away from the edges of blocks, where images are interpolated
    assert inside[changed].double().mean() > 0.5


def test_scenes_are_scaled_between_a_half_and_two_and_ignored_outside(seeded):
    labels = torch.zeros(30, 20, 30, dtype=torch.uint8)
    labels[:, 8:12, 12:18] = 1  # a patch of 4 x 6 pixels
    images = (labels[:, None] * 100 + 50).repeat(1, 3, 1, 1)
    changed, changed_labels = augmentation("scenes", (20, 30), PIXELS)(images, labels)
    assert changed.shape == (30, 3, 20, 30)
    outside = changed_labels == 255
    assert outside.any()
    assert not outside.all((1, 2)).any()
    whole = (changed_labels == 1).sum((1, 2)).max()
    assert 4 * 24 * 0.6 < whole <= 4 * 24 * 1.2  # the largest patch is about twice as wide and high


def test_images_smaller_than_a_crop_are_one_sentence():
    with pytest.raises(FewshiftError, match="images of 18x18 pixels have no part of 20x16"):
        augmentation("crop", (16, 20), IMAGES)(pictures(2, 0, size=18).images, torch.arange(2))


def test_augmentations_that_would_separate_images_from_their_labels_are_refused():
    with pytest.raises(FewshiftError, match=r"enlarge.randaugment is not for labels of each pixel: use one of none"):
        check_augment("enlarge+randaugment", PIXELS)
    with pytest.raises(FewshiftError, match="scenes is not for labels of each image"):
        check_augment("scenes", IMAGES)

"""Image labels and pixel labels: folds, losses, right and wrong, against naive loops."""

from __future__ import annotations

import math

import pytest
import torch

from fewshift.core.labels import IMAGES, PIXELS, kind_of


def test_folds_of_images_are_disjoint_and_have_every_class_alike():
    labels = torch.arange(4).repeat(6)
    folds = IMAGES.folds(labels, 3, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(folds).tolist()) == list(range(24))
    assert all(labels[fold].bincount().tolist() == [2] * 4 for fold in folds)


def test_folds_of_scenes_are_disjoint_and_of_equal_size():
    folds = PIXELS.folds(torch.zeros(7, 2, 2).long(), 3, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(folds).tolist()) == list(range(7))
    assert sorted(len(fold) for fold in folds) == [2, 2, 3]


def naive_loss(row, label):
    return math.log(sum(math.exp(value) for value in row)) - row[label]


def test_each_image_has_its_own_loss_and_is_right_or_wrong():
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(5) % 3
    rows = logits.tolist()
    expected = [naive_loss(row, label) for row, label in zip(rows, labels.tolist(), strict=True)]
    assert IMAGES.losses(logits, labels).tolist() == pytest.approx(expected)
    hits = [float(row.index(max(row)) == label) for row, label in zip(rows, labels.tolist(), strict=True)]
    assert IMAGES.right(logits, labels).tolist() == hits


def test_a_scene_counts_by_its_labelled_pixels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 2, 3, generator=generator).double()
    labels = torch.randint(0, 2, (3, 2, 3), generator=generator)
    labels[0, 0], labels[2] = 255, 255
    losses, shares = [], []
    for n in range(3):
        pixels = [(logits[n, :, y, x].tolist(), int(labels[n, y, x])) for y in range(2) for x in range(3)]
        known = [(row, label) for row, label in pixels if label != 255]
        losses.append(sum(naive_loss(*pixel) for pixel in known) / max(len(known), 1))
        shares.append(sum(row.index(max(row)) == label for row, label in known) / max(len(known), 1))
    assert PIXELS.losses(logits, labels).tolist() == pytest.approx(losses)
    assert PIXELS.right(logits, labels).tolist() == pytest.approx(shares)
    assert (losses[2], shares[2]) == (0, 0)
    assert PIXELS.weight(labels) == 3 + 6


def test_the_kind_follows_from_the_shape():
    assert kind_of(torch.zeros(3).long()) is IMAGES
    assert kind_of(torch.zeros(3, 4, 4).long()) is PIXELS
    assert kind_of((torch.zeros(2, 2).long(), torch.zeros(3, 2).long())) is PIXELS

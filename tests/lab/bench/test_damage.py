"""Supports that are spoilt on purpose."""

from __future__ import annotations

import pytest
import torch

from fewshift import FewshiftError
from fewshift.core.draws import draw_support
from fewshift.lab.bench.damage import DAMAGES, damaged

LABELS = torch.arange(7).repeat(40)
DRAWN = draw_support(LABELS, 5, 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_depends_on_its_seed_alone(damage):
    def left(seed: int) -> list[list[int]]:
        return [part.tolist() for part in damaged(DRAWN, LABELS[DRAWN], damage, 7, seed)]

    assert left(0) == left(0)
    assert any(left(seed) != left(0) for seed in range(1, 6))


@pytest.mark.parametrize(("damage", "left"), [("class missing", 6), ("two classes", 2)])
def test_the_classes_that_are_left_keep_their_images_and_labels(damage, left):
    drawn, labels = damaged(DRAWN, LABELS[DRAWN], damage, 7, 0)
    assert torch.equal(LABELS[drawn], labels)
    assert sorted(labels.bincount().tolist())[-left:] == [5] * left
    assert len(labels) == 5 * left


def test_wrong_labels_are_two_of_five_and_none_is_right_by_chance():
    drawn, labels = damaged(DRAWN, LABELS[DRAWN], "wrong labels", 7, 0)
    assert torch.equal(drawn, DRAWN)
    assert int((labels != LABELS[DRAWN]).sum()) == 14 == round(0.4 * 35)
    assert set(labels.tolist()) <= set(range(7))


def test_classes_that_were_never_there_are_not_the_ones_that_go_missing():
    there = DRAWN[torch.isin(LABELS[DRAWN], torch.tensor([1, 4, 6]))]
    for seed in range(10):
        assert len(damaged(there, LABELS[there], "class missing", 7, seed)[1].unique()) == 2
        assert len(damaged(there, LABELS[there], "two classes", 7, seed)[1].unique()) == 2


def test_a_damage_that_does_not_exist_is_named():
    with pytest.raises(FewshiftError, match="damage='blur' is unknown: choose one of wrong labels, class missing"):
        damaged(DRAWN, LABELS[DRAWN], "blur", 7, 0)

"""Folds: every support image is held out equally often, and never together with its whole class."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshift import FewshiftError, Support
from fewshift.trust.held_out import folds_of
from tests.helpers.networks import make_support, scenes


def vectors(shots: int, classes: int) -> Support:
    return Support(torch.arange(3.0 * shots * classes).view(-1, 3), torch.arange(shots * classes) % classes)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(2, 5), st.integers(0, 99))
def test_every_image_is_held_out_equally_often_and_every_class_stays(shots, classes, seed):
    support = vectors(shots, classes)
    folds = folds_of(support, "cv", seed)
    times = torch.cat(folds).bincount(minlength=len(support))
    assert times.min() == times.max() >= 1
    for (kept, held), fold in zip(support.splits(folds), folds, strict=True):
        rest = [position for position in range(len(support)) if position not in fold.tolist()]
        assert torch.equal(held.images, support.images[fold])
        assert torch.equal(kept.images, support.images[rest])
        assert len(kept.counts) == classes


@pytest.mark.parametrize("shots", range(1, 12))
def test_cross_validation_costs_no_more_than_two_adaptations_from_two_shots_on(shots):
    support = vectors(shots, 7)
    kept = sum(len(part) for part, _ in support.splits(folds_of(support, "cv", 0)))
    assert kept / len(support) <= (5 if shots == 1 else 2)


@pytest.mark.parametrize("support", [make_support(1), make_support(3).part(torch.tensor([0, 1, 2, 3, 4])), scenes(7)])
def test_images_that_cannot_be_held_out_by_class_are_held_out_once_each(support):
    folds = folds_of(support, "cv", 0)
    assert torch.cat(folds).sort().values.tolist() == list(range(len(support)))
    assert max(map(len, folds)) - min(map(len, folds)) <= 1


def test_leaving_one_out_holds_out_every_image_alone():
    assert [fold.tolist() for fold in folds_of(make_support(2), "loo", 0)] == [[0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize("kind", ["cv", "loo"])
def test_a_single_image_leaves_nothing_to_hold_out(kind):
    assert folds_of(scenes(1), kind, 0) == []


def test_folds_follow_the_seed():
    first, again, other = (torch.cat(folds_of(make_support(5), "cv", seed)).tolist() for seed in (3, 3, 4))
    assert first == again != other


def test_an_unknown_way_is_refused():
    with pytest.raises(FewshiftError, match=r"'always'.*'cv', 'loo'"):
        folds_of(make_support(2), "always", 0)

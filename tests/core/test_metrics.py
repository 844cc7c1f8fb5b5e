"""Metrics and streams, against scikit-learn, hand-made examples and the counts of PACS."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics as reference
import torch

from fewshift import FewshiftError
from fewshift.core import metrics
from fewshift.lab.bench.condition import Condition, long_tail

GENERATOR = torch.Generator().manual_seed(0)
TRUE = torch.randint(0, 5, (200,), generator=GENERATOR)
PREDICTED = torch.where(
    torch.rand(200, generator=GENERATOR) < 0.6, TRUE, torch.randint(0, 5, (200,), generator=GENERATOR)
)
COUNTS = metrics.tally(TRUE, PREDICTED, 5)


def test_the_tally_is_scikit_learns_confusion_matrix():
    assert (COUNTS.numpy() == reference.confusion_matrix(TRUE, PREDICTED)).all()


def test_scores_are_scikit_learns():
    assert metrics.accuracy(COUNTS) == pytest.approx(reference.accuracy_score(TRUE, PREDICTED))
    assert metrics.macro_recall(COUNTS) == pytest.approx(reference.balanced_accuracy_score(TRUE, PREDICTED))
    assert metrics.macro_f1(COUNTS) == pytest.approx(reference.f1_score(TRUE, PREDICTED, average="macro"))
    assert metrics.mean_iou(COUNTS) == pytest.approx(reference.jaccard_score(TRUE, PREDICTED, average="macro"))


def test_scores_are_exact_to_the_last_bit_of_a_python_float():
    counts = torch.tensor([[400, 100], [279, 221]])
    assert metrics.accuracy(counts) == 621 / 1000
    assert metrics.per_class_accuracy(counts).tolist() == [400 / 500, 221 / 500]
    assert metrics.per_class_f1(counts).tolist() == [800 / 1179, 442 / 821]
    assert metrics.per_class_iou(counts).tolist() == [400 / 779, 221 / 600]
    assert metrics.macro_recall(counts) == pytest.approx((400 / 500 + 221 / 500) / 2, abs=1e-15)


def test_macro_recall_is_neither_precision_nor_accuracy():
    counts = torch.tensor([[8, 2, 0], [0, 1, 1], [1, 0, 0]])
    recalls = [8 / 10, 1 / 2, 0 / 1]
    assert metrics.macro_recall(counts) == pytest.approx(sum(recalls) / 3)
    assert metrics.accuracy(counts) == pytest.approx(9 / 13)
    precisions = [8 / 9, 1 / 3, 0.0]
    assert metrics.macro_recall(counts) != pytest.approx(sum(precisions) / 3)


def test_macro_f1_is_the_mean_over_the_classes_that_occur_or_over_a_fixed_set():
    true, predicted = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 1, 1])  # class 2 is predicted, 3 is nowhere
    counts = metrics.tally(true, predicted, 4)
    f1 = [2 / 3, 1.0, 0.0, 0.0]
    assert metrics.macro_f1(counts) == pytest.approx(np.mean(f1[:2]))
    assert metrics.macro_f1(counts, torch.arange(4)) == pytest.approx(np.mean(f1))
    assert metrics.macro_f1(counts, torch.tensor([0, 1, 2])) == pytest.approx(np.mean(f1[:3]))


def test_an_absent_class_counts_zero_if_it_is_ever_predicted_and_is_skipped_otherwise():
    never = torch.tensor([[4, 1, 0], [1, 4, 0], [0, 0, 0]])
    once = torch.tensor([[4, 0, 1], [1, 4, 0], [0, 0, 0]])
    assert metrics.mean_iou(never) == pytest.approx((4 / 6 + 4 / 6) / 2)
    assert metrics.mean_iou(once) == pytest.approx((4 / 6 + 4 / 5 + 0) / 3)
    assert metrics.mean_iou(once, present_only=True) == pytest.approx((4 / 6 + 4 / 5) / 2)


def test_ignored_pixels_do_not_count():
    labels = torch.tensor([[[0, 255], [1, 1]]])
    predicted = torch.tensor([[[0, 1], [1, 0]]])
    assert metrics.tally(labels, predicted, 2, ignore=255).tolist() == [[1, 0], [1, 1]]


def test_calibration_error_is_that_of_a_naive_loop():
    probabilities = torch.rand(300, 4, generator=GENERATOR).softmax(1)
    labels = torch.randint(0, 4, (300,), generator=GENERATOR)
    confidence, predicted = probabilities.double().max(1)
    naive = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            right = (predicted == labels)[inside].double().mean()
            naive += float(inside.double().mean()) * abs(float(right - confidence[inside].mean()))
    assert metrics.calibration_error(probabilities, labels) == pytest.approx(naive, abs=1e-9)


PHOTO = [189, 202, 182, 186, 199, 280, 432]  # PACS, images per class
LABELS = torch.repeat_interleave(torch.arange(7), torch.tensor(PHOTO))


def test_the_long_tail_of_pacs_photo_is_the_published_one():
    assert long_tail(LABELS, 100) == [189, 110, 51, 23, 11, 5, 2]


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
@pytest.mark.parametrize("alpha", [None, 10, 100])
def test_conditions_combine(order, alpha):
    indices = Condition(order, alpha).indices(LABELS, seed=1)
    assert len(set(indices.tolist())) == len(indices)
    expected = PHOTO if alpha is None else long_tail(LABELS, alpha)
    assert LABELS[indices].bincount().tolist() == expected
    seen = LABELS[indices]
    assert bool((seen.diff() >= 0).all()) == (order == "sequential")
    assert torch.equal(indices, Condition(order, alpha).indices(LABELS, seed=1))
    assert not torch.equal(indices, Condition(order, alpha).indices(LABELS, seed=2))


def test_a_ratio_is_a_number_however_it_is_written():
    assert Condition(alpha=10) == Condition(alpha=10.0)
    assert str(Condition(alpha=10)) == str(Condition(alpha=10.0))


@pytest.mark.parametrize("bad", [{"order": "random"}, {"alpha": 0.5}, {"batch_size": 0}])
def test_impossible_conditions_are_refused(bad):
    with pytest.raises(FewshiftError, match=next(iter(bad))):
        Condition(**bad)

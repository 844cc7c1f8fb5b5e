"""Labelled images before and after: the page that `evaluate --report` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score

import fewshift
from fewshift import Support
from fewshift.report.pages import accuracy_page
from tests.helpers.networks import make_support, make_tiny
from tests.helpers.pages import Page

NAMES = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def scores() -> fewshift.ImageEvaluation:
    """A network before and after AdaBN, on images of which one class has fewer."""
    model, support = make_tiny(), make_support(5)
    delta = fewshift.adapt(model, support, method="adabn", accept="always").delta
    others = make_support(12, seed=3)
    kept = torch.cat([torch.arange(0, 30), torch.arange(34, 36)])
    labelled = Support(others.images[kept], others.labels[kept], NAMES)
    evaluation = fewshift.evaluate(model, labelled, delta=delta)
    assert isinstance(evaluation, fewshift.ImageEvaluation)
    return evaluation


def test_the_gain_is_the_difference_of_balanced_accuracies(scores):
    accuracies = []
    for tally in scores.tallies.values():
        truth = [row for row in range(3) for column in range(3) for _ in range(int(tally[row, column]))]
        answers = [column for row in range(3) for column in range(3) for _ in range(int(tally[row, column]))]
        accuracies.append(balanced_accuracy_score(truth, answers))
    assert scores.gain.point == pytest.approx(100 * (accuracies[1] - accuracies[0]))
    assert scores.gain.low <= scores.gain.point <= scores.gain.high


def test_the_page_counts_every_class_before_and_after(scores, tmp_path: Path):
    words = Page(accuracy_page(scores, tmp_path / "page.html", origin={"images": "labelled/"})).words
    before, after = scores.tallies.values()
    for label, name in enumerate(NAMES):
        count = scores.labels[label]
        assert f"{name} {int(before[label, label])} of {count} {int(after[label, label])} of {count}" in words
    assert f"{int(before.trace())} of 32 labelled images right before, {int(after.trace())} after" in words
    assert "labelled/" in words


def test_one_network_alone_has_no_gain():
    alone = fewshift.evaluate(make_tiny(), make_support(2))
    assert alone.gain is None

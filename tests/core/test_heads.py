"""Heads: rows that lean towards the source's, and rows that are trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize

from fewshift.core.heads import best_scale, leaning_rows, scores_apart, trained_rows

GENERATOR = torch.Generator().manual_seed(3)
POINTS = torch.randn(8, 5, generator=GENERATOR, dtype=torch.float64)
SOURCE = torch.randn(3, 5, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])  # harmonic mean of the counts 4, 2, 2: 2.4


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def naive_rows(places: list[int], pull: float, typical: float) -> np.ndarray:
    rows = []
    for label in range(3):
        members = [unit(POINTS[place].numpy()) for place in places if LABELS[place] == label]
        mean = np.mean(members, axis=0) if members else np.zeros(5)
        rows.append(unit(typical * mean + pull * unit(SOURCE[label].numpy())))
    return np.array(rows)


def test_a_row_lies_between_the_mean_direction_and_the_sources_row():
    expected = naive_rows(list(range(8)), 2.0, 3 / (1 / 4 + 1 / 2 + 1 / 2))
    assert np.allclose(leaning_rows(POINTS, LABELS, SOURCE, 2.0).numpy(), expected)


def test_a_class_without_images_keeps_the_sources_direction():
    rows = leaning_rows(POINTS[:6], LABELS[:6], SOURCE, 2.0)
    assert torch.allclose(rows[2], F.normalize(SOURCE[2], dim=0))


def test_without_a_pull_rows_are_nearest_centroids_of_unit_features():
    rows = leaning_rows(POINTS, LABELS, SOURCE, 0.0)
    for label in range(3):
        mean = F.normalize(POINTS[label == LABELS], dim=1).mean(0)
        assert torch.allclose(rows[label], F.normalize(mean, dim=0))


def test_scores_apart_are_made_without_the_image():
    scores = scores_apart(POINTS, LABELS, SOURCE, 2.0)
    rows = naive_rows([0, 1, 2, 3, 4, 6, 7], 2.0, 3 / (1 / 4 + 1 / 1 + 1 / 2))  # image 5 left out
    assert np.allclose(scores[5].numpy(), rows @ unit(POINTS[5].numpy()))


def test_the_scale_of_cosines_that_are_always_right_is_bounded_and_large():
    cosines = F.one_hot(torch.arange(3).repeat(10), 3).double()
    assert 3 < best_scale(cosines, torch.arange(3).repeat(10)) < 20
    assert best_scale(cosines, torch.randint(3, (30,), generator=torch.Generator().manual_seed(0))) < 1


@pytest.mark.parametrize("decay", [0.1, 0.01])
def test_trained_rows_minimise_what_they_are_said_to_minimise(decay):
    start = 4 * leaning_rows(POINTS, LABELS, SOURCE, 1.0)
    points, counts = F.normalize(POINTS, dim=1).numpy(), np.array([4, 2, 2])

    def objective(flat: np.ndarray) -> float:
        logits = points @ flat.reshape(3, 5).T
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(8), LABELS]
        each = [losses[LABELS.numpy() == label].sum() / counts[label] for label in range(3)]
        return float(np.mean(each) + decay / 2 * np.square(flat - start.numpy().ravel()).sum())

    best = minimize(objective, start.numpy().ravel(), method="BFGS", options={"gtol": 1e-7})
    rows = trained_rows(F.normalize(POINTS, dim=1), LABELS, start, decay)
    assert np.allclose(rows.numpy().ravel(), best.x, atol=2e-3)


def test_training_leaves_the_row_of_a_class_without_images():
    start = 4 * leaning_rows(POINTS[:6], LABELS[:6], SOURCE, 1.0)
    rows = trained_rows(F.normalize(POINTS[:6], dim=1), LABELS[:6], start, 0.01)
    assert torch.equal(rows[2], start[2])
    assert not torch.equal(rows[0], start[0])

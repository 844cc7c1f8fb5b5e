"""Which image comes next: every class soon, and a fair sample of each."""

from __future__ import annotations

import numpy as np
import pytest

from fewshift.studio.order import PATIENCE, Order, beliefs

CLASSES = 4


def answers(truth: np.ndarray, sure: float = 0.97, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of a network that is right, and features in which classes are apart."""
    random = np.random.default_rng(seed)
    probabilities = np.full((len(truth), CLASSES), (1 - sure) / (CLASSES - 1))
    probabilities[np.arange(len(truth)), truth] = sure
    features = np.eye(CLASSES, 8)[truth] + 0.1 * random.standard_normal((len(truth), 8))
    return probabilities, features


def naive_beliefs(probabilities: np.ndarray, features: np.ndarray, labels: dict[int, int]) -> np.ndarray:
    """The formula of the module, one number at a time."""
    mean = [sum(row[at] for row in features) / len(features) for at in range(features.shape[1])]
    points = [[value - middle for value, middle in zip(row, mean, strict=True)] for row in features]
    norms = [sum(value**2 for value in point) ** 0.5 for point in points]
    rows = []
    for i, point in enumerate(points):
        scores = []
        for label in range(probabilities.shape[1]):
            own = [j for j, other in labels.items() if other == label]
            kernels = []
            for j in own:
                inner = sum(one * other for one, other in zip(point, points[j], strict=True))
                kernels.append(np.exp(8 * (inner / norms[i] / norms[j] - 1)))
            alike = sum(kernels) / len(kernels) if kernels else 0.0
            scores.append((probabilities[i, label] + 1e-4) ** 0.5 * (alike + np.exp(-8)))
        rows.append([score / sum(scores) for score in scores])
    return np.array(rows)


def test_beliefs_are_the_formula() -> None:
    random = np.random.default_rng(1)
    probabilities = random.dirichlet(np.ones(CLASSES), 12)
    features = random.standard_normal((12, 5))
    labels = {0: 1, 3: 1, 5: 2}
    np.testing.assert_allclose(
        beliefs(probabilities, features, labels), naive_beliefs(probabilities, features, labels), rtol=1e-9
    )


def test_images_of_the_class_with_the_fewest_labels_come_next() -> None:
    truth = np.arange(80) % CLASSES
    probabilities, features = answers(truth)
    labels = {image: int(truth[image]) for image in range(80) if truth[image] != 2 and image < 20}
    free = set(range(80)) - set(labels)
    order = Order(CLASSES, seed=0)
    chosen = [order.next(1, free, labels, range(80), probabilities, features)[0] for _ in range(40)]
    assert np.mean(truth[chosen] == 2) > 0.9


def test_images_are_drawn_as_often_as_they_are_believed_to_belong_to_the_class() -> None:
    random = np.random.default_rng(2)
    probabilities, features = random.dirichlet(np.ones(CLASSES), 20), random.standard_normal((20, 5))
    labels = {0: 0, 1: 1, 2: 2}  # class 3 has none
    free = set(range(3, 20))
    order = Order(CLASSES, seed=0)
    draws = [order.next(1, free, labels, range(20), probabilities, features)[0] for _ in range(1500)]
    expected = naive_beliefs(probabilities, features, labels)[3:, 3]
    seen = np.bincount(draws, minlength=20)[3:] / 1500
    np.testing.assert_allclose(seen, expected / expected.sum(), atol=0.04)


def test_every_class_is_found_sooner_than_at_random() -> None:
    random = np.random.default_rng(0)
    truth = random.choice(CLASSES, 600, p=[0.6, 0.3, 0.08, 0.02])
    probabilities, features = answers(truth, sure=0.6)

    def looks(chosen_by) -> int:
        labels: dict[int, int] = {}
        while min(np.bincount(list(labels.values()), minlength=CLASSES)) < 3:
            image = chosen_by(labels)
            labels[image] = int(truth[image])
        return len(labels)

    order, shuffled = Order(CLASSES, seed=1), iter(random.permutation(600).tolist())
    spread = looks(
        lambda labels: order.next(1, set(range(600)) - set(labels), labels, range(600), probabilities, features)[0]
    )
    assert spread < 30
    assert looks(lambda labels: next(shuffled)) > 60


def test_a_class_without_images_does_not_hold_up_the_others() -> None:
    truth = np.arange(60) % 3  # class 3 never occurs
    probabilities, features = answers(truth)
    order, labels = Order(CLASSES, seed=0), {}
    for _ in range(3 * PATIENCE):
        image = order.next(1, set(range(60)) - set(labels), labels, range(60), probabilities, features)[0]
        labels[image] = int(truth[image])
    assert min(np.bincount(list(labels.values()), minlength=3)) >= 2


@pytest.mark.parametrize("known", [0, 5])
def test_before_answers_are_known_images_come_at_random(known: int) -> None:
    probabilities, features = answers(np.zeros(known, dtype=int))
    order = Order(CLASSES, seed=0)
    chosen = order.next(10, range(40), {}, range(known), probabilities, features)
    assert len(set(chosen)) == 10
    assert set(chosen) <= set(range(40))


@pytest.mark.parametrize("count", [1, 7, 100])
def test_no_image_is_chosen_twice_and_none_that_is_not_free(count: int) -> None:
    truth = np.arange(40) % CLASSES
    probabilities, features = answers(truth)
    free = set(range(10, 40))
    for chosen in (
        Order(CLASSES, seed=0).next(count, free, {0: 0}, range(40), probabilities, features),
        Order(CLASSES, seed=0).random(count, free),
    ):
        assert len(chosen) == len(set(chosen)) == min(count, 30)
        assert set(chosen) <= free

"""FLUTE against its formulas written out: weight and bias after every step, the statistics, the centroids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewshift import Target
from fewshift.methods.flute import Flute, balanced_minibatches, centroid_loss
from tests.helpers.naive import (
    TOLERANCE,
    Formulas,
    HandAdam,
    Snapshot,
    assert_same_course,
    every_step,
    gradients,
    negative_log_likelihood,
    track,
)
from tests.helpers.networks import make_support, make_tiny

SUPPORT = make_support(shots=4)  # 12 images
EPOCHS, SIZE, RATE = 3, 5, 0.02  # a minibatch of two images has two classes


def unit(row: Tensor) -> Tensor:
    """The row at length 1; the square of its length counts as 1e-3 at least."""
    return row / row.square().sum().clamp(min=1e-3).sqrt()


def cosines(features: Tensor, labels: Tensor, *, detach: bool) -> tuple[Tensor, Tensor]:
    """Similarities to the means of the classes that are there, and each image's place among these classes."""
    present = sorted(set(labels.tolist()))
    means = [features[labels == label].mean(0) for label in present]
    means = [mean.detach() for mean in means] if detach else means
    rows = torch.stack([torch.stack([unit(point) @ unit(mean) for mean in means]) for point in features])
    return rows, torch.tensor([present.index(label) for label in labels.tolist()])


def naive(stats: str, *, detach: bool) -> tuple[Formulas, list[Snapshot]]:
    net, steps = Formulas(make_tiny(), momentum=0.0), list[Snapshot]()
    names, optimizer, generator = net.names("bn"), HandAdam(), torch.Generator().manual_seed(0)
    track(net.tensors, names)
    net.training = stats == "support"  # with gradient through the moments of the minibatch
    for _ in range(EPOCHS):
        for indices in balanced_minibatches(SUPPORT.labels, SIZE, generator):  # the order of the images alone
            features = net.features(SUPPORT.images[indices])
            loss = negative_log_likelihood(*cosines(features, SUPPORT.labels[indices], detach=detach))
            optimizer.step(net.tensors, gradients(loss, net.tensors, names), RATE)
            steps.append(net.snapshot(names))
    net.training = False
    if stats == "support":
        net.use_statistics_of(SUPPORT.images)
    return net, steps


@pytest.mark.parametrize("centroid_grad", ["flow", "detach"])
@pytest.mark.parametrize("stats", ["support", "source"])
@torch.no_grad()
def test_every_step_is_that_of_the_formulas(stats, centroid_grad):
    with torch.enable_grad():
        net, course = naive(stats, detach=centroid_grad == "detach")
        with every_step() as steps:
            predictor = Flute(stats=stats, centroid_grad=centroid_grad, epochs=EPOCHS, lr=RATE, batch_size=SIZE).adapt(
                make_tiny().double(), Target(SUPPORT)
            )
    assert_same_course(steps, course)
    for name, tensor in net.tensors.items():
        if not name.startswith("fc"):
            assert float((predictor.state_dict()[name] - tensor).abs().max()) < TOLERANCE, name

    features, queries = net.features(SUPPORT.images), make_support(seed=3).images
    centres = [features[SUPPORT.labels == label].mean(0) for label in range(3)]
    expected = torch.stack(
        [torch.stack([f @ c / (f.norm() * c.norm()) for c in centres]) for f in net.features(queries)]
    )
    logits = predictor(queries.double())
    # one factor for all rows of the head, and the length of an image's features, are all in which they differ
    lengths = logits.norm(dim=1, keepdim=True) / expected.norm(dim=1, keepdim=True)
    assert float((logits / lengths - expected).abs().max()) < TOLERANCE
    assert float(predictor.fc.bias.abs().max()) == 0
    rows = predictor.fc.weight.norm(dim=1)
    assert float((rows - rows[0]).abs().max()) < TOLERANCE


def test_the_squared_length_of_short_features_counts_as_a_thousandth():
    points = 0.01 * torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([4, 4, 1, 1, 1, 9, 9])
    expected = negative_log_likelihood(*cosines(points, labels, detach=False))
    assert float((centroid_loss(points, labels) - expected).abs()) < TOLERANCE
    longer = negative_log_likelihood(*cosines(10 * points, labels, detach=False))
    assert float((longer - expected).abs()) > 0.01

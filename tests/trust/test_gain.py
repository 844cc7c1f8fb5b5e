"""A gain: paired by image, with an interval that few images cannot fool."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from fewshift.trust.gain import by_image, gain_from, paired_interval, standard_error


def test_the_interval_is_that_of_agresti_and_min_with_fewer_changes_added():
    # 21 wins, 6 losses and 73 ties: their formula, written out
    change = torch.cat([torch.ones(21), -torch.ones(6), torch.zeros(73)])
    b, c, n = 21.25, 6.25, 102
    middle, half = (b - c) / n, stats.norm.ppf(0.95) * math.sqrt(b + c - (b - c) ** 2 / n) / n
    assert paired_interval(change) == pytest.approx((middle - half, middle + half))


@pytest.mark.parametrize(("win", "loss"), [(0.1, 0.1), (0.3, 0.1), (0.5, 0.05), (0.02, 0.02)])
def test_nine_intervals_of_ten_cover_the_truth(win, loss):
    images, covered = 20, 0.0
    outcome = stats.multinomial(images, [win, loss, 1 - win - loss])
    for wins, losses in product(range(images + 1), repeat=2):
        if wins + losses <= images:
            ties = images - wins - losses
            change = torch.tensor([1.0] * wins + [-1.0] * losses + [0.0] * ties)
            low, high = paired_interval(change)
            covered += outcome.pmf([wins, losses, ties]) * (low <= win - loss <= high)
    assert covered >= 0.86  # counts are whole numbers, so no rule covers exactly nine of ten


def test_no_change_in_few_images_is_no_certainty():
    low, high = paired_interval(torch.zeros(7))
    assert low < -0.1
    assert high > 0.1


def test_values_are_averaged_image_by_image():
    images, values = torch.tensor([4, 0, 4, 9, 0, 4]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 8.0])
    assert by_image(images, values).tolist() == [3.5, 4.0, 4.0]  # of images 0, 4 and 9


def test_the_standard_error_is_that_of_the_mean():
    values = torch.tensor([1.0, 4.0, 2.0, 8.0])
    assert standard_error(values) == pytest.approx(stats.sem(values.numpy()))
    assert standard_error(values[:1]) == math.inf


def test_a_gain_counts_images_and_predictions_apart():
    images = torch.tensor([0, 1, 2, 0, 1, 2])
    before, after = torch.tensor([0.0, 1, 0, 0, 1, 1]), torch.tensor([1.0, 1, 0, 1, 0, 1])
    gain = gain_from(images, before, after, torch.tensor([-0.6, 0.0, 0.0, -0.6, 0.2, -0.2]))
    assert (gain.images, gain.predictions, gain.wins, gain.losses) == (3, 6, 2, 1)
    assert gain.point == pytest.approx(100 * (1 - 0.5 + 0) / 3)
    assert (gain.before, gain.after) == (pytest.approx(50), pytest.approx(100 * 2 / 3))
    assert gain.loss_change == pytest.approx((-0.6 + 0.1 - 0.1) / 3)
    assert gain.loss_error == pytest.approx(stats.sem([-0.6, 0.1, -0.1]))
    assert gain.nats == pytest.approx(0.6)  # the three labels are e^0.6 times as likely, together


def test_an_image_held_out_twice_counts_once():
    before, after, loss = torch.tensor([0.0, 1, 1]), torch.tensor([1.0, 1, 0]), torch.tensor([-1.0, 0.0, 2.0])
    once = gain_from(torch.arange(3), before, after, loss)
    twice = gain_from(torch.arange(3).repeat(2), before.repeat(2), after.repeat(2), loss.repeat(2))
    assert (twice.point, twice.low, twice.high, twice.nats) == (once.point, once.low, once.high, once.nats)


def test_an_interval_is_as_wide_as_the_networks_of_the_folds_differ():
    change = torch.tensor([1.0] * 8 + [0.0] * 8 + [-1.0] * 8)
    folds = torch.arange(3).repeat_interleave(8)  # the fold means are 1, 0 and -1
    gain = gain_from(torch.arange(24), change * 0, change, change * 0, folds=folds)
    half = 100 * stats.norm.ppf(0.95) * stats.sem([1, 0, -1])
    assert (gain.low, gain.high) == (pytest.approx(-half), pytest.approx(half))


def test_folds_that_agree_leave_the_interval_of_the_images():
    change = torch.tensor([1.0, 0.0, 0.0, -1.0] * 6)
    images, folds = torch.arange(24), torch.arange(3).repeat_interleave(8)
    known, unknown = (gain_from(images, change * 0, change, change * 0, folds=each) for each in (folds, None))
    assert (known.low, known.high) == (unknown.low, unknown.high)


def test_every_class_counts_the_same_however_many_images_it_has():
    labels = torch.tensor([0] * 8 + [1] * 2)
    before, after = torch.zeros(10), torch.tensor([1.0] * 6 + [0.0] * 4)  # 6 of 8 became right, and none of 2
    gain = gain_from(torch.arange(10), before, after, -after, labels=labels)
    assert (gain.point, gain.over_images) == (pytest.approx(37.5), pytest.approx(60))
    assert gain.loss_change == pytest.approx(-0.375)
    assert gain.per_class == {0: (8, 0.0, 75.0), 1: (2, 0.0, 0.0)}


def test_the_error_of_a_weighted_mean_is_that_of_a_replicated_sample():
    # two classes with the same number of images: the weights are equal, and the error is the plain one
    labels, loss = torch.tensor([0, 1] * 6), torch.linspace(-1, 1, 12).double() ** 3
    weighted = gain_from(torch.arange(12), loss * 0, loss * 0, loss, labels=labels)
    assert weighted.loss_error == pytest.approx(stats.sem(loss.numpy()))
    # fewer images of one class are less sure
    skewed = gain_from(torch.arange(12), loss * 0, loss * 0, loss, labels=torch.tensor([0] * 10 + [1] * 2))
    shares = np.array([1 / 20] * 10 + [1 / 4] * 2)
    around = (loss.numpy() - shares @ loss.numpy()) ** 2
    assert skewed.loss_error == pytest.approx(math.sqrt(shares**2 @ around * 12 / 11))
    assert skewed.high - skewed.low > weighted.high - weighted.low

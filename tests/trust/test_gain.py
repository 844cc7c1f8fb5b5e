"""Held-out answers, the choice between candidates, the gain and its interval."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshift import LCCS, FewshiftError, Support, Target
from fewshift.trust.gain import (
    CLEAR,
    HeldOut,
    choose,
    chosen_without_own_fold,
    folds_of,
    gain_of,
    paired_interval,
    temperature,
    times,
)
from tests.helpers.networks import make_support, make_tiny


def held(labels, source, adapted, images=None, **candidates):
    labels = torch.tensor(labels)
    images = torch.arange(len(labels)) if images is None else torch.tensor(images)
    logits = {name: 5.0 * F.one_hot(torch.tensor(it), 3).double() for name, it in candidates.items()}
    source, adapted = (5.0 * F.one_hot(torch.tensor(it), 3).double() for it in (source, adapted))
    return HeldOut(labels, images, torch.arange(len(labels)) % 2, source, adapted, logits)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(2, 5), st.integers(0, 99))
def test_every_image_is_held_out_as_often_as_any_other_and_never_adapted_to(shots, classes, seed):
    support = Support(torch.randn(shots * classes, 3), torch.arange(shots * classes) % classes)
    folds = folds_of(support, "cv", seed)
    times = torch.cat(folds).bincount(minlength=len(support))
    assert times.min() == times.max() >= 1
    for (kept, out), fold in zip(support.splits(folds), folds, strict=True):
        assert len(kept) + len(out) == len(support)
        assert torch.equal(out.images, support.images[fold])
        assert len(kept.counts) == classes  # every class is still there


def test_cross_validation_costs_about_five_adaptations_whatever_the_shots():
    for shots in range(1, 12):
        support = Support(torch.randn(shots * 7, 3), torch.arange(shots * 7) % 7)
        kept = sum(len(it) for it, _ in support.splits(folds_of(support, "cv", 0)))
        assert 3 <= kept / len(support) <= 6


def test_leaving_one_out_holds_out_every_image_alone():
    support = make_support(2)
    assert [it.tolist() for it in folds_of(support, "loo", 0)] == [[0], [1], [2], [3], [4], [5]]
    with pytest.raises(FewshiftError, match="validate='always' is unknown"):
        folds_of(support, "always", 0)


def test_the_temperature_is_that_of_a_search_by_hand():
    logits, labels = torch.randn(40, 4).double() * 6, torch.arange(40) % 4
    losses = {t: float(F.cross_entropy(logits / t, labels)) for t in (10 ** (i / 200) for i in range(-400, 401))}
    best = min(losses, key=losses.__getitem__)
    assert temperature(logits, labels) == pytest.approx(best, rel=0.07)


def test_the_interval_of_agresti_and_min():
    # 53 right and 28 wrong of 100: their formula, written out
    change = torch.cat([torch.ones(21), -torch.ones(6), torch.zeros(73)])
    b, c, n = 21.5, 6.5, 102
    middle, half = (b - c) / n, 1.6448536 * math.sqrt(b + c - (b - c) ** 2 / n) / n
    assert paired_interval(change) == pytest.approx((middle - half, middle + half))


def test_no_change_in_few_images_is_no_certainty():
    low, high = paired_interval(torch.zeros(7))
    assert low < -0.1
    assert high > 0.1


def test_the_gain_counts_what_became_right_and_wrong():
    found = gain_of(held([0, 1, 2, 0, 1, 2], source=[0, 1, 1, 1, 0, 0], adapted=[0, 2, 2, 0, 1, 0]))
    assert (found.wins, found.losses, found.predictions, found.images) == (3, 1, 6, 6)
    assert found.point == pytest.approx(100 * (3 - 1) / 6)
    assert (found.before, found.after) == (pytest.approx(100 * 2 / 6), pytest.approx(100 * 4 / 6))
    assert found.per_class[0] == (2, 50.0, 100.0)
    assert "of 6 held-out images, 3 became right and 1 became wrong: +33.3 points" in found.words


def test_an_image_held_out_twice_counts_once():
    once = gain_of(held([0, 1, 2], [1, 1, 2], [0, 1, 1]))
    twice = gain_of(held([0, 1, 2] * 2, [1, 1, 2] * 2, [0, 1, 1] * 2, images=[0, 1, 2] * 2))
    assert (twice.point, twice.low, twice.high) == (once.point, once.low, once.high)
    assert (twice.predictions, twice.images) == (6, 3)


def test_the_best_candidate_on_held_out_images_is_chosen():
    truth = [0, 1, 2, 0, 1, 2, 0, 1]
    it = held(truth, [0] * 8, [0] * 8, good=[0, 1, 2, 0, 1, 2, 0, 0], bad=[1, 2, 0, 1, 2, 0, 1, 2])
    assert choose(it) == "good"


def test_a_candidate_that_is_better_by_luck_is_not_chosen():
    # of twelve images two become right and one becomes wrong: no more than a standard error
    truth = [0, 1, 2] * 4
    first, second = [1, 2, *truth[2:]], [*truth[:11], 0]
    many = held(truth * 9, truth * 9, truth * 9, first=first * 9, second=second * 9)
    assert choose(held(truth, truth, truth, first=first, second=second)) == "first"
    assert choose(many) == "second"


def test_a_row_has_no_say_in_which_candidate_answers_it():
    # each candidate is right in one fold alone: whoever chose with all rows would not mind, but without its own fold
    # every row gets the candidate that is wrong there
    truth = [0, 1, 2, 0, 1, 2, 0, 1]
    even = [label if row % 2 == 0 else (label + 1) % 3 for row, label in enumerate(truth)]
    odd = [label if row % 2 == 1 else (label + 1) % 3 for row, label in enumerate(truth)]
    it = held(truth, [(label + 2) % 3 for label in truth], truth, even=even, odd=odd)
    found = chosen_without_own_fold(it)
    assert (found.argmax(1) != it.labels).all()


# LCCS


def test_held_out_answers_are_those_of_an_adaptation_to_the_other_images():
    support, model = make_support(4), make_tiny().double()
    target = Target(replace(support, images=support.images.double()))
    found = LCCS(classifier="evidence", grid=3, epochs=2).fit(model, target, seed=3).held
    folds = folds_of(target.support, "cv", 3)
    kept, out = target.support.splits(folds)[0]
    assert list(found.candidates) == ["finetuned classifier", "ncc classifier", "source classifier"]
    for name, answers in found.candidates.items():
        method = LCCS(grid=3, epochs=2, classifier=name.removesuffix(" classifier"))
        model_again = method.adapt(model, Target(kept), seed=3)
        mine = answers[found.folds == 0]
        assert torch.allclose(mine, model_again(out.images).detach(), atol=1e-6)
    assert torch.allclose(found.source[found.folds == 0], model(out.images).detach(), atol=1e-6)


def test_the_predictor_is_the_chosen_candidate_fitted_to_everything():
    support, model = make_support(5), make_tiny()
    fitted = LCCS(classifier="evidence", grid=3, epochs=2).fit(model, Target(support))
    kind = fitted.notes["classifier"]
    assert choose(fitted.held) == f"{kind} classifier"
    again = LCCS(grid=3, epochs=2, classifier=kind).adapt(model, Target(support))
    assert torch.allclose(fitted.predictor(support.images), again(support.images), atol=1e-5)


def test_where_the_source_is_right_nothing_is_gained():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 3, 8, 8, generator=generator)
    model = make_tiny()
    with torch.no_grad():
        model.fc.bias -= model(images).mean(0)  # all three classes occur
        labels = model(images).argmax(1)  # the source is right everywhere: there is nothing to gain
    assert len(labels.unique()) == 3
    chosen = LCCS(classifier="evidence", grid=3, epochs=2).fit(model, Target(Support(images, labels)))
    assert gain_of(chosen.held).wins == 0


@pytest.mark.parametrize("support", [make_support(1), make_support(4).part(torch.tensor([0, 3, 6, 9, 1, 4, 7, 10]))])
def test_with_a_single_image_of_a_class_or_none_the_classifier_is_kept(support):
    found = LCCS(classifier="evidence", grid=3, epochs=1).fit(make_tiny(), Target(support)).held
    assert list(found.candidates) == ["source classifier"]


# the support's own loss


def test_one_free_number_is_clear_by_chance_in_14_of_1000_cases():
    # P(chi-squared with one degree of freedom < 2 * CLEAR) is the regularised gamma function
    assert float(torch.special.gammainc(torch.tensor(0.5), torch.tensor(CLEAR))) == pytest.approx(0.986, abs=1e-3)


def test_the_support_loss_is_that_of_the_source_and_of_the_blend():
    support, model = make_support(4), make_tiny().double()
    target = Target(replace(support, images=support.images.double()))
    fitted = LCCS(grid=5, epochs=0, classifier="source").fit(model, target)
    found = fitted.support_loss
    with torch.no_grad():
        before, after = (F.cross_entropy(it(target.support.images), support.labels) for it in (model, fitted.predictor))
    assert (found.before, found.after) == (pytest.approx(float(before)), pytest.approx(float(after)))
    assert found.nats == pytest.approx(12 * float(before - after))
    assert found.v == fitted.notes["v"]


@pytest.mark.parametrize("options", [{"init": None}, {"init": 0.5}, {"objective": "entropy"}])
def test_where_no_labels_chose_the_blend_there_is_no_such_test(options):
    assert LCCS(epochs=1, **options).fit(make_tiny(), Target(make_support(2))).support_loss is None


@pytest.mark.parametrize(
    ("nats", "said"),
    [
        (0.0, "1.0 times as"),
        (math.log(2.5), "2.5 times as"),
        (-math.log(4), "4.0 times less"),
        (9999, "over 1,000 times as"),
    ],
)
def test_likelihoods_in_words(nats, said):
    assert times(nats) == said

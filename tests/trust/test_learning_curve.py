"""How many labels: the gain against k, from draws that are fair, with a verdict that claims no more than it knows."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import Beta

import fewshift
from fewshift import METHODS, FewshiftError, LearningCurve, Method, Preprocess, Support, Target
from fewshift.core.method import Fitted, Needs
from fewshift.methods.auto import Auto
from fewshift.methods.finetune import L2
from fewshift.trust.gain import LEVEL, paired_interval
from fewshift.trust.learning_curve import Measured, checked_shots, rotated
from tests.helpers.networks import make_support, make_tiny, mixed_sizes, same_state, scenes, state, street

FAST = L2(epochs=2)
SUPPORT = make_support(6)
OTHERS = make_support(8, seed=9)


@pytest.fixture(scope="module")
def curve() -> LearningCurve:
    return fewshift.learning_curve(make_tiny(), SUPPORT, method=FAST, shots=(1, 2, 4), draws=3)


# the numbers


def right(model, images, labels):
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double()


def test_a_curve_is_what_a_loop_by_hand_measures(curve):
    model, labels = make_tiny(), SUPPORT.labels
    before = []
    for draw, order in enumerate(rotated(labels, 4, 3, 0)):
        held = [i for i in range(len(labels)) if order[i] >= 4]
        assert len(held) == 2 * 3
        before.append(right(model, SUPPORT.images[held], labels[held]))
        for k in (1, 2, 4):
            kept = [i for i in range(len(labels)) if order[i] < k]
            assert len(kept) == k * 3
            adapted = FAST.adapt(model, Target(Support(SUPPORT.images[kept], labels[kept])), 0)
            gain = (right(adapted, SUPPORT.images[held], labels[held]) - before[-1]).mean()
            assert curve.at(k).gains[draw] == pytest.approx(100 * float(gain))
    assert curve.source == pytest.approx(100 * float(torch.stack(before).mean()))
    assert (curve.draws, curve.images, curve.outside) == (3, 18, False)


def test_images_outside_the_support_judge_all_draws_and_k_goes_up_to_all_of_it():
    model, support, heard = make_tiny(), make_support(3), []
    curve = fewshift.learning_curve(
        model, support, method=FAST, draws=2, labelled=OTHERS, progress=lambda *words: heard.append(words)
    )
    assert [point.shots for point in curve.points] == [1, 2, 3]
    before = right(model, OTHERS.images, OTHERS.labels)
    for draw, order in enumerate(rotated(support.labels, 3, 2, 0)):
        for k in (1, 2, 3):
            adapted = FAST.adapt(model, Target(support.part((order < k).nonzero().flatten())), 0)
            gain = (right(adapted, OTHERS.images, OTHERS.labels) - before).mean()
            assert curve.at(k).gains[draw] == pytest.approx(100 * float(gain))
    assert (curve.images, curve.outside) == (len(OTHERS), True)
    assert heard == [("adaptations", done, 6) for done in range(1, 7)]


def test_of_all_images_there_is_one_draw_and_it_is_made_once():
    Counting.sizes.clear()
    curve = fewshift.learning_curve(
        make_tiny(), make_support(3), method=Counting(), labelled=OTHERS, shots=(3,), draws=4
    )
    assert Counting.sizes == [9]
    assert (curve.at(3).draws, curve.at(3).spread, curve.at(3).chance) == (1, None, None)


def test_mean_spread_and_range_are_those_of_the_draws(curve):
    for point in curve.points:
        assert point.mean == pytest.approx(sum(point.gains) / 3)
        assert point.spread == pytest.approx(math.sqrt(sum((gain - point.mean) ** 2 for gain in point.gains) / 3))
        assert (point.lowest, point.highest) == (min(point.gains), max(point.gains))
        assert point.low <= point.mean <= point.high


def test_images_of_pixels_count_by_their_share_that_is_right():
    model, pool = street(), scenes(4)
    curve = fewshift.learning_curve(model, pool, method=L2(epochs=1), shots=(1, 3), draws=2)
    for draw, order in enumerate(rotated(torch.zeros(4, dtype=torch.long), 3, 2, 0)):
        (held,) = [i for i in range(4) if order[i] == 3]
        for k in (1, 3):
            adapted = L2(epochs=1).adapt(model, Target(pool.part((order < k).nonzero().flatten())), 0)
            with torch.no_grad():
                answers = [net(pool.images[held : held + 1])["out"].argmax(1)[0] for net in (model, adapted)]
            known = pool.labels[held] != 255
            before, after = (float((answer == pool.labels[held])[known].double().mean()) for answer in answers)
            assert curve.at(k).gains[draw] == pytest.approx(100 * (after - before))
    assert curve.unit == "labelled images"


def test_scenes_of_different_sizes_may_be_judged_by_others():
    curve = fewshift.learning_curve(
        street(), mixed_sizes(), method=Auto(epochs=1), shots=(1, 3), draws=1, labelled=scenes(2, seed=8)
    )
    assert [point.shots for point in curve.points] == [1, 3]
    assert curve.images == 2


def test_statistics_of_unlabelled_images_make_every_k_the_same():
    curve = fewshift.learning_curve(make_tiny(), SUPPORT, method="adabn", unlabelled=OTHERS.images, draws=3)
    assert len({point.gains for point in curve.points}) == 1
    assert curve.flat_from == 1
    assert (curve.step.mean, curve.step.low) == (0, -curve.step.high)


def test_nothing_passed_in_changes_and_the_same_seed_gives_the_same_curve(curve):
    model = make_tiny()
    before, random = state(model), torch.random.get_rng_state()
    again = fewshift.learning_curve(model, SUPPORT, method=FAST, shots=(4, 2, 1, 2), draws=3)
    assert same_state(before, state(model))
    assert torch.equal(random, torch.random.get_rng_state())
    assert again.points == curve.points
    other = fewshift.learning_curve(model, SUPPORT, method=FAST, shots=(1, 2, 4), draws=3, seed=1)
    assert other.points != curve.points


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.needs is not Needs.STREAM])
def test_every_method_that_learns_from_labels_has_a_curve(name):
    quick = {"epochs": 1, "steps": 1, "classifier_epochs": 1, "grid": 2}
    kind = METHODS[name]
    if kind.needs is Needs.UNLABELLED:
        with pytest.raises(FewshiftError, match=f"{name} does not learn from labelled images"):
            fewshift.learning_curve(make_tiny(), SUPPORT, method=name)
        return
    method = kind(**{key: value for key, value in quick.items() if key in kind().settings()})
    curve = fewshift.learning_curve(make_tiny(), SUPPORT, method=method, shots=(1,), draws=1)
    assert [point.shots for point in curve.points] == [1]


# the draws


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(3, 9), min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 99), st.data())
def test_every_image_judges_as_often_as_any_other_of_its_class(counts, draws, seed, data):
    most = data.draw(st.integers(1, min(counts) - 1))
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    places = rotated(labels, most, draws, seed)
    for label, count in enumerate(counts):
        mine = places[:, labels == label]
        assert mine.sort(dim=1).values.tolist() == [list(range(count))] * draws  # a draw of k is part of that of k + 1
        times = (mine >= most).sum(0)
        assert times.sum() == draws * (count - most)
        assert times.max() - times.min() <= 1


def test_draws_are_random_and_follow_the_seed():
    labels = torch.arange(3).repeat(8)
    places = rotated(labels, 7, 200, 0)
    assert torch.equal(places, rotated(labels, 7, 200, 0))
    assert not torch.equal(places, rotated(labels, 7, 200, 1))
    first = (places == 0).double().mean(0)  # each of eight images comes first in about an eighth of the draws
    assert (first - 1 / 8).abs().max() < 4 * math.sqrt(1 / 8 * 7 / 8 / 200)
    assert len((places < 1).unique(dim=0)) > 150


@pytest.mark.parametrize(
    ("images", "outside", "expected"),
    [
        (2, False, (1,)),
        (4, False, (1, 2, 3)),
        (6, False, (1, 2, 3, 5)),
        (12, False, (1, 2, 3, 5, 11)),
        (31, False, (1, 2, 3, 5, 10, 20, 30)),
        (1, True, (1,)),
        (10, True, (1, 2, 3, 5, 10)),
    ],
)
def test_k_goes_up_to_the_most_that_leave_an_image_of_each_class(images, outside, expected):
    assert checked_shots(None, make_support(images), outside=outside) == expected


def test_the_rarest_class_decides_how_far_k_goes():
    pool = Support(torch.rand(12, 3, 8, 8), torch.tensor([0] * 9 + [1] * 3))
    assert checked_shots(None, pool) == (1, 2)
    curve = fewshift.learning_curve(make_tiny(2), pool, method="source", draws=3)
    assert curve.images == 12  # 7 of nine and 1 of three in every draw
    assert [point.gains for point in curve.points] == [(0, 0, 0)] * 2


# the verdict


def measured(gains: dict[int, list[float]], images: int = 400, *, same: bool = False) -> Measured:
    """Draws with these gains in percent: of the images, all wrong before, so many are right after."""
    draws = len(next(iter(gains.values())))
    which = torch.arange(images).repeat(draws, 1) if same else torch.arange(draws * images).view(draws, images)
    before, after = torch.zeros(draws, images, dtype=torch.float64), {}
    for k, by_draw in gains.items():
        after[k] = before.clone()
        for row, gain in zip(after[k], by_draw, strict=True):
            row[: round(abs(gain) * images / 100)] = math.copysign(1, gain)
    return Measured(which, before, after, dict.fromkeys(gains, draws))


RISING = {1: [4, 5, 6, 5], 2: [8, 9, 8, 9], 5: [14, 15, 13, 14], 10: [20, 21, 19, 20]}
FLAT = {1: [2, 4, 3, 3], 2: [7, 6, 8, 7], 5: [10, 9, 11, 10], 10: [10.25, 9.5, 11, 10.25]}
ALWAYS = {1: [10, 9, 11, 10], 2: [10, 9, 11, 10], 5: [10, 9.5, 10.5, 10]}
NOISE = {1: [2, 12, 4, 10], 2: [12, 2, 11, 3], 5: [3, 14, 3, 16]}
FALLING = {1: [10, 11, 9, 10], 2: [8, 9, 8, 8], 5: [2, 3, 1, 2]}


@pytest.mark.parametrize(
    ("gains", "flat_from", "decided"),
    [
        (RISING, None, (5, 10)),
        (FLAT, 5, (5, 10)),
        (ALWAYS, 1, (1, 5)),
        (NOISE, None, (1, 5)),
        (FALLING, 1, (1, 5)),
        ({1: [5], 5: [9]}, None, None),  # one draw
        ({3: [5, 5, 6]}, None, None),  # one k
        ({3: [5, 5], 4: [5, 5]}, None, None),  # too close together
    ],
)
def test_the_verdict_is_that_of_the_curve(gains, flat_from, decided):
    verdict, step = measured(gains).verdict()
    assert verdict == flat_from
    assert (None if step is None else (step.shots, step.more)) == decided
    if step is not None:
        added = [more - less for more, less in zip(gains[step.more], gains[step.shots], strict=True)]
        assert step.mean == pytest.approx(statistics.fmean(added), abs=0.1)  # gains are whole images


def test_only_a_rise_for_certain_is_clear():
    assert measured(RISING).verdict()[1].clear
    assert not measured(NOISE).verdict()[1].clear


def test_few_images_leave_room_for_a_rise_that_goes_unseen():
    assert measured(ALWAYS, images=5).verdict()[1].high > 3 > measured(ALWAYS).verdict()[1].high


def test_what_may_be_a_point_and_is_clear_is_a_rise_and_what_is_small_for_certain_is_none():
    flat_from, large = measured({1: [8, 9, 8, 9], 5: [8.9, 9.9, 8.8, 10]}).verdict()
    assert 0 < large.low < large.mean < 1 < large.high
    assert flat_from is None
    flat_from, small = measured({1: [8, 9, 8, 9], 5: [8.25, 9.5, 8.25, 9.5]}).verdict()
    assert 0 < small.low < small.high < 1
    assert flat_from == 1


def test_a_curve_is_not_called_flat_by_a_step_of_one_image():
    steps = {k: [10 + 0.2 * k] * 3 for k in range(1, 11)}
    assert measured(steps).verdict()[0] != 9


def test_two_draws_of_the_same_few_images_prove_nothing():
    gains = {1: [10.0, 10.0], 5: [20.0, 20.0]}  # one image of ten, in both
    _, step = measured(gains, images=10, same=True).verdict()
    assert step.low < 0 < step.high


@pytest.mark.parametrize("same", [False, True])
def test_an_interval_is_by_image_and_by_draw(same):
    generator = torch.Generator().manual_seed(0)
    change = (torch.rand(4, 30, generator=generator) < torch.tensor([[0.1], [0.7], [0.4], [0.3]])).double()
    images = torch.arange(30).repeat(4, 1) if same else torch.arange(120).view(4, 30)
    point = Measured(images, change * 0, {2: change}, {2: 4}).points[0]
    low, high = paired_interval(change.mean(0) if same else change.flatten())
    by_draw = stats.t.interval(LEVEL, 3, 0, stats.sem([100 * float(draw.mean()) for draw in change]))[1]
    by_image = 50 * (high - low)
    assert by_draw > by_image  # so the wider one is that of the draws
    assert (point.high - point.low) / 2 == pytest.approx(math.hypot(by_image, by_draw) if same else by_draw)
    assert (point.high + point.low) / 2 == pytest.approx(50 * (high + low))


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_nine_intervals_of_ten_cover_the_truth(same, spread):
    """A change of 0.3 on average: a share of its own for each image, moved by each draw."""
    generator = torch.Generator().manual_seed(3)
    draws, images, covered = 5, 40, []
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for _ in range(300):
            shape = (1, images) if same else (draws, images)
            moved = spread * torch.randn(draws, 1, generator=generator).double()
            shares = Beta(0.6, 1.4).sample(shape).double() + moved
            change = (torch.rand(draws, images, generator=generator).double() < shares).double()
            which = torch.arange(images).repeat(draws, 1) if same else torch.arange(draws * images).view(draws, images)
            point = Measured(which, change * 0, {1: change}, {1: draws}).points[0]
            covered.append(point.low <= 30 <= point.high)
    assert statistics.fmean(covered) >= 0.87  # 0.90 within two standard errors


@pytest.mark.parametrize(("shares", "matters"), [([0.2, 0.8, 0.5, 0.3, 0.9], True), ([0.5] * 5, False)])
def test_the_spread_of_draws_is_told_from_chance_in_the_images_that_judge(shares, matters):
    generator = torch.Generator().manual_seed(0)
    change = (torch.rand(5, 50, generator=generator) < torch.tensor(shares)[:, None]).double()
    (point,) = Measured(torch.arange(250).view(5, 50), change * 0, {1: change}, {1: 5}).points
    assert point.matters is matters is bool(stats.f_oneway(*change.numpy()).pvalue < 0.05)
    assert point.chance == pytest.approx(100 * math.sqrt(sum(float(draw.var()) for draw in change) / 5 / 50))


def test_of_the_same_images_only_what_draws_change_is_chance():
    change = torch.tensor([[1.0, 0, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    (point,) = Measured(torch.arange(4).repeat(3, 1), change * 0, {1: change}, {1: 3}).points
    assert point.chance == pytest.approx(100 * math.sqrt((1 / 3 + 1 / 3) / 16))  # two images of four differ


# mistakes


@dataclass(frozen=True)
class Counting(Method):
    """The source network, and a note of how many images it was fitted to."""

    name: ClassVar[str] = "counting"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "nothing"
    sizes: ClassVar[list[int]] = []

    least: int = 1

    def fit(self, network, target, seed=0):
        self.sizes.append(len(target.support))
        if target.support.shots < self.least:
            raise FewshiftError("too few: label more")
        return Fitted(network.copy())


SINGLE = make_support(1)


@pytest.mark.parametrize(
    ("support", "options", "facts"),
    [
        (SINGLE, {}, "class 0 has a single image.*label another"),
        (scenes(1), {}, "the support has a single image"),
        (SUPPORT, {"shots": (1, 6)}, "class 0 has 6 images.*6 shots asked: .* at most 5"),
        (SUPPORT, {"shots": (7,), "labelled": OTHERS}, "class 0 has 6 images, 7 shots asked: .* at most 6"),
        (scenes(3), {"shots": (3,)}, "the support has 3 images.*3 shots asked"),
        (SUPPORT, {"shots": ()}, "no shots"),
        (SUPPORT, {"shots": (0, 1)}, "shots=0 is no number of images"),
        (SUPPORT, {"shots": (1.5,)}, r"shots=1\.5 is no number of images"),
        (SUPPORT, {"shots": 3}, "shots=3 is no list"),
        (SUPPORT, {"draws": 0}, "draws=0 is no number of draws"),
        (SUPPORT, {"method": "tent"}, "tent does not learn from labelled images"),
        (SUPPORT, {"method": "magic"}, "no method 'magic'"),
        (SUPPORT, {"labelled": "nowhere", "preprocess": Preprocess(8, 8, (0.5,), (0.5,))}, "nowhere.* is no folder"),
        (SUPPORT, {"labelled": SUPPORT}, "18 of the 18 support images are also among the 18 evaluation images"),
        (SUPPORT, {"method": Counting(least=2)}, "at k = 1, too few"),
        (SUPPORT, {"seed": -1}, "seed=-1 is no seed"),
        (None, {}, "needs labelled target images"),
    ],
)
def test_a_mistake_is_one_sentence(support, options, facts):
    model = street() if isinstance(support, Support) and support.kind.unit == "pixel" else make_tiny()
    with pytest.raises(FewshiftError, match=facts):
        fewshift.learning_curve(model, support, **{"method": FAST} | options)


def test_a_single_image_of_each_class_is_enough_where_others_judge():
    curve = fewshift.learning_curve(make_tiny(), SINGLE, method=FAST, labelled=OTHERS)
    assert [point.shots for point in curve.points] == [1]
    assert curve.step is None


def test_a_k_that_was_not_measured_has_no_point(curve):
    with pytest.raises(FewshiftError, match="k = 3 was not measured: choose one of 1, 2, 4"):
        curve.at(3)

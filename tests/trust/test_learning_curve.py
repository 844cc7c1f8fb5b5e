"""How many labels: the gain against k, from draws that are fair, with a verdict that claims no more than it knows."""
# ruff: noqa: F811 - fixtures are imported, and then are arguments

from __future__ import annotations

import json
import math
import re
import statistics
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import Beta

import fewshift
from fewshift import LCCS, METHODS, FewshiftError, LearningCurve, Method, Preprocess, Support, Target
from fewshift.core.method import Fitted, Needs
from fewshift.methods.finetune import L2
from fewshift.trust.gain import LEVEL, paired_interval
from fewshift.trust.learning_curve import Judged, checked_shots, rotated
from tests.cli.test_commands import network_options, place, run, small_network  # noqa: F401
from tests.core.test_pixels import mixed_sizes, scenes, street
from tests.helpers.networks import make_support, make_tiny, same_state, state
from tests.helpers.pages import Page

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


def test_a_curve_is_what_a_loop_by_hand_finds(curve):
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
    model, told = make_tiny(), []
    found = fewshift.learning_curve(
        model, make_support(3), method=FAST, draws=2, labelled=OTHERS, progress=lambda *it: told.append(it)
    )
    assert [it.shots for it in found.points] == [1, 2, 3]
    before = right(model, OTHERS.images, OTHERS.labels)
    support = make_support(3)
    for draw, order in enumerate(rotated(support.labels, 3, 2, 0)):
        for k in (1, 2, 3):
            adapted = FAST.adapt(model, Target(support.part((order < k).nonzero().flatten())), 0)
            gain = (right(adapted, OTHERS.images, OTHERS.labels) - before).mean()
            assert found.at(k).gains[draw] == pytest.approx(100 * float(gain))
    assert (found.images, found.outside) == (len(OTHERS), True)
    assert told == [("adaptations", done, 6) for done in range(1, 7)]


def test_of_all_images_there_is_one_draw_and_it_is_made_once():
    counting = Counting()
    found = fewshift.learning_curve(make_tiny(), make_support(3), method=counting, labelled=OTHERS, shots=(3,), draws=4)
    assert len(Counting.seen) == 1
    assert (found.at(3).draws, found.at(3).spread, found.at(3).chance) == (1, None, None)
    assert found.table()[0]["spread"] == "-"
    assert "is not known" in found.luck


def test_mean_spread_and_range_are_those_of_the_draws(curve):
    for point in curve.points:
        assert point.mean == pytest.approx(sum(point.gains) / 3)
        assert point.spread == pytest.approx(math.sqrt(sum((it - point.mean) ** 2 for it in point.gains) / 3))
        assert (point.lowest, point.highest) == (min(point.gains), max(point.gains))
        assert point.low <= point.mean <= point.high


def test_images_of_pixels_count_by_their_share_that_is_right():
    model, pool = street(), scenes(4)
    found = fewshift.learning_curve(model, pool, method=L2(epochs=1), shots=(1, 3), draws=2)
    for draw, order in enumerate(rotated(torch.zeros(4, dtype=torch.long), 3, 2, 0)):
        (held,) = [i for i in range(4) if order[i] == 3]
        shares = []
        for k in (1, 3):
            adapted = L2(epochs=1).adapt(model, Target(pool.part((order < k).nonzero().flatten())), 0)
            with torch.no_grad():
                answers = [it(pool.images[held : held + 1])["out"].argmax(1)[0] for it in (model, adapted)]
            said = pool.labels[held] != 255
            shares = [float((it == pool.labels[held])[said].double().mean()) for it in answers]
            assert found.at(k).gains[draw] == pytest.approx(100 * (shares[1] - shares[0]))
    assert found.unit == "labelled images"


def test_scenes_of_different_sizes_and_judges_of_their_own():
    found = fewshift.learning_curve(street(), mixed_sizes(), method=LCCS(grid=2, epochs=1), labelled=scenes(2, seed=8))
    assert [it.shots for it in found.points] == [1, 2, 3]
    assert found.images == 2


def test_statistics_of_unlabelled_images_make_every_k_the_same():
    found = fewshift.learning_curve(make_tiny(), SUPPORT, method="adabn", unlabelled=OTHERS.images, draws=3)
    assert len({it.gains for it in found.points}) == 1
    assert found.flat_from == 1
    assert (found.step.mean, found.step.low) == (0, -found.step.high)


def test_the_name_alone_is_plain_lccs():
    found = fewshift.learning_curve(make_tiny(), make_support(2), draws=1)
    assert found.method == LCCS()


def test_nothing_given_changes_and_the_same_seed_gives_the_same_curve(curve):
    model = make_tiny()
    before, random = state(model), torch.random.get_rng_state()
    again = fewshift.learning_curve(model, SUPPORT, method=FAST, shots=(4, 2, 1, 2), draws=3)
    assert same_state(before, state(model))
    assert torch.equal(random, torch.random.get_rng_state())
    assert again.points == curve.points
    assert fewshift.learning_curve(model, SUPPORT, method=FAST, shots=(1, 2, 4), draws=3, seed=1) != curve


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
        (5, False, (1, 2, 3, 4)),
        (6, False, (1, 2, 3, 5)),
        (10, False, (1, 2, 3, 5, 9)),
        (12, False, (1, 2, 3, 5, 11)),
        (31, False, (1, 2, 3, 5, 10, 20, 30)),
        (1, True, (1,)),
        (10, True, (1, 2, 3, 5, 10)),
    ],
)
def test_k_goes_up_to_the_most_that_leave_an_image_of_each_class(images, outside, expected):
    assert checked_shots(None, make_support(images), outside=outside) == expected


def test_the_rarest_class_decides():
    labels = torch.tensor([0] * 9 + [1] * 3)
    pool = Support(torch.rand(12, 3, 8, 8), labels)
    assert checked_shots(None, pool) == (1, 2)
    found = fewshift.learning_curve(make_tiny(2), pool, method="source", draws=3)
    assert found.images == 12  # 7 of nine and 1 of three in every draw
    assert [it.gains for it in found.points] == [(0, 0, 0)] * 2


# the verdict


def synthetic(gains: dict[int, list[float]], images: int = 400, same: bool = False) -> Judged:
    """Draws with these gains in percent: of the images, all wrong before, so many are right after."""
    draws = len(next(iter(gains.values())))
    which = torch.arange(images).repeat(draws, 1) if same else torch.arange(draws * images).view(draws, images)
    before, after = torch.zeros(draws, images, dtype=torch.float64), {}
    for k, them in gains.items():
        after[k] = before.clone()
        for row, gain in zip(after[k], them, strict=True):
            count = round(abs(gain) * images / 100)
            row[:count] = math.copysign(1, gain)
    return Judged(which, before, after, dict.fromkeys(gains, draws))


def verdict(gains: dict[int, list[float]], images: int = 400) -> LearningCurve:
    judged = synthetic(gains, images)
    flat_from, step = judged.verdict()
    draws = len(judged.before)
    return LearningCurve(
        50.0, judged.points, flat_from, step, draws, draws * images, False, LCCS(), "Tiny", SUPPORT, 0, 1.0
    )


RISING = {1: [4, 5, 6, 5], 2: [8, 9, 8, 9], 5: [14, 15, 13, 14], 10: [20, 21, 19, 20]}
FLAT = {1: [2, 4, 3, 3], 2: [7, 6, 8, 7], 5: [10, 9, 11, 10], 10: [10.25, 9.5, 11, 10.25]}
ALWAYS = {1: [10, 9, 11, 10], 2: [10, 9, 11, 10], 5: [10, 9.5, 10.5, 10]}
NOISE = {1: [2, 12, 4, 10], 2: [12, 2, 11, 3], 5: [3, 14, 3, 16]}
FALLING = {1: [10, 11, 9, 10], 2: [8, 9, 8, 8], 5: [2, 3, 1, 2]}
NOTHING = {1: [0.25, -0.5, 0, 0.25], 2: [0, 0, 0.25, -0.25], 5: [0, 0.25, -0.25, 0]}
HARM = {1: [-5, -6, -5, -5], 5: [-5, -6, -5, -5]}


@pytest.mark.parametrize(
    ("gains", "flat_from", "words"),
    [
        (RISING, None, "the curve still rises at k = 10: +14.0 points at k = 5, +20.0 at k = 10: label more"),
        (FLAT, 5, "the curve is flat from k = 5 on: +10.0 points there, +10.2 at k = 10"),
        (ALWAYS, 1, "the curve is flat from k = 1 on: +10.0 points there, +10.0 at k = 5"),
        (NOISE, None, "whether the curve rises is not clear: +7.0 points at k = 1, +9.0 at k = 5, a differ"),
        (FALLING, 1, "no larger k is better than k = 1: +10.0 points there, +2.0 at k = 5"),
        (NOTHING, 1, "labels do not help lccs here: +0.0 points at k = 1, +0.0 at k = 5"),
        (HARM, 1, "labels do not help lccs here: -5.2 points at k = 1, -5.2 at k = 5"),
        ({1: [5], 5: [9]}, None, "one draw cannot tell a rise from chance: +5.0 points at k = 1, +9.0 at k = 5"),
        ({3: [5, 5, 6]}, None, "a single k is no curve: +5.3 points at k = 3: measure others, or label more"),
        ({3: [5, 5], 4: [5, 5]}, None, "these k are too close together to tell a rise: +5.0 points at k = 3"),
    ],
)
def test_the_verdict_is_that_of_the_curve(gains, flat_from, words):
    found = verdict(gains)
    assert found.flat_from == flat_from
    assert found.words.startswith(words)


def test_few_images_make_a_flat_curve_look_flat_and_no_more():
    found = verdict(ALWAYS, images=10)
    assert found.flat_from == 1
    assert re.search(r"looks flat from k = 1 on: .* with 40 images .* a rise of up to \d\.\d points", found.words)
    assert found.step.high > 3


def test_what_may_be_a_point_and_is_clear_is_a_rise_and_what_is_small_for_certain_is_none():
    large = verdict({1: [8, 9, 8, 9], 5: [8.9, 9.9, 8.8, 10]})
    assert 0 < large.step.low < large.step.mean < 1 < large.step.high
    assert large.flat_from is None
    assert "still rises" in large.words
    small = verdict({1: [8, 9, 8, 9], 5: [8.25, 9.5, 8.25, 9.5]})
    assert 0 < small.step.low < small.step.high < 1
    assert small.flat_from == 1


def test_a_curve_is_not_called_flat_by_a_step_of_one_image():
    steps = {k: [10 + 0.2 * k] * 3 for k in range(1, 11)}
    assert verdict(steps).flat_from != 9
    assert verdict({k: steps[k] for k in (9, 10)}).step is None


def test_two_draws_of_the_same_few_images_prove_nothing():
    gains = {1: [10.0, 10.0], 5: [20.0, 20.0]}  # one image of ten, in both
    _, step = synthetic(gains, images=10, same=True).verdict()
    assert step.low < 0 < step.high


@pytest.mark.parametrize("same", [False, True])
def test_an_interval_is_by_image_and_by_draw(same):
    generator = torch.Generator().manual_seed(0)
    change = (torch.rand(4, 30, generator=generator) < torch.tensor([[0.1], [0.7], [0.4], [0.3]])).double()
    images = torch.arange(30).repeat(4, 1) if same else torch.arange(120).view(4, 30)
    point = Judged(images, change * 0, {2: change}, {2: 4}).points[0]
    low, high = paired_interval(change.mean(0) if same else change.flatten())
    gains = [100 * float(it.mean()) for it in change]
    error = stats.sem(gains)
    by_draw = stats.t.interval(LEVEL, 3, 0, error)[1]
    by_image = 50 * (high - low)
    assert (point.high - point.low) / 2 == pytest.approx(math.hypot(by_image, by_draw) if same else by_draw)
    assert (point.high + point.low) / 2 == pytest.approx(50 * (high + low))
    assert by_draw > by_image  # so that the wider one was to be taken


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_nine_intervals_of_ten_cover_the_truth(same, spread):
    """A change of 0.3 on average: a share of its own for each image, moved by each draw."""
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    draws, images, covered = 5, 40, []
    for _ in range(300):
        shape = (1, images) if same else (draws, images)
        shares = Beta(0.6, 1.4).sample(shape).double() + spread * torch.randn(draws, 1, generator=generator).double()
        change = (torch.rand(draws, images, generator=generator).double() < shares).double()
        which = torch.arange(images).repeat(draws, 1) if same else torch.arange(draws * images).view(draws, images)
        point = Judged(which, change * 0, {1: change}, {1: draws}).points[0]
        covered.append(point.low <= 30 <= point.high)
    assert statistics.fmean(covered) >= 0.87  # 0.90 within two standard errors


def test_the_spread_of_draws_is_told_from_chance_in_the_images_that_judge():
    generator = torch.Generator().manual_seed(0)
    shares = {True: torch.tensor([0.2, 0.8, 0.5, 0.3, 0.9]), False: torch.full((5,), 0.5)}
    for matters, share in shares.items():
        change = (torch.rand(5, 50, generator=generator) < share[:, None]).double()
        judged = Judged(torch.arange(250).view(5, 50), change * 0, {1: change}, {1: 5})
        (point,) = judged.points
        p = stats.f_oneway(*change.numpy()).pvalue
        assert point.matters is matters is bool(p < 0.05)
        assert point.chance == pytest.approx(100 * math.sqrt(sum(float(it.var()) for it in change) / 5 / 50))
        found = LearningCurve(50, judged.points, None, None, 5, 250, False, LCCS(), "Tiny", SUPPORT, 0, 1.0)
        assert found.luck.startswith(f"which images were labelled {'matters at k = 1' if matters else 'made no diff'}")


def test_of_the_same_images_only_what_draws_change_is_chance():
    change = torch.tensor([[1.0, 0, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    (point,) = Judged(torch.arange(4).repeat(3, 1), change * 0, {1: change}, {1: 3}).points
    assert point.chance == pytest.approx(100 * math.sqrt((1 / 3 + 1 / 3) / 16))  # two images of four differ


# mistakes


@dataclass(frozen=True)
class Counting(Method):
    name: ClassVar[str] = "counting"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "nothing"
    seen: ClassVar[list[int]] = []

    least: int = 1

    def fit(self, network, target, seed=0):
        self.seen.append(len(target.support))
        if target.support.shots < self.least:
            raise FewshiftError("too few: label more")
        return Fitted(network.copy())


SINGLE = make_support(1)


@pytest.mark.parametrize(
    ("support", "options", "sentence"),
    [
        (SINGLE, {}, "class 0 has a single image, which cannot be learned from and judge as well: label another"),
        (scenes(1), {}, "the support has a single image"),
        (SUPPORT, {"shots": (1, 6)}, r"class 0 has 6 images, one of which has to judge, 6 shots asked: .* at most 5"),
        (SUPPORT, {"shots": (7,), "labelled": OTHERS}, "class 0 has 6 images, 7 shots asked: ask for at most 6"),
        (scenes(3), {"shots": (3,)}, "the support has 3 images, one of which has to judge, 3 shots asked"),
        (SUPPORT, {"shots": ()}, "no shots are given"),
        (SUPPORT, {"shots": (0, 1)}, "shots=0 is no number of images"),
        (SUPPORT, {"shots": (1.5,)}, r"shots=1\.5 is no number of images"),
        (SUPPORT, {"shots": 3}, "shots=3 is no list: give numbers of images"),
        (SUPPORT, {"draws": 0}, "draws=0 is no number of draws"),
        (SUPPORT, {"method": "tent"}, "tent does not learn from labelled images"),
        (SUPPORT, {"method": "shot"}, "shot does not learn from labelled images"),
        (SUPPORT, {"method": "magic"}, "there is no method 'magic'"),
        (SUPPORT, {"labelled": "nowhere", "preprocess": Preprocess(8, 8, (0.5,), (0.5,))}, "no such folder nowhere"),
        (SUPPORT, {"labelled": SUPPORT}, "18 of the 18 support images are also among the 18 evaluation images"),
        (SUPPORT, {"method": Counting(least=2)}, "at k = 1, too few: label more"),
        (SUPPORT, {"seed": -1}, "seed=-1 is no seed"),
        (None, {}, "a learning curve needs labelled target images"),
    ],
)
def test_a_mistake_is_one_sentence(support, options, sentence):
    model = street() if isinstance(support, Support) and support.kind.unit == "pixel" else make_tiny()
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.learning_curve(model, support, **{"method": FAST} | options)


def test_a_single_image_of_each_class_is_enough_where_others_judge():
    found = fewshift.learning_curve(make_tiny(), SINGLE, method=FAST, labelled=OTHERS)
    assert found.words.startswith("a single k is no curve")


def test_a_k_that_was_not_measured_has_no_point(curve):
    with pytest.raises(FewshiftError, match="k = 3 was not measured: choose one of 1, 2, 4"):
        curve.at(3)


# for people


def test_json_has_every_draw(curve):
    facts = json.loads(json.dumps(curve.to_json(), allow_nan=False))
    assert facts["words"] == curve.words
    assert [it["gains"] for it in facts["points"]] == [list(it.gains) for it in curve.points]
    assert facts["points"][0]["mean"] == curve.points[0].mean
    assert facts["settings"] == FAST.settings()


def test_the_picture_has_every_draw_and_says_what_it_shows(curve):
    svg = curve.picture()
    root = ET.fromstring(svg.replace("xlink:href", "href"))
    assert root.attrib["role"] == "img"
    assert f"{curve.at(4).mean:+.1f} at k = 4" in root.attrib["aria-label"]
    assert svg == curve.picture()
    flat = verdict(FLAT)
    assert "flat from k = 5" in flat.picture()
    assert "flat from" not in verdict(RISING).picture()


@pytest.mark.parametrize("kind", ["own images", "others", "pixels", "single k"])
def test_the_page_is_whole_and_has_the_verdict(kind, curve, tmp_path):
    found = {
        "own images": lambda: curve,
        "others": lambda: fewshift.learning_curve(make_tiny(), SUPPORT, method=FAST, labelled=OTHERS, draws=2),
        "pixels": lambda: fewshift.learning_curve(street(), scenes(3), method=L2(epochs=1), draws=2),
        "single k": lambda: fewshift.learning_curve(make_tiny(), SUPPORT, method="source", shots=(1,), draws=1),
    }[kind]()
    page = Page(found.report(tmp_path / "curve.html"))
    assert (page.open, page.mismatched) == ([], [])
    assert found.words[1:] in page.words
    assert found.luck[1:] in page.words
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe"}
    for row in found.table():
        assert row["90 % interval"] in page.words
    assert ("outside the support" in page.words) is found.outside


# the command


def test_the_command_prints_a_table_and_the_sentences(run, place):
    page = place / "curve.html"
    words = ["learning-curve", *network_options(place), "--support", place / "photos", "--set", "epochs=1"]
    done = run(*words, "--method", "l2", "--shots", "1,3", "--draws", 2, "--report", page)
    assert done.code == 0, done.stderr
    steps = Preprocess(None, 16, (0.5,) * 3, (0.25,) * 3)
    expected = fewshift.learning_curve(
        small_network(), place / "photos", method=L2(epochs=1), shots=(1, 3), draws=2, preprocess=steps
    )
    lines = done.stdout.splitlines()
    assert expected.words in lines
    assert expected.luck in lines
    rows = [line.split()[:4] for line in lines if line.strip()[:2] in ("1 ", "3 ")]
    assert rows == [list(it.values())[:4] for it in expected.table()]
    assert "<html" in page.read_text()


def test_json_is_what_the_function_returns(run, place):
    labelled = place / "labelled"
    (place / "photos").rename(labelled)
    for name in ("ant", "bee", "cat"):
        (place / "photos" / name).mkdir(parents=True)
        for file in sorted((labelled / name).iterdir())[:3]:
            file.rename(place / "photos" / name / file.name)
    words = ["--support", place / "photos", "--labelled", labelled, "--method", "adabn", "--draws", 2, "--json"]
    done = run("learning-curve", *network_options(place), *words)
    assert done.code == 0, done.stderr
    steps = Preprocess(None, 16, (0.5,) * 3, (0.25,) * 3)
    expected = fewshift.learning_curve(
        small_network(), place / "photos", method="adabn", draws=2, labelled=labelled, preprocess=steps
    ).to_json()
    facts = json.loads(done.stdout)
    assert facts | {"seconds": 0} == json.loads(json.dumps(expected | {"seconds": 0, "report": None}))
    assert [it["shots"] for it in facts["points"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--shots", "1,two"], 2, "'1,two' is no list of numbers"),
        (["--shots", "6"], 1, "error: class 'ant' has 6 images, one of which has to judge, 6 shots asked"),
        (["--method", "tent"], 1, "error: tent does not learn from labelled images"),
        (["--report", "nowhere/page.html"], 1, "cannot write"),
        (["--labelled", "nowhere"], 1, "no such folder nowhere"),
    ],
)
def test_mistakes_are_told_on_stderr(run, place, words, code, sentence):
    done = run("learning-curve", *network_options(place), "--support", place / "photos", *words)
    assert done.code == code
    assert sentence in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_every_method_that_learns_from_labels_has_a_curve():
    quick = {"epochs": 1, "steps": 1, "classifier_epochs": 1, "grid": 2}
    for name, kind in METHODS.items():
        if kind.needs in (Needs.STREAM, Needs.UNLABELLED):
            continue
        own = {key: value for key, value in quick.items() if key in kind().settings()}
        found = fewshift.learning_curve(make_tiny(), SUPPORT, method=kind(**own), shots=(2, 4), draws=1)
        assert [it.shots for it in found.points] == [2, 4], name

"""Evidence for an adaptation, and the guard that may keep the source network."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fewshift
from fewshift import METHODS, FewshiftError, Support
from fewshift.methods.auto import Auto
from fewshift.methods.finetune import L2
from fewshift.trust.evidence import Evidence, Fact, Missing, Weakness
from fewshift.trust.gain import Gain, gain_from
from fewshift.trust.guard import SURE, Rule, Strength, decide
from fewshift.trust.held_out import ImageAnswers, PixelAnswers
from fewshift.trust.sanity import Caution, CautionKind, believed
from fewshift.trust.shift import LayerShift, Shift
from tests.helpers.networks import make_support, make_tiny, mixed_sizes, same_state, scenes, state, street

SUPPORT = make_support(5)
FAST = L2(epochs=2)
TWO_CLASSES = SUPPORT.part((SUPPORT.labels != 1).nonzero().flatten())
OF_IMAGES = ImageAnswers(*(torch.zeros(1, dtype=torch.long),) * 3, *(torch.zeros(1, 3),) * 2)
OF_PIXELS = PixelAnswers(*(torch.zeros(1),) * 6)


def gain(*changes: float, loss: float = 0.0) -> Gain:
    change = torch.tensor(changes)
    return gain_from(torch.arange(len(change)), change * 0, change, torch.full((len(change),), loss))


def evidence(changes: list[float], **facts: object) -> Evidence:
    loss = float(facts.pop("loss", 0.0))
    return Evidence(gain(*changes, loss=loss), OF_IMAGES, **facts)


# the rules


@pytest.mark.parametrize(
    ("accept", "changes", "accepted", "rule"),
    [
        ("always", [-1] * 9, True, Rule.ALWAYS),
        ("not-worse", [1, 1, -1, 0, 0, 0], False, Rule.STRENGTH),
        ("better", [1] * 20, True, Rule.THRESHOLD),
        ("better", [1, -1, 1, 0, 0, 0], False, Rule.THRESHOLD),
        (50, [1] * 30, True, Rule.THRESHOLD),
        (50, [1, 0] * 15, False, Rule.THRESHOLD),
        (-30.0, [0] * 20, True, Rule.THRESHOLD),
        (lambda gain: gain.wins > 2, [1, 1, 1, -1, -1], True, Rule.CALLABLE),
        (lambda gain: gain.wins > 2, [1, 1, 0, 0, 0], False, Rule.CALLABLE),
    ],
)
def test_the_guard_decides_by_the_rule_it_was_asked_for(accept, changes, accepted, rule):
    verdict = decide(accept, evidence(changes))
    assert (verdict.accepted, verdict.rule) == (accepted, rule)


def by_class(*points: float) -> Gain:
    """A gain over classes of 50 images each, of which so many percent more became right; half were right before."""
    labels = torch.arange(len(points)).repeat_interleave(50)
    before = (torch.arange(len(labels)) % 2).double()
    after = before.clone()
    for label, each in enumerate(points):
        wrong = ((labels == label) & (before == 0)).nonzero().flatten()
        after[wrong[: round(each / 2)]] = 1
    return gain_from(torch.arange(len(labels)), before, after, torch.full((len(labels),), -0.5), labels=labels)


@pytest.mark.parametrize(("forgone", "accepted"), [(0.0, True), (59.0, True), (61.0, False)])
def test_classes_without_images_may_not_lose_more_than_the_others_gain(forgone, accepted):
    known = Evidence(by_class(20, 40), OF_IMAGES, unseen=("dog",), forgotten=("dog",), forgone=forgone)
    verdict = decide("not-worse", known)
    assert verdict.accepted is accepted
    assert (verdict.rule is Rule.FORGOTTEN_CLASSES) is not accepted
    assert decide("always", known).accepted


def test_a_class_that_is_predicted_no_more_may_cost_what_the_source_had_right():
    caution = Caution(CautionKind.UNSEEN, ("dog", "cat"), images=100, before=(20, 10), after=(5, 9))
    known = believed(Evidence(by_class(20, 40), OF_IMAGES), [caution])
    assert (known.forgotten, known.forgone) == (("dog",), pytest.approx(50 * 0.75))


def seen(score: float, threshold: float = 1.5) -> Shift:
    return Shift((), score, threshold, images=10, total=10)


def spread_losses(mean: float, deviation: float, count: int) -> Gain:
    """A gain whose losses change by `mean` on average, with this deviation between images."""
    losses = torch.tensor([mean - deviation, mean + deviation] * (count // 2), dtype=torch.float64)
    losses = mean + (losses - mean) * math.sqrt((count - 1) / count)  # the deviation of a sample
    return gain_from(torch.arange(count), losses * 0, losses * 0, losses)


def broken(gain):
    return gain.no_such_field > 0


@pytest.mark.parametrize(
    ("accept", "facts"),
    [
        (broken, r"accept=broken failed.*AttributeError.*no_such_field"),
        (lambda gain: None, r"accept=<lambda> returned None"),
        (lambda gain: gain.wins, r"accept=<lambda> returned 2: .*True or False"),
    ],
)
def test_a_condition_that_fails_or_is_no_yes_or_no_is_one_sentence(accept, facts):
    with pytest.raises(FewshiftError, match=facts):
        decide(accept, evidence([1, 1, 0]))


def test_a_condition_that_expects_a_gain_where_there_is_none_learns_why():
    with pytest.raises(FewshiftError, match=r"broken.*no evidence.*None"):
        fewshift.adapt(make_tiny(), SUPPORT, method="source", validate=None, accept=broken)


def test_numpy_knows_yes_and_no_too():
    assert decide(lambda gain: np.float64(gain.low) > -200, evidence([1, 1, 0])).accepted


@pytest.mark.parametrize(
    ("loss", "shift", "together"),
    [
        # 12 images: 12 * 0.5 nats over sqrt(12 * 1 + 1); then 12/18 and 6/18 of the weight
        (-0.5, None, 6 / math.sqrt(13)),
        (-0.5, seen(1.0), math.sqrt(2 / 3) * 6 / math.sqrt(13)),
        (-0.5, seen(1.5), math.sqrt(2 / 3) * 6 / math.sqrt(13) + math.sqrt(1 / 3) * 1.645),
        (0.0, seen(9.0), math.sqrt(1 / 3) * 4.0),  # a huge shift counts for four errors
        (0.5, seen(9.0), -math.sqrt(2 / 3) * 6 / math.sqrt(13) + math.sqrt(1 / 3) * 4.0),
    ],
)
def test_labels_and_shift_add_up_by_their_weights(loss, shift, together):
    assert Strength.of(spread_losses(loss, 1.0, 12), shift).together == pytest.approx(together)


def test_a_guard_that_sees_chance_alone_accepts_once_in_ten_times():
    generator = torch.Generator().manual_seed(0)
    accepted = []
    for _ in range(2000):
        losses = 3 * torch.randn(35, generator=generator, dtype=torch.float64)
        chance = 1 + 0.5 * float(torch.randn((), generator=generator)) / 1.645  # a deviation of one error
        accepted.append(
            Strength.of(gain_from(torch.arange(35), losses * 0, losses * 0, losses), seen(chance)).together > SURE
        )
    assert 0.085 < sum(accepted) / len(accepted) < 0.12


@pytest.mark.parametrize(
    ("loss", "shift", "accepted", "against"),
    [
        (-0.8, seen(1.0), True, False),  # the labels alone
        (-0.3, seen(1.0), False, False),
        (-0.3, seen(2.0), True, False),  # a hint, and a clear shift
        (0.0, seen(1.5), False, False),  # with many labels a shift that just raises an alarm is not enough
        (0.0, seen(2.2), True, False),  # a clear one is
        (0.8, seen(2.0), False, True),
    ],
)
def test_labels_and_shift_decide_together(loss, shift, accepted, against):
    verdict = decide("not-worse", Evidence(spread_losses(loss, 1.0, 20), OF_IMAGES, shift=shift))
    assert (verdict.accepted, verdict.against) == (accepted, against)


def test_with_few_images_a_clear_shift_decides_where_labels_are_silent():
    silent = gain(*[0] * 7)
    assert decide("not-worse", Evidence(silent, OF_IMAGES, shift=seen(2.5))).accepted
    assert not decide("not-worse", Evidence(silent, OF_IMAGES, shift=seen(1.2))).accepted


@pytest.mark.parametrize(("distance", "accepted"), [(0.1, False), (0.5, True)])
def test_a_small_shift_says_nothing_for_a_new_head(distance, accepted):
    shift = replace(seen(2.5), layers=(LayerShift("bn", distance, 1.0, 1e6, 1),))
    silent = gain(*[0] * 7)
    assert decide("not-worse", Evidence(silent, OF_IMAGES, shift=shift)).accepted
    assert decide("not-worse", Evidence(silent, OF_IMAGES, shift=shift, new_classifier=True)).accepted == accepted


def test_a_gain_that_is_surely_negative_is_never_handed_over_whatever_the_shift_says():
    facts = Evidence(gain(*[-1] * 5, *[0] * 7), OF_IMAGES, shift=seen(9.0))
    assert facts.gain is not None
    assert facts.gain.high < 0
    verdict = decide("not-worse", facts)
    assert verdict.strength is not None
    assert verdict.strength.margin > 0  # the labels are as likely as before, and the shift is large
    assert (verdict.accepted, verdict.rule) == (False, Rule.POINT)
    assert decide("not-worse", replace(facts, gain=gain(1, *[-1] * 2, *[0] * 9))).accepted


@pytest.mark.parametrize(
    ("loss", "score", "accepted"),
    [(0.0, 1.1, True), (0.0, 1.0, False), (0.0, 0.9, False), (-0.1, 1.0, True), (0.3, 1.1, False)],
)
def test_of_careful_statistics_more_has_to_be_said_for_than_against(loss, score, accepted):
    facts = Evidence(spread_losses(loss, 1.0, 20), OF_IMAGES, shift=seen(score))
    assert decide("not-worse", replace(facts, cautious=True)).accepted == accepted
    assert not decide("not-worse", facts).accepted
    for weakness in Weakness:
        assert not decide("not-worse", replace(facts, cautious=True, weakness=weakness)).accepted


@pytest.mark.parametrize(("seen_classes", "accepted"), [(9, True), (1, False)])
def test_images_that_lack_classes_are_unlike_the_source_anyway_and_their_shift_counts_less(seen_classes, accepted):
    labels = torch.arange(10) % seen_classes
    silent = gain_from(torch.arange(10), *(torch.zeros(10),) * 3, labels=labels)
    lacking = tuple(f"class {number}" for number in range(10 - seen_classes))
    # the alarm's threshold is 1.5, so 2.0 is two alarms: 3.29 standard errors, less two times the share of such classes
    skewed = Evidence(silent, OF_IMAGES, shift=seen(2.0), unseen=lacking)
    assert decide("not-worse", skewed).accepted == accepted
    strength = Strength.of(silent, seen(2.0), len(lacking) / 10)
    assert strength.shift == pytest.approx(2 * 1.645 - 2 * len(lacking) / 10)


@pytest.mark.parametrize(
    ("changes", "loss", "accepted"),
    [([0.1, -0.05], 1.0, True), ([0, 0], -0.1, True), ([0, 0], 0.1, False), ([-0.1, 0], -1.0, False)],
)
def test_with_pixel_labels_the_share_of_right_pixels_decides(changes, loss, accepted):
    verdict = decide("not-worse", Evidence(gain(*changes, loss=loss), OF_PIXELS))
    assert (verdict.accepted, verdict.rule) == (accepted, Rule.POINT)


@pytest.mark.parametrize(
    ("accept", "missing", "accepted"),
    [
        ("not-worse", Missing.NO_LABELS, True),
        ("not-worse", Missing.NOT_ASKED, True),
        ("not-worse", Missing.ONE_IMAGE, False),
        ("not-worse", Missing.NEEDS_ALL, False),
        ("better", Missing.NO_LABELS, False),
        (3, Missing.NOT_ASKED, False),
    ],
)
def test_without_evidence_only_the_mild_guard_accepts_and_only_where_none_could_be_had(accept, missing, accepted):
    verdict = decide(accept, Evidence(None, missing=missing))
    assert (verdict.accepted, verdict.rule) == (accepted, Rule.NO_EVIDENCE)


def test_a_verdict_names_facts_that_the_evidence_has():
    known = evidence([0] * 10, shift=seen(1.2), weakness=Weakness.ONE_SHOT, agreement=0.9)
    assert set(known.facts) == {Fact.GAIN, Fact.SHIFT, Fact.WEAKNESS, Fact.AGREEMENT}
    assert set(known.facts) - set(decide("not-worse", known).grounds) == {Fact.WEAKNESS, Fact.AGREEMENT}
    assert set(decide("always", known).grounds) == set()


# what adapt measures


def test_a_changed_classifier_is_refused_where_classes_have_no_image():
    refused = fewshift.adapt(make_tiny(), TWO_CLASSES, method=FAST)
    assert (refused.accepted, refused.verdict.rule) == (False, Rule.UNSEEN_CLASSES)
    assert refused.evidence.unseen == ("1",)


def test_a_kept_classifier_is_not_refused_for_classes_without_images():
    kept = fewshift.adapt(make_tiny(), TWO_CLASSES, method="adabn")
    assert kept.verdict.rule is not Rule.UNSEEN_CLASSES
    assert (kept.evidence.new_classifier, kept.evidence.unseen) == (False, ("1",))


def test_agreement_on_unlabelled_images_is_the_share_of_equal_predictions():
    model, others = make_tiny(), make_support(30, seed=5).images
    result = fewshift.adapt(model, make_support(2), method=FAST, unlabelled=others, accept="always")
    same = (model(others).argmax(1) == result.model(others).argmax(1)).double().mean()
    assert result.evidence.agreement == pytest.approx(float(same))


def test_what_is_rejected_comes_back_as_the_source_and_can_still_be_had():
    model = make_tiny()
    result = fewshift.adapt(model, SUPPORT, method=FAST, accept=1000)
    assert not result.accepted
    assert (result.verdict.rule, result.verdict.threshold) == (Rule.THRESHOLD, 1000)
    assert same_state(state(result.model), state(model))
    assert result.model is not model
    assert result.delta.bits == {}
    kept = fewshift.adapt(make_tiny(), SUPPORT, method=FAST, accept="always", validate=None)
    assert result.candidate_delta.adapted == kept.delta.adapted


@pytest.mark.parametrize("name", ["adabn", "finetune-head", "flute", "source"])
def test_every_method_is_judged_by_all_images_once(name):
    settings = {} if name in ("adabn", "source") else {"epochs": 2}
    gain = fewshift.adapt(make_tiny(), SUPPORT, method=METHODS[name](**settings)).gain
    assert (gain.images, gain.predictions) == (15, 15)
    if name == "source":
        assert (gain.wins, gain.losses, gain.point) == (0, 0, 0)


def test_leaving_one_out_asks_about_every_image_once():
    result = fewshift.adapt(make_tiny(), make_support(2), method="adabn", validate="loo")
    assert (result.gain.images, result.gain.predictions) == (6, 6)


def test_judging_changes_nothing_about_the_adapted_network():
    judged, unjudged = (
        fewshift.adapt(make_tiny(), SUPPORT, method=FAST, accept="always", validate=way) for way in ("cv", None)
    )
    assert same_state(state(judged.model), state(unjudged.model))
    assert unjudged.evidence.missing is Missing.NOT_ASKED


def test_labelled_images_of_ones_own_are_the_evidence():
    model, others = make_tiny(), make_support(20, seed=9)
    result = fewshift.adapt(model, SUPPORT, method=FAST, validate=others, accept="always")
    before, after = ((net(others.images).argmax(1) == others.labels).double() for net in (model, result.model))
    assert result.gain.point == pytest.approx(100 * float((after - before).mean()))
    assert (result.gain.wins, result.gain.losses) == (int((after > before).sum()), int((after < before).sum()))


def test_a_support_image_among_the_evaluation_images_is_a_leak():
    others = make_support(20, seed=9)
    images = torch.cat([others.images, SUPPORT.images[3:4]])
    labels = torch.cat([others.labels, SUPPORT.labels[3:4]])
    with pytest.raises(FewshiftError, match=r"1 of the 15 support images .* 61 evaluation images"):
        fewshift.adapt(make_tiny(), SUPPORT, method="adabn", validate=Support(images, labels))


def test_a_picture_that_is_in_the_support_twice_would_be_judged_by_who_saw_it():
    twice = Support(torch.cat([SUPPORT.images, SUPPORT.images[3:5]]), torch.cat([SUPPORT.labels, SUPPORT.labels[3:5]]))
    with pytest.raises(FewshiftError, match=r"support image 3 .* support image 15 .*image 4 .*image 16 "):
        fewshift.adapt(make_tiny(), twice, method="adabn")
    assert fewshift.adapt(make_tiny(), twice, method="adabn", validate=None).accepted


@pytest.mark.parametrize(
    ("classes", "support", "weakness"),
    [
        (3, make_support(1), Weakness.ONE_SHOT),
        (7, SUPPORT, Weakness.FEW_CLASSES),
        (6, SUPPORT, None),
    ],
)
def test_single_images_and_few_classes_are_weak_evidence(classes, support, weakness):
    result = fewshift.adapt(make_tiny(classes), support, method="adabn")
    assert result.evidence.weakness is weakness
    assert result.gain.weak is (weakness is not None)


def test_what_cannot_do_without_a_class_has_no_evidence():
    result = fewshift.adapt(make_tiny(), make_support(1), method=METHODS["flute"](epochs=1))
    assert (result.gain, result.accepted) == (None, False)
    assert (result.evidence.missing, result.evidence.method) == (Missing.NEEDS_ALL, "flute")


def test_a_changed_classifier_is_refused_though_nothing_could_be_held_out():
    # one image of a class and several of another: without it the support has a single class
    uneven = SUPPORT.part(
        torch.tensor([int((SUPPORT.labels == 0).nonzero()[0]), *(SUPPORT.labels == 2).nonzero().flatten()])
    )
    result = fewshift.adapt(make_tiny(), uneven, method=FAST)
    assert (result.gain, result.accepted) == (None, False)


def test_unlabelled_images_alone_are_no_evidence():
    result = fewshift.adapt(make_tiny(), None, method="adabn", unlabelled=SUPPORT.images)
    assert (result.accepted, result.verdict.rule) == (True, Rule.NO_EVIDENCE)
    assert result.evidence.missing is Missing.NO_LABELS


def test_pixels_are_judged_image_by_image():
    model, support = street(), scenes(4)
    result = fewshift.adapt(model, support, method=L2(epochs=1), accept="always")
    assert result.gain.images == 4
    with torch.no_grad():
        answers = model(support.images)["out"].argmax(1)
    shares = [
        (answer == label)[label != 255].double().mean() for answer, label in zip(answers, support.labels, strict=True)
    ]
    assert result.gain.before == pytest.approx(100 * float(torch.stack(shares).mean()))


@pytest.mark.parametrize("method", [L2(epochs=1), Auto(epochs=1)])
def test_pictures_of_different_sizes_are_judged_too(method):
    result = fewshift.adapt(street(), mixed_sizes(), method=method, accept="always")
    assert result.gain.images == 3


# the shift


def test_the_shift_of_the_evidence_is_that_of_the_unlabelled_images_or_else_of_the_support():
    model, support, others = make_tiny(), make_support(5), make_support(30, seed=5).images
    alone = fewshift.adapt(model, support, method="adabn")
    beside = fewshift.adapt(model, support, method="adabn", unlabelled=others)
    assert alone.evidence.shift.score == pytest.approx(fewshift.shift(model, support.images).score)
    assert beside.evidence.shift.score == pytest.approx(fewshift.shift(model, others).score)

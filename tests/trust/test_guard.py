"""Evidence for an adaptation, and the guard that may keep the source network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

import fewshift
from fewshift import LCCS, METHODS, FewshiftError, Support, Target
from fewshift.core.method import BlendSearch
from fewshift.methods.auto import Auto
from fewshift.methods.finetune import L2
from fewshift.trust.gain import Gain, gain_from
from fewshift.trust.guard import CLEAR, Evidence, Fact, Missing, Rule, Weakness, decide
from fewshift.trust.held_out import ImageAnswers, PixelAnswers
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
        ("not-worse", [1] * 9, True, Rule.LIKELIHOOD),
        ("not-worse", [1, 1, -1, 0, 0, 0], False, Rule.LIKELIHOOD),
        ("not-worse", [-1, -1, 1, 0, 0, 0], False, Rule.LIKELIHOOD),
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


CLEARLY, HARDLY = BlendSearch(0.4, 1.0, 0.65, 10), BlendSearch(0.4, 1.0, 0.75, 10)  # 3.5 and 2.5 nats


@pytest.mark.parametrize(
    ("changes", "loss", "blend", "accepted", "against"),
    [
        ([0] * 10, -0.35, None, True, False),  # held-out labels are exp(3.5) times as likely
        ([0] * 10, -0.25, None, False, False),  # exp(2.5): no more than a hint
        ([0] * 10, 0.0, CLEARLY, True, False),
        ([0] * 10, 0.0, HARDLY, False, False),
        ([0] * 10, 0.35, CLEARLY, False, True),  # held-out labels speak against what the support's own say
        ([-1] * 8 + [0] * 2, -1.0, CLEARLY, False, True),  # and so do predictions
        ([1, 0, 0, -1, 0, 0], 0.1, CLEARLY, True, False),  # a hint against it is no more than that either
    ],
)
def test_something_has_to_speak_for_the_adapted_network_and_nothing_against_it(changes, loss, blend, accepted, against):
    verdict = decide("not-worse", evidence(changes, loss=loss, blend=blend))
    assert (verdict.accepted, verdict.against) == (accepted, against)


def test_one_free_number_is_clear_by_chance_in_14_of_1000_cases():
    # twice the log of a ratio of likelihoods follows chi-squared with one degree of freedom
    assert stats.chi2.sf(2 * CLEAR, 1) == pytest.approx(0.014, abs=1e-3)


@pytest.mark.parametrize(("nats", "accepted"), [(9, False), (11, True)])
def test_weak_evidence_needs_a_nat_for_each_image(nats, accepted):
    weak = replace(gain(*[0] * 10), weak=True)
    blend = BlendSearch(0.4, 2.0, 2.0 - nats / 10, 10)
    assert decide("not-worse", Evidence(weak, OF_IMAGES, blend=blend)).accepted is accepted


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
    known = evidence([0] * 10, blend=CLEARLY, weakness=Weakness.ONE_SHOT, agreement=0.9)
    assert set(known.facts) == {Fact.GAIN, Fact.BLEND, Fact.WEAKNESS, Fact.AGREEMENT}
    assert set(known.facts) - set(decide("not-worse", known).grounds) == {Fact.AGREEMENT}
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


# the support's own labels under a blend of statistics


def test_the_likelihood_of_a_blend_is_that_of_the_support_under_both_networks():
    support, model = make_support(4), make_tiny().double()
    support = replace(support, images=support.images.double())
    fitted = LCCS(grid=5, epochs=0, classifier="source").fit(model, Target(support))
    with torch.no_grad():
        before, after = (
            float(F.cross_entropy(net(support.images), support.labels)) for net in (model, fitted.predictor)
        )
    search = fitted.search
    assert (search.before, search.after) == (pytest.approx(before), pytest.approx(after))
    assert search.nats == pytest.approx(12 * (before - after))
    assert search.v == fitted.notes["v"]


@pytest.mark.parametrize("options", [{"init": None}, {"init": 0.5}, {"objective": "entropy"}])
def test_where_no_labels_chose_the_blend_it_is_no_evidence(options):
    assert LCCS(epochs=1, **options).fit(make_tiny(), Target(make_support(2))).search is None

"""Evidence for an adaptation, and the guard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fewshift
from fewshift import LCCS, METHODS, FewshiftError, Support
from fewshift.methods.finetune import L2
from fewshift.trust.gain import Gain, SupportLoss, gain_from
from fewshift.trust.guard import Evidence, decide
from tests.core.test_pixels import mixed_sizes, scenes, street
from tests.helpers.networks import make_support, make_tiny

SUPPORT = make_support(5)
FAST = LCCS(classifier="evidence", grid=3, epochs=2)


def gain(*changes: float, loss: float = 0.0) -> Gain:
    change = torch.tensor(changes)
    return gain_from(torch.arange(len(change)), change * 0, change, torch.full((len(change),), loss))


@pytest.mark.parametrize(
    ("accept", "changes", "accepted"),
    [
        ("always", [-1] * 9, True),
        ("not-worse", [1] * 9, True),
        ("not-worse", [1, 1, -1, 0, 0, 0], False),
        ("not-worse", [-1, -1, 1, 0, 0, 0], False),
        ("better", [1] * 20, True),
        ("better", [1, -1, 1, 0, 0, 0], False),
        (50, [1] * 30, True),
        (50, [1, 0] * 15, False),
        (-30.0, [0] * 20, True),
        (lambda it: it.wins > 2, [1, 1, 1, -1, -1], True),
        (lambda it: it.wins > 2, [1, 1, 0, 0, 0], False),
    ],
)
def test_the_guard_asks_what_it_was_told_to_ask(accept, changes, accepted):
    verdict = decide(accept, Evidence(gain(*changes)))
    assert verdict.accepted is accepted
    assert verdict.reason.startswith("accepted" if accepted else "rejected")


CLEARLY, HARDLY = SupportLoss(0.4, 1.0, 0.65, 10), SupportLoss(0.4, 1.0, 0.75, 10)  # 3.5 and 2.5 nats


@pytest.mark.parametrize(
    ("changes", "loss", "blend", "accepted"),
    [
        ([0] * 10, -0.35, None, True),  # held-out labels are exp(3.5) times as likely
        ([0] * 10, -0.25, None, False),  # exp(2.5): no more than a hint
        ([0] * 10, 0.0, CLEARLY, True),
        ([0] * 10, 0.0, HARDLY, False),
        ([0] * 10, 0.35, CLEARLY, False),  # held-out labels speak against what the support's own say
        ([-1] * 8 + [0] * 2, -1.0, CLEARLY, False),  # and so do predictions
        ([1, 0, 0, -1, 0, 0], 0.1, CLEARLY, True),  # a hint against it is no more than that either
    ],
)
def test_something_has_to_speak_for_the_adapted_network_and_nothing_against_it(changes, loss, blend, accepted):
    verdict = decide("not-worse", Evidence(gain(*changes, loss=loss), support_loss=blend))
    assert verdict.accepted is accepted
    if not accepted:
        assert verdict.reason.endswith("the adapted network")


@pytest.mark.parametrize(("nats", "accepted"), [(9, False), (11, True)])
def test_at_one_shot_a_nat_for_each_image_is_asked_for(nats, accepted):
    weak = replace(gain(*[0] * 10), weak=True)
    blend = SupportLoss(0.4, 2.0, 2.0 - nats / 10, 10)
    assert decide("not-worse", Evidence(weak, support_loss=blend)).accepted is accepted


def test_a_changed_classifier_is_refused_where_classes_have_no_image():
    two = SUPPORT.part((SUPPORT.labels != 1).nonzero().flatten())
    refused = fewshift.adapt(make_tiny(), two, method=L2(epochs=2))
    assert not refused.accepted
    assert refused.reason == "rejected: the classifier was changed and the support has no image of 1"
    kept = fewshift.adapt(make_tiny(), two, method=FAST)
    assert not kept.evidence.new_classifier
    assert kept.evidence.unseen == ("1",)
    assert any("no image of 1: the source's classifier was kept" in it for it in kept.evidence.facts)


def test_agreement_on_unlabelled_images_bounds_what_can_change():
    model, others = make_tiny(), make_support(30, seed=5).images
    result = fewshift.adapt(model, make_support(1), method=FAST, unlabelled=others, accept="always")
    same = (model(others).argmax(1) == result.model(others).argmax(1)).double().mean()
    assert result.evidence.agreement == pytest.approx(float(same))
    assert any("% of the predictions stay the same" in it for it in result.evidence.facts)


def test_without_evidence_only_the_mild_guard_accepts():
    nothing = Evidence(None, words="there are no labels to judge by")
    assert decide("not-worse", nothing).accepted
    assert not decide("better", nothing).accepted
    assert "there are no labels" in decide(3, nothing).reason


def test_what_is_rejected_comes_back_as_the_source():
    model = make_tiny()
    result = fewshift.adapt(model, SUPPORT, method=FAST, accept=1000)
    assert not result.accepted
    assert result.reason.startswith("rejected: of ")
    assert all(torch.equal(model.state_dict()[name], it) for name, it in result.model.state_dict().items())
    assert result.delta.bits == {}
    assert result.model is not model


def test_what_was_rejected_can_still_be_had():
    result = fewshift.adapt(make_tiny(), SUPPORT, method=L2(epochs=3), accept=1000)
    kept = fewshift.adapt(make_tiny(), SUPPORT, method=L2(epochs=3), accept="always", validate=None)
    assert result.candidate_delta.adapted == kept.delta.adapted


@pytest.mark.parametrize("name", ["l2", "adabn", "finetune-head", "lccs", "flute", "source"])
def test_every_method_is_judged_on_images_it_was_not_adapted_to(name):
    settings = {} if name in ("adabn", "source") else {"epochs": 2}
    result = fewshift.adapt(make_tiny(), SUPPORT, method=METHODS[name](**settings))
    assert result.gain.images == len(SUPPORT)
    assert result.gain.predictions == len(SUPPORT)
    if name == "source":
        assert (result.gain.wins, result.gain.losses, result.gain.point) == (0, 0, 0)


def test_cross_validation_is_adapting_by_hand_without_a_fold():
    from fewshift.trust.gain import folds_of

    method = L2(epochs=2)
    result = fewshift.adapt(make_tiny(), SUPPORT, method=method, seed=4)
    right = {}
    for (kept, out), fold in zip(SUPPORT.splits(folds_of(SUPPORT, "cv", 4)), folds_of(SUPPORT, "cv", 4), strict=True):
        model = method.adapt(make_tiny(), fewshift.Target(kept), seed=4)
        right |= dict(zip(fold.tolist(), (model(out.images).argmax(1) == out.labels).tolist(), strict=True))
    assert result.gain.after == pytest.approx(100 * sum(right.values()) / len(right))


def test_leaving_one_out_asks_about_every_image_once():
    result = fewshift.adapt(make_tiny(), make_support(2), method=L2(epochs=1), validate="loo")
    assert (result.gain.images, result.gain.predictions) == (6, 6)


def test_labelled_images_of_ones_own_are_the_evidence():
    model, others = make_tiny(), make_support(20, seed=9)
    result = fewshift.adapt(model, SUPPORT, method=L2(epochs=3), validate=others, accept="always")
    before, after = ((it(others.images).argmax(1) == others.labels).double() for it in (model, result.model))
    assert result.gain.point == pytest.approx(100 * float((after - before).mean()))
    assert (result.gain.wins, result.gain.losses) == (int((after > before).sum()), int((after < before).sum()))


def test_a_support_image_among_the_evaluation_images_is_a_leak():
    others = make_support(20, seed=9)
    images = torch.cat([others.images, SUPPORT.images[3:4]])
    labels = torch.cat([others.labels, SUPPORT.labels[3:4]])
    with pytest.raises(FewshiftError, match="1 of the 15 support images is also among the 61 evaluation images"):
        fewshift.adapt(make_tiny(), SUPPORT, method=L2(epochs=1), validate=Support(images, labels))


def test_in_half_precision_what_can_be_trained_is_chosen_from():
    result = fewshift.adapt(make_tiny().half(), SUPPORT, method=FAST)
    assert result.gain is not None


def test_a_picture_that_is_in_the_support_twice_would_be_judged_by_who_saw_it():
    twice = Support(torch.cat([SUPPORT.images, SUPPORT.images[3:5]]), torch.cat([SUPPORT.labels, SUPPORT.labels[3:5]]))
    with pytest.raises(
        FewshiftError, match=r"support images 3 and 15 \(from 0\) are the same picture, and so are 1 more"
    ):
        fewshift.adapt(make_tiny(), twice, method=L2(epochs=1))
    assert fewshift.adapt(make_tiny(), twice, method=L2(epochs=1), validate=None).accepted


def test_one_shot_is_weak_evidence_and_says_so():
    result = fewshift.adapt(make_tiny(), make_support(1), method=FAST)
    assert "weak evidence" in result.reason
    assert result.gain.weak
    assert "classes have a single image" in result.evidence.words


def test_few_of_the_classes_are_weak_evidence():
    model = make_tiny(7)
    result = fewshift.adapt(model, SUPPORT, method=FAST)
    assert result.gain.weak
    assert result.evidence.words == "fewer than half of the classes have images: weak evidence"
    assert not fewshift.adapt(make_tiny(6), SUPPORT, method=FAST).gain.weak


def test_what_cannot_do_without_a_class_has_no_evidence():
    result = fewshift.adapt(make_tiny(), make_support(1), method=METHODS["flute"](epochs=1))
    assert result.gain is None
    assert "rejected for want of evidence: flute cannot do without the images that were held out" in result.reason
    assert not result.accepted


def test_a_changed_classifier_is_refused_though_nothing_could_be_held_out():
    # one image of a class and several of another: without it the support has a single class
    uneven = SUPPORT.part(
        torch.tensor([int((SUPPORT.labels == 0).nonzero()[0]), *(SUPPORT.labels == 2).nonzero().flatten()])
    )
    result = fewshift.adapt(make_tiny(), uneven, method=L2(epochs=1))
    assert not result.accepted


def test_unlabelled_images_alone_are_no_evidence():
    result = fewshift.adapt(make_tiny(), None, method="adabn", unlabelled=SUPPORT.images)
    assert result.gain is None
    assert result.reason == "accepted without evidence: there are no labels to judge by"


def test_pixels_are_judged_image_by_image():
    model, support = street(), scenes(4)
    result = fewshift.adapt(model, support, method=L2(epochs=1), accept="always")
    assert result.gain.images == 4
    with torch.no_grad():
        answers = model(support.images)["out"].argmax(1)
    shares = [(a == y)[y != 255].double().mean() for a, y in zip(answers, support.labels, strict=True)]
    assert result.gain.before == pytest.approx(100 * float(torch.stack(shares).mean()))


@pytest.mark.parametrize("method", [L2(epochs=1), FAST])
def test_pictures_of_different_sizes_are_judged_too(method):
    result = fewshift.adapt(street(), mixed_sizes(), method=method, accept="always")
    assert result.gain is not None
    assert result.gain.images == 3


def test_the_name_alone_chooses_by_evidence():
    result = fewshift.adapt(make_tiny(), SUPPORT)
    assert result.method == LCCS(classifier="evidence")
    assert fewshift.adapt(make_tiny(), SUPPORT, validate=None).method == LCCS()


def test_judging_changes_nothing_about_the_adapted_network():
    one = fewshift.adapt(make_tiny(), SUPPORT, method=L2(epochs=2), accept="always")
    other = fewshift.adapt(make_tiny(), SUPPORT, method=L2(epochs=2), accept="always", validate=None)
    assert all(torch.equal(it, other.model.state_dict()[name]) for name, it in one.model.state_dict().items())
    assert replace(one.gain) == one.gain

"""The recommendation: three lines for the person who decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fewshift
from fewshift import Adaptation, Support
from fewshift.report.recommendation import Advice
from fewshift.trust.evidence import Evidence
from fewshift.trust.guard import decide
from fewshift.trust.held_out import ImageAnswers
from fewshift.trust.sanity import Caution, CautionKind
from fewshift.trust.shift import Shift
from tests.helpers.networks import make_support, make_tiny

CLASSES = ("ant", "bee", "cat")
LABELS = torch.arange(3).repeat(10)
NEAR, FAR = Shift((), 1.0, 1.5, images=30, total=30), Shift((), 3.0, 1.5, images=30, total=30)


def answers(right: list[bool]) -> torch.Tensor:
    """Sure answers, wrong ones a class further."""
    return 4.0 * F.one_hot(torch.where(torch.tensor(right), LABELS, (LABELS + 1) % 3), 3).double()


def result(before: list[bool], after: list[bool], shift: Shift = FAR, **known: object) -> Adaptation:
    """An adaptation that was judged by thirty images, ten of each class in turn."""
    support = make_support(10)
    support = Support(support.images, LABELS, CLASSES)
    base = fewshift.adapt(make_tiny(), support, method="adabn", validate=None)
    held = ImageAnswers(torch.arange(30), torch.arange(30) % 3, LABELS, answers(before), answers(after))
    evidence = replace(Evidence(held.gain(), held, shift=shift), **known)
    return replace(base, evidence=evidence, verdict=decide("not-worse", evidence), classes=CLASSES)


GOOD = [True] * 27 + [False] * 3
HALF = [True] * 15 + [False] * 15


def test_a_clear_gain_is_recommended_with_its_counts():
    said = result(HALF, GOOD).recommendation
    assert said.advice is Advice.RECOMMENDED
    assert said.changed == "15 of 30 held-out images right before, 27 after"
    assert said.next == "deploy"
    assert "30 images are few" in said.sure


def test_no_gain_and_no_shift_is_not_recommended():
    said = result(GOOD, GOOD, NEAR).recommendation
    assert said.advice is Advice.AGAINST
    assert said.next.startswith("keep the old network")
    assert "like those of training" in said.next
    assert "between -" in said.sure


def test_a_class_that_falls_is_watched_and_makes_the_advice_cautious():
    before = [label != 0 and place < 12 for place, label in enumerate(LABELS.tolist())]
    before = [right or (label == 2) for right, label in zip(before, LABELS.tolist(), strict=True)]
    after = [label != 2 or place < 21 for place, label in enumerate(LABELS.tolist())]  # three of ten cats are lost
    said = result(before, after).recommendation
    assert said.advice is Advice.CAUTION
    assert "watch cat" in said.next


def test_a_class_without_images_is_named():
    said = result(HALF, [True] * 30, unseen=("dog",)).recommendation
    assert said.advice is Advice.CAUTION
    assert "nothing is known about dog" in said.next


def test_a_class_without_images_is_named_where_the_old_network_is_kept():
    said = result(GOOD, GOOD, NEAR, unseen=("dog",)).recommendation
    assert said.advice is Advice.AGAINST
    assert said.next == "keep the old network; nothing is known about dog: label some"


def test_warnings_are_to_be_read_before_labels_are_checked():
    known = result(HALF, [True] * 24 + [False] * 6)
    assert known.recommendation.next == "check 6 labels that look wrong"
    warned = replace(known, warnings=(Caution(CautionKind.SWAPPED, ("ant", "bee")),))
    assert warned.recommendation.next == "read the warnings first, and check 6 labels that look wrong"


def test_what_was_taken_without_proof_is_never_green():
    unproven = result(GOOD, GOOD, NEAR)
    taken = replace(unproven, verdict=decide("always", unproven.evidence))
    assert taken.recommendation.advice is Advice.CAUTION
    assert "judge it by other labelled images" in taken.recommendation.next


def test_a_shift_that_decides_is_said():
    silent = result([True] * 30, [True] * 30)  # neither better nor worse
    few = silent.evidence.held.part(torch.arange(6))
    evidence = replace(silent.evidence, gain=few.gain(), held=few)
    decided = replace(silent, evidence=evidence, verdict=decide("not-worse", evidence))
    assert decided.accepted
    assert "differ from those of training" in decided.recommendation.sure
    assert decided.recommendation.advice is Advice.CAUTION  # no gain was seen


def test_an_imbalance_shows_both_means():
    held = result(HALF, GOOD).evidence.held.part(torch.cat([torch.arange(0, 30, 3), torch.tensor([1, 2, 28, 29])]))
    skewed = result(HALF, GOOD)
    evidence = replace(skewed.evidence, gain=held.gain(), held=held)
    said = replace(skewed, evidence=evidence).recommendation
    assert f"{held.gain().point:+.1f} points on average over classes" in said.changed
    assert f"{held.gain().over_images:+.1f} over images" in said.changed


@pytest.mark.parametrize("accepted", [True, False])
def test_json_has_the_advice_and_its_lines(accepted):
    one = result(HALF, GOOD) if accepted else result(GOOD, HALF)
    plain = one.to_json()
    assert plain["advice"] == ("recommended" if accepted else "not recommended")
    assert plain["recommendation"] == list(one.recommendation.lines)

"""Sentences: the facts of a result appear in them, rounded as people read them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fewshift
from fewshift.report import prose
from fewshift.report.prose import times_as_likely
from fewshift.trust.calibration import Calibration, NotApplied
from fewshift.trust.evidence import Evidence, Fact, Missing, Weakness
from fewshift.trust.gain import gain_from
from fewshift.trust.guard import Rule, Strength, Verdict, decide
from fewshift.trust.held_out import ImageAnswers
from fewshift.trust.shift import LayerShift, Shift
from tests.helpers.networks import make_support, make_tiny

HELD = ImageAnswers(*(torch.zeros(1, dtype=torch.long),) * 3, *(torch.zeros(1, 3),) * 2)
CHANGE = torch.tensor([1.0, 1, 1, -1, 0, 0, 0, 0])
GAIN = gain_from(torch.arange(8), CHANGE * 0, CHANGE, CHANGE * 0)
SHIFT = Shift((), 2.0, 1.5, images=8, total=8)
EVERYTHING = Evidence(
    GAIN, HELD, weakness=Weakness.ONE_SHOT, shift=SHIFT, agreement=0.83, unseen=("otter",), new_classifier=False
)


@pytest.mark.parametrize(
    ("nats", "phrase"),
    [
        (0.0, "1.0 times as likely"),
        (math.log(2.5), "2.5 times as likely"),
        (-math.log(4), "4.0 times less likely"),
        (9999, "over 1,000 times as likely"),
    ],
)
def test_likelihoods_in_words(nats, phrase):
    assert times_as_likely(nats) == phrase


def test_a_gain_has_its_counts_and_its_interval():
    phrase = prose.gain(GAIN)
    for fact in ("8 held-out images", "3 became right", "1 became wrong", "+25.0 points"):
        assert fact in phrase
    assert f"{GAIN.low:+.1f} to {GAIN.high:+.1f}" in phrase
    twice = replace(GAIN, predictions=16)
    assert "16 held-out predictions for 8 images" in prose.gain(twice)


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (Fact.GAIN, ["+25.0 points"]),
        (Fact.WEAKNESS, ["weak evidence", "single image"]),
        (Fact.SHIFT, ["clearly unlike", "training"]),
        (Fact.AGREEMENT, ["83 %", "at most 17 points"]),
        (Fact.UNSEEN, ["no image of otter", "source's classifier was kept"]),
    ],
)
def test_every_fact_is_a_phrase_with_its_numbers(fact, words):
    phrase = prose.fact(EVERYTHING, fact)
    assert all(word in phrase for word in words)
    assert phrase in prose.facts(EVERYTHING)


@pytest.mark.parametrize("missing", Missing)
def test_missing_evidence_has_its_reason_in_the_verdict(missing):
    evidence = Evidence(None, missing=missing, method="flute", error="it needs every class")
    verdict = decide("not-worse", evidence)
    sentence = prose.reason(verdict, evidence)
    assert sentence.startswith("accepted" if verdict.accepted else "rejected")
    assert prose.missing(evidence) in sentence
    if missing is Missing.NEEDS_ALL:
        assert "flute" in sentence
        assert "it needs every class" in sentence


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict(True, Rule.ALWAYS), ["accepted", "always"]),
        (Verdict(False, Rule.CALLABLE), ["rejected", "your own condition"]),
        (Verdict(False, Rule.UNSEEN_CLASSES), ["rejected", "no image of otter"]),
        (Verdict(False, Rule.THRESHOLD, 5.0), ["rejected", "+25.0 points", "not above 5"]),
        (Verdict(True, Rule.POINT), ["accepted", "+25.0 points"]),
        (
            Verdict(True, Rule.STRENGTH, strength=Strength(2, 3, 8)),
            ["accepted", "+25.0 points", "1.0 times", "clearly unlike"],
        ),
        (Verdict(False, Rule.STRENGTH, strength=Strength(-3, None, 8)), ["rejected", "evidence is against"]),
    ],
)
def test_the_reason_names_what_decided(verdict, words):
    sentence = prose.reason(verdict, EVERYTHING)
    assert all(word in sentence for word in words)


def test_what_the_reason_says_is_not_said_again():
    result = fewshift.adapt(make_tiny(), make_support(5), method="adabn", unlabelled=make_support(3, seed=5).images)
    assert result.verdict.rule is Rule.STRENGTH
    (agreement,) = prose.other_facts(result)
    assert agreement not in result.reason
    assert "unlabelled images" in agreement
    assert prose.gain(result.gain) in result.reason


SURE = Calibration(2.0, 0.1, 0.4, 0.12, 0.15, predictions=30, loss_change=-1.0, loss_error=0.1)


def test_calibration_errors_are_in_points():
    phrase = prose.calibration(SURE)
    for fact in ("10 points apart for the source", "40 for the adapted", "30 held-out", "about 15", "2.00 makes it 12"):
        assert fact in phrase


@pytest.mark.parametrize("refused", NotApplied)
def test_a_temperature_that_is_not_applied_has_its_reason(refused):
    phrase = prose.calibration(replace(SURE, refused=refused))
    assert "no temperature was applied" in phrase
    assert "makes it" not in phrase


LAYERS = (LayerShift("bn1", 0.78, 0.47, 5.0, 1), LayerShift("bn2", 0.1, 1.0, 1.0, 2))


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (
            Shift(LAYERS, 3.6, 1.4, 5, 1500),
            ["1,500 images (5 looked at) differ", "3.6", "1.4", "'bn1'", "0.78", "0.47"],
        ),
        (Shift(LAYERS, 3.6, 1.4, 1, 1, 40), ["the image differs from the 40 of the source"]),
        (Shift(LAYERS, 0.9, 1.4, 1, 1), ["no alarm", "0.9", "one image is too few", "--source"]),
        (Shift(LAYERS, 0.9, 1.4, 7, 7), ["no alarm", "7 images are too few"]),
        (Shift(LAYERS, 0.9, 1.4, 1, 1, source_images=50), ["no alarm", "one image is too few"]),
    ],
)
def test_a_shift_says_whether_and_where(shift, words):
    phrase = prose.shift(shift)
    assert all(word in phrase for word in words)

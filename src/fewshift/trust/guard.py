"""The guard: one rule that hands over the adapted network, or keeps the source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from fewshift.errors import FewshiftError
from fewshift.trust.evidence import Evidence, Fact
from fewshift.trust.gain import Gain
from fewshift.trust.held_out import ImageAnswers
from fewshift.trust.place import NEAR
from fewshift.trust.shift import Shift

Accept = str | float | Callable[[Gain | None], bool]
ACCEPT = ("not-worse", "better", "always")
SURE = 1.28  # standard errors: chance alone exceeds them once in ten times
ALARM = 1.645  # standard errors that a shift has at its alarm, which chance raises once in twenty times
SHIFT_COUNTS = 6  # held-out images that the shift weighs as much as
MOST_SHIFT = 4.0  # standard errors that a shift counts for, at most: a larger one promises no larger gain
LACKING = 2.0  # standard errors that images of a single class of many are away, wherever they come from
SPREAD = 1.0  # nats squared that are added to the spread of a few images: tiny changes are no evidence


@dataclass(frozen=True)
class Strength:
    """How strongly two witnesses speak for an adapted network, in standard errors: 0 is silence, below is against it.

    The labels: by how much likelier the labels of held-out images are under the adapted network. Each network answers
    under its best temperature, and images are compared in pairs. The shift: by how much the images differ from those of
    training, without labels, in sampling errors of so many images. Where they do not, statistics of theirs would bring
    in more noise than they correct. A small shift asks for new statistics and not for a new head: it says nothing for
    a network that has one.

    What was learned from labels has to be better than chance makes it once in ten times. Statistics that were changed
    by no more than they are worth can do little harm: for them, more has to be said than against them, unless classes
    have a single image, or few have any.
    """

    labels: float
    shift: float | None  # None where layers cannot tell
    images: int  # that were held out
    needed: float = SURE

    @classmethod
    def of(
        cls,
        gain: Gain,
        shift: Shift | None,
        unseen: float = 0.0,
        *,
        new_head: bool = False,
        cautious: bool = False,
    ) -> Strength:
        """From a gain on held-out images, the shift of the place, and the share of classes without an image."""
        error = math.sqrt((gain.images * gain.loss_error) ** 2 + SPREAD)
        scaled = None if shift is None else ALARM * (shift.score - 1) / (shift.threshold - 1) - LACKING * unseen
        if scaled is not None and shift is not None and new_head and shift.distance < NEAR:
            scaled = min(scaled, 0.0)
        return cls(
            labels=gain.nats / error,
            shift=None if scaled is None else max(-MOST_SHIFT, min(scaled, MOST_SHIFT)),
            images=gain.images,
            needed=0.0 if cautious else SURE,
        )

    @property
    def together(self) -> float:
        """Their sum, weighted so that chance alone gives it a deviation of 1 (Stouffer's method).

        The labels weigh as many images as were held out, the shift weighs six.
        """
        if self.shift is None:
            return self.labels
        counts = SHIFT_COUNTS / (self.images + SHIFT_COUNTS)
        return math.sqrt(1 - counts) * self.labels + math.sqrt(counts) * self.shift

    @property
    def margin(self) -> float:
        """By how much they exceed what is needed."""
        return self.together - self.needed


class Rule(Enum):
    """What a verdict rests on."""

    ALWAYS = "always"
    CALLABLE = "callable"
    UNSEEN_CLASSES = "unseen classes"
    FORGOTTEN_CLASSES = "forgotten classes"
    NO_EVIDENCE = "no evidence"
    POINT = "point"  # the gain itself
    STRENGTH = "strength"
    THRESHOLD = "threshold"


@dataclass(frozen=True)
class Verdict:
    """Whether the adapted network is handed over, and by which rule."""

    accepted: bool
    rule: Rule
    threshold: float | None = None
    strength: Strength | None = None

    @property
    def against(self) -> bool:
        """Whether a rejection is due to evidence against the network, not to a lack of evidence for it."""
        return self.strength is not None and self.strength.together < -SURE

    @property
    def grounds(self) -> tuple[Fact, ...]:
        """The facts that this verdict rests on."""
        return {
            Rule.UNSEEN_CLASSES: (Fact.UNSEEN,),
            Rule.FORGOTTEN_CLASSES: (Fact.FORGOTTEN,),
            Rule.NO_EVIDENCE: (Fact.MISSING,),
            Rule.POINT: (Fact.GAIN,),
            Rule.STRENGTH: (Fact.GAIN, Fact.SHIFT)
            if self.strength and self.strength.shift is not None
            else (Fact.GAIN,),
            Rule.THRESHOLD: (Fact.GAIN,),
        }.get(self.rule, ())


def decide(accept: Accept, evidence: Evidence) -> Verdict:
    """The guard.

    - "always": whatever the evidence says.
    - "not-worse": if the evidence for it is stronger than chance makes once in ten times, or, where statistics alone
      changed, and carefully, if there is more for it than against it (see `Strength`). A gain whose whole interval is
      below zero is refused. With pixel labels an image is
      much evidence, and the share of right pixels decides. A new classifier is refused where classes have no image: it
      forgets them, and no held-out image can tell. So is a network that may lose more in classes without an image, as
      unlabelled images show, than the others gain.
    - "better": only if the whole interval is above zero.
    - a number: only if the whole interval is above it, in points of accuracy.
    - a callable: as it says of the gain.
    """
    gain = evidence.gain
    if accept == "always":
        return Verdict(True, Rule.ALWAYS)
    if callable(accept):
        return Verdict(answer_of(accept, gain), Rule.CALLABLE)
    if accept == "not-worse" and evidence.unseen and evidence.new_classifier:
        return Verdict(False, Rule.UNSEEN_CLASSES)
    if gain is None:
        return Verdict(accept == "not-worse" and not evidence.failed, Rule.NO_EVIDENCE)
    if accept == "not-worse":
        return _not_worse(gain, evidence)
    threshold = 0.0 if accept == "better" else float(accept)
    return Verdict(gain.low > threshold, Rule.THRESHOLD, threshold)


def _not_worse(gain: Gain, evidence: Evidence) -> Verdict:
    if evidence.forgone > max(0.0, gain.point * len(gain.per_class)):
        return Verdict(False, Rule.FORGOTTEN_CLASSES)
    if not isinstance(evidence.held, ImageAnswers):
        return Verdict(gain.point > 0 or (gain.point == 0 and gain.loss_change < 0), Rule.POINT)
    # images that lack classes are unlike a sample of all, wherever they come from
    unseen = len(evidence.unseen) / max(1, len(evidence.unseen) + len(gain.per_class))
    careful = evidence.cautious and evidence.weakness is None
    strength = Strength.of(gain, evidence.shift, unseen, new_head=evidence.new_classifier, cautious=careful)
    if strength.margin > 0 and gain.high < 0:
        return Verdict(False, Rule.POINT, strength=strength)
    return Verdict(strength.margin > 0, Rule.STRENGTH, strength=strength)


def check_accept(accept: Any) -> None:
    """One sentence when a condition is none."""
    known = accept in ACCEPT if isinstance(accept, str) else callable(accept)
    number = isinstance(accept, (int, float)) and not isinstance(accept, bool) and math.isfinite(accept)
    if not known and not number:
        raise FewshiftError(
            f"accept={accept!r} is no condition: give 'not-worse', 'better', 'always', a number of points or a callable"
        )


def answer_of(accept: Callable[[Gain | None], Any], gain: Gain | None) -> bool:
    """What a user's condition says of the gain, or one sentence when it fails or says neither yes nor no."""
    name = getattr(accept, "__name__", type(accept).__name__)
    unknown = "" if gain is not None else "; there is no evidence here, so the gain was None"
    try:
        answer = accept(gain)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise FewshiftError(
            f"accept={name} failed ({reason}){unknown}: make it return True or False for every gain and for None"
        ) from error
    if not isinstance(answer, (bool, np.bool_)):
        raise FewshiftError(f"accept={name} returned {answer!r}{unknown}: make it return True or False")
    return bool(answer)

"""Judging an adaptation before it is handed over: the evidence, and the guard that may keep the source network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from fewshift.core import _progress as progress
from fewshift.core.method import Composite, Fitted, Method
from fewshift.core.network import Network, like, logits_of
from fewshift.core.support import MINIBATCH, Support, Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.trust.choice import Choice, cross_validate, fit_chosen
from fewshift.trust.gain import Gain
from fewshift.trust.held_out import HeldOut, ImageAnswers, asked, folds_of
from fewshift.trust.shift import Shift, judged, look

Accept = str | float | Callable[[Gain | None], bool]
ACCEPT = ("not-worse", "better", "always")
SURE = 1.645  # standard errors: chance alone exceeds them once in twenty times
SHIFT_COUNTS = 3  # held-out images that the shift of statistics weighs as much as
MOST_SHIFT = 4.0  # standard errors that a shift counts for, at most: a larger one promises no larger gain
SPREAD = 1.0  # nats squared that are added to the spread of a few images: tiny changes are no evidence
LOOKED_AT = 256  # unlabelled images that both networks predict, at most


class Missing(Enum):
    """Why there is no evidence."""

    NOT_ASKED = "no evidence was gathered, as asked"
    NO_LABELS = "there are no labels to judge by"
    ONE_IMAGE = "a single image leaves nothing to hold out"
    NEEDS_ALL = "the method cannot do without the images that were held out"


class Weakness(Enum):
    """What is weak about held-out images."""

    ONE_SHOT = "classes have a single image"
    FEW_CLASSES = "fewer than half of the classes have images"


class Fact(Enum):
    """A fact that evidence may have: the name of its field."""

    GAIN = "gain"
    MISSING = "missing"
    WEAKNESS = "weakness"
    SHIFT = "shift"
    AGREEMENT = "agreement"
    UNSEEN = "unseen"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True)
class Evidence:
    """What images that an adaptation was not fitted to say about it."""

    gain: Gain | None
    held: HeldOut | None = None
    missing: Missing | None = None
    method: str = ""  # whose fit failed
    error: str = ""  # its sentence
    weakness: Weakness | None = None
    shift: Shift | None = None  # how far the images are from those of training
    agreement: float | None = None  # share of unlabelled images for which both networks predict the same
    unseen: tuple[str, ...] = ()  # classes without an image in the support, and so without a held-out one
    forgotten: tuple[str, ...] = ()  # those of them that unlabelled images show to be predicted far less
    forgone: float = 0.0  # points that these classes may lose, summed over them
    new_classifier: bool = False

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Which facts there are."""
        return tuple(fact for fact in Fact if getattr(self, fact.value) not in (None, ()))

    @property
    def failed(self) -> bool:
        """Whether there were labels to judge by, and still no evidence could be had."""
        return self.missing in (Missing.ONE_IMAGE, Missing.NEEDS_ALL)


def gather(
    network: Network,
    target: Target,
    method: Method,
    fitted: Fitted,
    choice: Choice | None,
    validate: str | Support | None,
    seed: int,
) -> Evidence:
    """The evidence that was asked for, and what else the adaptation shows."""
    if validate is None:
        return Evidence(None, missing=Missing.NOT_ASKED)
    if isinstance(validate, Support):
        evidence = on_labelled(network, fitted.predictor, validate)
    elif target.support is None:
        evidence = Evidence(None, missing=Missing.NO_LABELS)
    elif choice is not None and validate == "cv":
        evidence = _judged(network, target.support, choice.held)
    else:
        evidence = cross_validated(network, target, method, validate, seed)
    inside = not isinstance(validate, Support)
    return replace(
        evidence,
        shift=shift_of(network, target),
        agreement=_agreement(network, fitted.predictor, target),
        unseen=_unseen(network, target) if inside else (),
        new_classifier=_new_classifier(network, fitted.predictor),
    )


def cross_validated(network: Network, target: Target, method: Method, kind: str, seed: int) -> Evidence:
    """Adapt once for each fold, without it, and let both networks predict it."""
    support = target.need_support(method.name).checked(network.output)
    if kind == "cv" and isinstance(method, Composite):  # its candidates bring their own held-out answers
        choice = fit_chosen(network, target, method, seed)[1]
        return Evidence(None, missing=Missing.ONE_IMAGE) if choice is None else _judged(network, support, choice.held)
    folds = folds_of(support, kind, seed)
    if not folds:
        return Evidence(None, missing=Missing.ONE_IMAGE)
    try:
        held = cross_validate(network, replace(target, support=support), method, folds, seed)
    except FewshiftError as error:
        return Evidence(None, missing=Missing.NEEDS_ALL, method=method.name, error=str(error))
    return _judged(network, support, held)


def _judged(network: Network, support: Support, held: HeldOut) -> Evidence:
    weakness = _weakness(network, support)
    return Evidence(held.gain(weak=weakness is not None), held, weakness=weakness)


def _weakness(network: Network, support: Support) -> Weakness | None:
    if not support.kind.stratified:
        return None
    if support.shots < 2:
        return Weakness.ONE_SHOT
    return Weakness.FEW_CLASSES if 2 * len(support.counts) < (network.classes or 0) else None


def on_labelled(network: Network, predictor: nn.Module, labelled: Support) -> Evidence:
    """On images that took no part in the adaptation."""
    labelled = labelled.checked(network.output)
    held = asked(network.model, predictor, labelled, torch.arange(len(labelled)), 0)
    return Evidence(held.gain(), held)


def _unseen(network: Network, target: Target) -> tuple[str, ...]:
    """The classes without an image in the support."""
    support = target.support
    if support is None or network.classes is None:
        return ()
    return tuple(support.class_name(label) for label in range(network.classes) if label not in support.counts)


def _new_classifier(network: Network, predictor: nn.Module) -> bool:
    """Whether the head differs from the source's."""
    source, now = network.model.state_dict(), predictor.state_dict()
    names = [name for name in (f"{network.head}.weight", f"{network.head}.bias") if name in source]
    return not all(name in now and torch.equal(source[name], now[name]) for name in names)


def shift_of(network: Network, target: Target) -> Shift | None:
    """How far the images of the place are from those of training; None where layers cannot tell."""
    if target.unlabelled is not None:
        images = target.unlabelled
    elif target.support is not None:
        images = Unlabelled(target.support.images)
    else:
        return None
    try:
        with progress.silent():
            return judged(look(network.model, images, network.head), total=len(images))
    except FewshiftError:
        return None


@torch.no_grad()
def _agreement(network: Network, predictor: nn.Module, target: Target) -> float | None:
    """The share of unlabelled images (or of their pixels) for which both networks predict the same."""
    if target.unlabelled is None:
        return None
    places = torch.linspace(0, len(target.unlabelled) - 1, min(LOOKED_AT, len(target.unlabelled))).round().long()
    same = []
    for part in places.split(MINIBATCH):
        images = like(network.model, target.unlabelled.batch(part))
        before, after = (logits_of(model(images)).argmax(1) for model in (network.model, predictor))
        same.append((before == after).double().flatten())
    return float(torch.cat(same).mean())


@dataclass(frozen=True)
class Strength:
    """How strongly two witnesses speak for an adapted network, in standard errors: 0 is silence, below is against it.

    The labels: by how much likelier the labels of held-out images are under the adapted network. Each network answers
    under its best temperature, and images are compared in pairs. The shift: by how much the images differ from those of
    training, without labels. Where they do not, there is little to win and something to lose.
    """

    labels: float
    shift: float | None  # None where layers cannot tell
    images: int  # that were held out

    @classmethod
    def of(cls, gain: Gain, shift: Shift | None) -> Strength:
        """From a gain on held-out images, and the shift of the place."""
        error = math.sqrt((gain.images * gain.loss_error) ** 2 + SPREAD)
        scaled = None if shift is None else SURE * (shift.score - 1) / (shift.threshold - 1)
        return cls(
            labels=gain.nats / error,
            shift=None if scaled is None else max(-MOST_SHIFT, min(scaled, MOST_SHIFT)),
            images=gain.images,
        )

    @property
    def together(self) -> float:
        """Their sum, weighted so that chance alone gives it a deviation of 1 (Stouffer's method).

        The labels weigh as many images as were held out, the shift weighs three.
        """
        if self.shift is None:
            return self.labels
        counts = SHIFT_COUNTS / (self.images + SHIFT_COUNTS)
        return math.sqrt(1 - counts) * self.labels + math.sqrt(counts) * self.shift


class Rule(Enum):
    """What a verdict rests on."""

    ALWAYS = "always"
    CALLABLE = "callable"
    UNSEEN_CLASSES = "unseen classes"
    FORGOTTEN_CLASSES = "forgotten classes"
    NO_EVIDENCE = "no evidence"
    POINT = "point"  # of pixels: the mean gain itself
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
    - "not-worse": if the evidence for it is stronger than chance makes once in twenty times (see `Strength`). With
      pixel labels an image is much evidence, and the share of right pixels decides. A new classifier is refused where
      classes have no image: it forgets them, and no held-out image can tell. So is a network that may lose more in
      classes without an image, as unlabelled images show, than the others gain.
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
    # without images of a class a sample is unlike the source anyway
    strength = Strength.of(gain, None if evidence.unseen else evidence.shift)
    return Verdict(strength.together > SURE, Rule.STRENGTH, strength=strength)


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

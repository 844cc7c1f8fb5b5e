"""Evidence: what images that an adaptation was not fitted to say about it, and what else it shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn

from fewshift.core.method import Composite, Fitted, Method
from fewshift.core.network import Network, like, logits_of
from fewshift.core.support import MINIBATCH, Support, Target
from fewshift.errors import FewshiftError
from fewshift.trust.choice import Choice, cross_validate, fit_chosen
from fewshift.trust.gain import Gain
from fewshift.trust.held_out import HeldOut, asked, folds_of
from fewshift.trust.place import shift_of
from fewshift.trust.shift import Shift

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
    cautious: bool = False  # nothing but statistics changed, by no more than they are worth

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
        shift=shift_of(network, target) if choice is None else choice.shift,
        agreement=_agreement(network, fitted.predictor, target),
        unseen=_unseen(network, target) if inside else (),
        new_classifier=_new_classifier(network, fitted.predictor),
        cautious=fitted.cautious,
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

"""Judging an adaptation before it is handed over: held-out answers, and the guard that may keep the source network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core.losses import IGNORE, at_labels, cross_entropy
from fewshift.core.method import Fitted, Method
from fewshift.core.network import Network, like, logits_of
from fewshift.core.support import MINIBATCH, Support, Target
from fewshift.errors import FewshiftError
from fewshift.trust.gain import (
    CLEAR,
    SOURCE,
    Gain,
    HeldOut,
    SupportLoss,
    folds_of,
    gain_from,
    gain_of,
    gathered,
    times,
)

Accept = str | float | Callable[[Gain | None], bool]
ADAPTED = "adapted"
LOOKED_AT = 256  # unlabelled images that both networks are asked about
SINGLE = "classes have a single image, which can only be held out together with its class: weak evidence"
FEW = "fewer than half of the classes have images: weak evidence"


@dataclass(frozen=True)
class Shares:
    """With labels for pixels an image counts once: by the share of them that is right, and by their mean loss.

    Rows are images that were held out, as in `HeldOut`.
    """

    images: Tensor  # (n,) positions in the support
    folds: Tensor  # (n,)
    before: Tensor  # (n,) shares, of the source network
    after: Tensor  # (n,) of the adapted one
    loss_before: Tensor  # (n,)
    loss_after: Tensor  # (n,)

    @property
    def gain(self) -> Gain:
        """The paired difference, image by image."""
        return gain_from(self.images, self.before, self.after, self.loss_after - self.loss_before)


@dataclass(frozen=True)
class Evidence:
    """What is known about an adaptation that it was not fitted to."""

    gain: Gain | None
    held: HeldOut | Shares | None = None
    words: str = ""  # why there is none, or what is weak about it
    failed: bool = False  # it was asked for, there are labels, and still there is none
    support_loss: SupportLoss | None = None
    agreement: float | None = None  # share of unlabelled images of which both networks say the same
    unseen: tuple[str, ...] = ()  # classes without an image in the support, of which no held-out image can tell
    new_classifier: bool = False

    @property
    def facts(self) -> list[str]:
        """All that is known, each fact as a phrase."""
        found = [] if self.gain is None else [self.gain.words]
        if self.words:
            found.append(self.words)
        if self.support_loss is not None:
            found.append(self.support_loss.words)
        if self.agreement is not None:
            same = f"on unlabelled images {100 * self.agreement:.0f} % of the predictions stay the same"
            found.append(f"{same}, so accuracy there changes by {100 * (1 - self.agreement):.0f} points at most")
        if self.unseen:
            kept = "their classifier was changed unseen" if self.new_classifier else "the source's classifier was kept"
            found.append(f"the support has no image of {', '.join(self.unseen)}: {kept}")
        return found


def gather(
    network: Network, target: Target, method: Method, fitted: Fitted, validate: str | Support | None, seed: int
) -> Evidence:
    """The evidence that was asked for, and what else the adaptation shows."""
    found = _held_out(network, target, method, fitted, validate, seed)
    if validate is None:
        return found
    inside = not isinstance(validate, Support)
    return replace(
        found,
        support_loss=fitted.support_loss if inside else None,
        agreement=_agreement(network, fitted.predictor, target),
        unseen=_unseen(network, target) if inside else (),
        new_classifier=_new_classifier(network, fitted.predictor),
    )


def _held_out(
    network: Network, target: Target, method: Method, fitted: Fitted, validate: str | Support | None, seed: int
) -> Evidence:
    if isinstance(validate, Support):
        return on_labelled(network, fitted.predictor, validate)
    if validate is None:
        return Evidence(None, words="nothing was held out, as asked (validate=None)")
    if target.support is None:
        return Evidence(None, words="there are no labels to judge by")
    if fitted.held is not None and validate == "cv":
        return own_evidence(network, fitted, target.support)
    return cross_validated(network, target, method, validate, seed)


def cross_validated(network: Network, target: Target, method: Method, kind: str, seed: int) -> Evidence:
    """Adapt once for each fold, without it, and ask both networks about it."""
    support = target.need_support(method.name).checked(network.output)
    folds = folds_of(support, kind, seed)
    if not folds:
        return Evidence(None, words="a single image leaves nothing to hold out", failed=True)
    words = _weakness(network, support)

    def adapted(kept: Support) -> nn.Module:
        return method.fit(seen_by(network, kept), replace(target, support=kept), seed).predictor

    try:
        if not support.kind.centroids:
            shares = _of_pixels(network, support.splits(folds), folds, adapted)
            return Evidence(shares.gain, shares, words)
        held = gathered(
            support,
            folds,
            lambda kept, out: {SOURCE: answers(network.model, out), ADAPTED: answers(adapted(kept), out)},
        )
    except FewshiftError as error:
        words = f"{method.name} cannot do without the images that were held out ({error})"
        return Evidence(None, words=words, failed=True)
    held = replace(held, adapted=held.candidates[ADAPTED])
    return Evidence(gain_of(held, weak=bool(words)), held, words)


def seen_by(network: Network, support: Support) -> Network:
    """The view for a part of a support: scenes may differ in size, and the answer to the first has another shape."""
    if support.kind.centroids:
        return network
    return Network.of(network.model, support.images[0][None], network.head)


def own_evidence(network: Network, fitted: Fitted, support: Support) -> Evidence:
    """From the held-out answers that a method made for its own choices."""
    assert fitted.held is not None  # who calls this asks before
    words = _weakness(network, support)
    return Evidence(gain_of(fitted.held, weak=bool(words)), fitted.held, words)


def _weakness(network: Network, support: Support) -> str:
    """What is weak about held-out images of this support; nothing if it is empty."""
    if not support.kind.centroids:
        return ""
    if support.shots < 2:
        return SINGLE
    return FEW if 2 * len(support.counts) < (network.classes or 0) else ""


def on_labelled(network: Network, predictor: nn.Module, labelled: Support) -> Evidence:
    """On images that took no part in the adaptation."""
    labelled = labelled.checked(network.output)
    if not labelled.kind.centroids:
        alone = torch.arange(len(labelled)).split(1)
        shares = _of_pixels(network, [(labelled, labelled.part(it)) for it in alone], alone, lambda _: predictor)
        return Evidence(shares.gain, shares)
    source, adapted = answers(network.model, labelled), answers(predictor, labelled)
    places = torch.arange(len(labelled))
    held = HeldOut(labelled.targets.cpu(), places, places * 0, source.cpu().double(), adapted.cpu().double())
    return Evidence(gain_of(held), held)


@torch.no_grad()
def answers(model: nn.Module, images: Support) -> Tensor:
    """Logits, one row for each image."""
    return torch.cat([logits_of(model(like(model, part))) for part, _ in images.chunks(MINIBATCH)])


@torch.no_grad()
def _of_pixels(
    network: Network,
    parts: Sequence[tuple[Support, Support]],
    folds: Sequence[Tensor],
    adapted: Callable[[Support], nn.Module],
) -> Shares:
    """Ask the source network and the adapted ones about every part, image by image."""
    rows: list[list[float]] = []
    for kept, out in parts:
        predictor = adapted(kept)
        for images, labels in out.chunks(1):
            logits = [at_labels(logits_of(model(like(model, images))), labels) for model in (network.model, predictor)]
            right = [(it.argmax(1) == labels)[labels != IGNORE].double().mean().item() for it in logits]
            loss = [float(cross_entropy(it, labels)) for it in logits]
            rows.append(right + loss)
    numbers = torch.cat([torch.full((len(fold),), number) for number, fold in enumerate(folds)])
    return Shares(torch.cat(list(folds)), numbers, *torch.tensor(rows, dtype=torch.float64).unbind(1))


def _unseen(network: Network, target: Target) -> tuple[str, ...]:
    """The classes of which the support has no image."""
    support = target.support
    if support is None or network.classes is None:
        return ()
    return tuple(support.class_name(it) for it in range(network.classes) if it not in support.counts)


def _new_classifier(network: Network, predictor: nn.Module) -> bool:
    """Whether the head differs from the source's."""
    source, now = network.model.state_dict(), predictor.state_dict()
    names = [it for it in (f"{network.head}.weight", f"{network.head}.bias") if it in source]
    return not all(name in now and torch.equal(source[name], now[name]) for name in names)


@torch.no_grad()
def _agreement(network: Network, predictor: nn.Module, target: Target) -> float | None:
    """How often both networks say the same about unlabelled images (or their pixels), if there are any."""
    if target.unlabelled is None:
        return None
    places = torch.linspace(0, len(target.unlabelled) - 1, min(LOOKED_AT, len(target.unlabelled))).round().long()
    same = []
    for part in places.split(MINIBATCH):
        images = like(network.model, target.unlabelled.batch(part))
        said = [logits_of(it(images)).argmax(1) for it in (network.model, predictor)]
        same.append((said[0] == said[1]).double().flatten(1 if said[0].dim() > 1 else 0).flatten())
    return float(torch.cat(same).mean())


@dataclass(frozen=True)
class Verdict:
    """Whether the adapted network is handed over, and why."""

    accepted: bool
    reason: str


def decide(accept: Accept, evidence: Evidence) -> Verdict:
    """The guard.

    - "always": whatever the evidence says.
    - "not-worse": only if something speaks for it and nothing against it, see `_not_worse`. A new classifier is refused
      where classes have no image: it forgets them, and no held-out image can tell.
    - "better": only if the whole interval is above zero.
    - a number: only if the whole interval is above it, in points of accuracy.
    - a callable: as it says of the gain.
    """
    gain = evidence.gain
    if accept == "always":
        return Verdict(True, "accepted without a condition, as asked (accept='always')")
    if callable(accept):
        said = bool(accept(gain))
        return Verdict(said, f"{'accepted' if said else 'rejected'} by the condition that was given")
    if accept == "not-worse" and evidence.unseen and evidence.new_classifier:
        names = ", ".join(evidence.unseen)
        return Verdict(False, f"rejected: the classifier was changed and the support has no image of {names}")
    if gain is None:
        accepted = accept == "not-worse" and not evidence.failed
        how = "accepted without" if accepted else "rejected for want of"
        return Verdict(accepted, f"{how} evidence: {evidence.words}")
    if accept == "not-worse":
        return _not_worse(gain, evidence)
    least = 0.0 if accept == "better" else float(accept)
    enough = gain.low > least
    relation = "above" if enough else "not above"
    return Verdict(enough, f"{_word(enough)}: {gain.words}, {relation} {least:g}")


def _not_worse(gain: Gain, evidence: Evidence) -> Verdict:
    """The source network is known and the adapted one is not: something has to speak for it, and nothing against it.

    Accuracies of a few dozen images say little, so the labels' likelihood counts as well, on held-out images and under
    the one number with which statistics are blended. With pixel labels an image is much evidence, and shares decide.
    """
    if isinstance(evidence.held, Shares):
        accepted = gain.point > 0 or (gain.point == 0 and gain.loss_change < 0)
        return Verdict(accepted, f"{_word(accepted)}: {gain.words}")
    blend = evidence.support_loss
    up = gain.low > 0
    # without images to object, one nat for each: the statistics were made of the very images that are asked about
    enough = float(max(CLEAR, gain.images)) if gain.weak else CLEAR
    for_it = up or gain.nats > enough or (blend is not None and blend.nats > enough)
    against = not up and not gain.weak and (gain.high < 0 or gain.nats < -CLEAR)
    facts = f"{gain.words}; their labels are {times(gain.nats)} likely"
    if blend is not None:
        facts += f"; {blend.words}"
    if gain.weak:
        facts += f"; {evidence.words}, so that a nat for each image is asked for"
    verdict = "that speaks against the adapted network" if against else "nothing speaks clearly for the adapted network"
    accepted = for_it and not against
    return Verdict(accepted, f"{_word(accepted)}: {facts}" + ("" if accepted else f": {verdict}"))


def _word(accepted: bool) -> str:
    return "accepted" if accepted else "rejected"


def check_accept(accept: Any) -> None:
    """One sentence when a condition is none."""
    known = accept in ("always", "not-worse", "better") if isinstance(accept, str) else callable(accept)
    number = isinstance(accept, (int, float)) and not isinstance(accept, bool) and math.isfinite(accept)
    if not known and not number:
        raise FewshiftError(
            f"accept={accept!r} is no condition: give 'not-worse', 'better', 'always', a number of points or a callable"
        )

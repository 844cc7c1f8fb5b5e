"""Judging an adaptation before it is handed over: held-out answers, and the guard that may keep the source network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.evidence import SOURCE, Gain, HeldOut, folds_of, gain_from, gain_of, gathered, splits
from fewshift.losses import IGNORE, at_labels, cross_entropy
from fewshift.method import Fitted, Method
from fewshift.network import Network, like, logits_of
from fewshift.target import MINIBATCH, Support, Target

Accept = str | float | Callable[[Gain | None], bool]
ADAPTED = "adapted"


@dataclass(frozen=True)
class Evidence:
    """What is known about an adaptation that it was not fitted to."""

    gain: Gain | None
    held: HeldOut | None = None
    words: str = ""  # why there is none, or what is weak about it


def gather(
    network: Network, target: Target, method: Method, fitted: Fitted, validate: str | Support | None, seed: int
) -> Evidence:
    """The evidence that was asked for."""
    if isinstance(validate, Support):
        return on_labelled(network, fitted.predictor, validate)
    if validate is None:
        return Evidence(None, words="nothing was held out, as asked (validate=None)")
    if target.support is None:
        return Evidence(None, words="there are no labels to judge by")
    if fitted.held is not None and validate == "cv":
        return own_evidence(fitted, target.support)
    return cross_validated(network, target, method, validate, seed)


def cross_validated(network: Network, target: Target, method: Method, kind: str, seed: int) -> Evidence:
    """Adapt once for each fold, without it, and ask both networks about it."""
    support = target.need_support(method.name).checked(network.output)
    folds = folds_of(support, kind, seed)
    if not folds:
        return Evidence(None, words="a single image leaves nothing to hold out")
    weak = not support.dense and support.shots < 2
    words = "classes have a single image: it was held out while its class was not adapted to" if weak else ""

    def adapted(kept: Support) -> nn.Module:
        return method.fit(network, replace(target, support=kept), seed).predictor

    try:
        if support.dense:
            return Evidence(_of_pixels(network, splits(support, folds), folds, adapted), words=words)
        held = gathered(
            support,
            folds,
            lambda kept, out: {SOURCE: answers(network.model, out), ADAPTED: answers(adapted(kept), out)},
        )
    except FewshiftError as error:
        return Evidence(None, words=f"{method.name} cannot do without the images that were held out ({error})")
    held = replace(held, adapted=held.candidates[ADAPTED])
    return Evidence(gain_of(held, weak=weak), held, words)


def own_evidence(fitted: Fitted, support: Support) -> Evidence:
    """From the held-out answers that a method made for its own choices."""
    assert fitted.held is not None  # adapt asks
    weak = support.shots < 2
    words = "classes have a single image: it was held out while its class was not adapted to" if weak else ""
    return Evidence(gain_of(fitted.held, weak=weak), fitted.held, words)


def on_labelled(network: Network, predictor: nn.Module, labelled: Support) -> Evidence:
    """On images that took no part in the adaptation."""
    labelled = labelled.checked(network.output)
    if labelled.dense:
        alone = torch.arange(len(labelled)).split(1)
        return Evidence(
            _of_pixels(network, [(labelled, labelled.part(it)) for it in alone], alone, lambda _: predictor)
        )
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
) -> Gain:
    """With labels for pixels an image counts once, by the share of its pixels that is right."""
    rows: list[tuple[float, float, float]] = []
    for kept, out in parts:
        predictor = adapted(kept)
        for images, labels in out.chunks(1):
            logits = [at_labels(logits_of(model(like(model, images))), labels) for model in (network.model, predictor)]
            right = [(it.argmax(1) == labels)[labels != IGNORE].double().mean().item() for it in logits]
            loss = [float(cross_entropy(it, labels)) for it in logits]
            rows.append((right[0], right[1], loss[1] - loss[0]))
    before, after, loss_change = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return gain_from(torch.cat(list(folds)), before, after, loss_change)


@dataclass(frozen=True)
class Verdict:
    """Whether the adapted network is handed over, and why."""

    accepted: bool
    reason: str


def decide(accept: Accept, evidence: Evidence, absent: Sequence[str] = ()) -> Verdict:
    """The guard.

    - "always": whatever the evidence says.
    - "not-worse": unless the evidence is against it.
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
    if gain is None:
        if accept == "not-worse":
            return Verdict(True, f"accepted without evidence: {evidence.words}")
        return Verdict(False, f"rejected for want of evidence: {evidence.words}")
    if accept == "not-worse":
        return _not_worse(gain, absent)
    least = 0.0 if accept == "better" else float(accept)
    enough = gain.low > least
    relation = "above" if enough else "not above"
    return Verdict(enough, f"{_word(enough)}: {gain.words}, {relation} {least:g}")


def _not_worse(gain: Gain, absent: Sequence[str]) -> Verdict:
    against = gain.point < 0 or (gain.point == 0 and gain.loss_change > 0)
    return Verdict(not against, f"{_word(not against)}: {gain.words}")


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

"""Choosing between candidates: each says what it thinks of images that it was not fitted to, and their labels judge.

A method fits; it does not judge itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core._progress import Stage
from fewshift.core.method import Composite, Fitted, Method, Proposals
from fewshift.core.network import Network
from fewshift.core.support import FOLDS, Support, Target
from fewshift.errors import DivergedError
from fewshift.trust.gain import by_image, standard_error
from fewshift.trust.held_out import HeldOut, ImageAnswers, answered, answers, asked
from fewshift.trust.place import NEAR, shift_of
from fewshift.trust.shift import Shift
from fewshift.trust.suspects import suspected

USUAL_SUPPORT = 30  # images, where a guess is needed

MOST_SUSPECTED = 0.3  # of the labels: with more, only what needs them least is taken
CLEARLY = 2.3  # standard errors by which labels have to prefer another candidate near the source; elsewhere one


@dataclass(frozen=True)
class Choice:
    """The answers of candidates to the same held-out images, and the candidate that was chosen."""

    answers: Mapping[str, HeldOut]  # by candidate, the one that learns most from labels first
    chosen: str
    allowed: tuple[str, ...]  # the candidates that the settings let be chosen, in the same order
    decisive: bool = True  # whether these images may overrule the preference
    large: tuple[str, ...] = ()  # the candidates that change more than BatchNorm and the head
    doubtful: bool = False  # whether too many labels look wrong to learn from
    shift: Shift | None = None  # of the place; None where layers cannot tell

    @classmethod
    def of(
        cls,
        answers: Mapping[str, HeldOut],
        allowed: Sequence[str] | None = None,
        *,
        decisive: bool = True,
        shift: Shift | None = None,
    ) -> Choice:
        """Choose one of the allowed candidates; without `allowed`, of all.

        Far from the source that is the first, which learns most from labels, unless another is better. Near it, it is
        the last, unless another is clearly better. If too many labels look wrong, it is the last.
        """
        names = tuple(name for name in answers if allowed is None or name in allowed)
        if decisive and suspected(list(answers.values())) > MOST_SUSPECTED:
            return cls(answers, names[-1], names, decisive, doubtful=True, shift=shift)
        choice = cls(answers, names[0], names, decisive, shift=shift)
        return replace(choice, chosen=choice.preferred() if decisive else choice.ranked[0])

    @property
    def near(self) -> bool:
        """Whether the place is so near the source that little is to be learnt from a few labels; pixels are many."""
        few = isinstance(self.answers[self.chosen], ImageAnswers)
        return few and self.shift is not None and self.shift.distance < NEAR

    @property
    def ranked(self) -> tuple[str, ...]:
        """The allowed candidates, the one first that is taken where held-out images have no say."""
        return self.allowed[::-1] if self.near else self.allowed

    def preferred(self, rows: Tensor | None = None) -> str:
        """The candidate that these held-out answers choose; by default all of them."""
        return choose({name: self.answers[name] for name in self.ranked}, rows, CLEARLY if self.near else 1.0)

    @property
    def held(self) -> HeldOut:
        """For each fold, the answers of the candidate that all other images choose.

        These are honest about the choice: no image helps to choose the candidate that predicts it.
        """
        result = self.answers[self.chosen]
        if not self.decisive or self.doubtful or len(self.allowed) == 1:
            return result
        for fold in result.folds.unique().tolist():
            mine = result.folds == fold
            foreign = (~torch.isin(result.images, result.images[mine])).nonzero().flatten()
            result = result.answered_by(self.answers[self.preferred(foreign)], mine)
        return result


def choose(answers: Mapping[str, HeldOut], rows: Tensor | None = None, errors: float = 1.0) -> str:
    """The first candidate, unless another is better by more than so many standard errors of the difference.

    Better is a smaller cross-entropy on held-out images, each candidate under its best temperature. The smallest of
    several losses is small by luck as much as by merit: with a few dozen images, every draw has another winner.
    """
    parts = answers if rows is None else {name: held.part(rows) for name, held in answers.items()}
    losses = {name: held.losses for name, held in parts.items()}
    finite = {name: rows for name, rows in losses.items() if torch.isfinite(rows).all()} or losses
    first, best = next(iter(finite)), min(finite, key=lambda name: float(finite[name].mean()))
    change = by_image(parts[first].images, losses[best] - losses[first])
    return best if float(change.mean()) < -errors * standard_error(change) else first


def stages_of(method: Method, validate: Any, *, twice: bool) -> list[Stage]:
    """Fitting a method and judging it, by what they cost relative to each other; `twice` if all is done again."""
    others = {"cv": FOLDS - 1, "loo": USUAL_SUPPORT}.get(validate, 0) if isinstance(validate, str) else 0
    if isinstance(method, Composite) and validate == "cv":  # held out while it is fitted
        others = 0
    return [Stage("fitting", 1), Stage("cross-validation", others), Stage("judging", 0.05)] * (2 if twice else 1)


def fit_chosen(network: nn.Module | Network, target: Target, method: Method, seed: int) -> tuple[Fitted, Choice | None]:
    """Fit a method; of a composite one, the candidate that held-out images choose."""
    if not isinstance(method, Composite):
        return method.fit(network, target, seed), None
    network = Network.of(network, target.some_images(method.name, "support images"))
    support = target.need_support(method.name).checked(network.output)
    with progress.plan(method.stages(support)):
        return _chosen(network, replace(target, support=support), support, method, seed)


def _chosen(
    network: Network, target: Target, support: Support, method: Composite, seed: int
) -> tuple[Fitted, Choice | None]:
    proposals = method.proposals(network, target, seed)
    candidates = {candidate.name: candidate for candidate in proposals.candidates}
    allowed = [name for name, candidate in candidates.items() if method.allows(candidate)]
    if not proposals.folds:
        return candidates[allowed[0]].fit(), None
    choice = Choice.of(
        _answers(network, support, proposals, allowed),
        allowed,
        decisive=proposals.decisive,
        shift=shift_of(network, target),
    )
    large = tuple(name for name in choice.answers if not candidates[name].small)
    return candidates[choice.chosen].fit(), replace(choice, large=large)


def _answers(network: Network, support: Support, proposals: Proposals, allowed: Sequence[str]) -> dict[str, HeldOut]:
    """What each candidate says of images that it was not fitted to; one that goes astray without them is left out."""
    images = torch.cat(list(proposals.folds))
    folds = torch.cat([torch.full((len(fold),), number) for number, fold in enumerate(proposals.folds)])
    held = support.part(images)
    source = answers(network.model, held)
    result: dict[str, HeldOut] = {}
    refused: DivergedError | None = None
    for candidate in proposals.candidates:
        try:
            logits = candidate.held_out()
            result[candidate.name] = answered(held, images, folds, source, [logits[place] for place in images])
        except DivergedError as error:
            refused = error
    if refused is not None and not any(name in result for name in allowed):
        raise refused
    return result


def cross_validate(network: Network, target: Target, method: Method, folds: Sequence[Tensor], seed: int) -> HeldOut:
    """Adapt once for each fold, without it, and ask both networks about it."""
    support = target.need_support(method.name)
    adapted = adapted_to(network, target, method, seed)
    parts: list[HeldOut] = []
    splits = list(zip(support.splits(folds), folds, strict=True))
    for number, ((kept, held), positions) in enumerate(progress.track(splits, "cross-validation")):
        with progress.silent():  # each fold is one step
            parts.append(asked(network.model, adapted(kept), held, positions, number))
    return parts[0].joined(parts[1:])


def adapted_to(network: Network, target: Target, method: Method, seed: int) -> Callable[[Support], nn.Module]:
    """A function that adapts the network to a part of the support."""
    return lambda part: fit_chosen(seen_by(network, part), replace(target, support=part), method, seed)[0].predictor


def seen_by(network: Network, support: Support) -> Network:
    """The view for a part of a support: scenes may differ in size, and so does the shape of their output."""
    if len(network.output) > 1:
        return Network.of(network.model, support.images[0][None], network.head)
    return network

"""Choosing between candidates: each is adapted without some images, and those judge.

A method fits; it does not judge itself. Candidates of a composite method share the stages they have in common, within
each fold and in the final fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.method import Composite, Fitted, Method
from fewshift.core.network import Network
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError
from fewshift.trust.gain import by_image, standard_error
from fewshift.trust.held_out import HeldOut, asked, folds_of


@dataclass(frozen=True)
class Choice:
    """The answers of candidates to the same held-out images, and the candidate that was chosen."""

    answers: Mapping[str, HeldOut]  # by candidate, the preferred one first
    chosen: str

    @property
    def held(self) -> HeldOut:
        """For each fold, the answers of the candidate that all other images choose.

        These are honest about the choice: no image helps to choose the candidate that predicts it.
        """
        result = next(iter(self.answers.values()))
        for fold in result.folds.unique().tolist():
            mine = result.folds == fold
            foreign = (~torch.isin(result.images, result.images[mine])).nonzero().flatten()
            result = result.answered_by(self.answers[choose(self.answers, foreign)], mine)
        return result


def choose(answers: Mapping[str, HeldOut], rows: Tensor | None = None) -> str:
    """The first candidate, unless another is better by more than the standard error of the difference.

    Better is a smaller cross-entropy on held-out images, each candidate under its best temperature. The smallest of
    several losses is small by luck as much as by merit: with a few dozen images, every draw has another winner.
    """
    parts = answers if rows is None else {name: held.part(rows) for name, held in answers.items()}
    losses = {name: held.losses for name, held in parts.items()}
    first, best = next(iter(losses)), min(losses, key=lambda name: float(losses[name].mean()))
    change = by_image(parts[first].images, losses[best] - losses[first])
    return best if float(change.mean()) < -standard_error(change) else first


def fit_chosen(network: nn.Module | Network, target: Target, method: Method, seed: int) -> tuple[Fitted, Choice | None]:
    """Fit a method; of a composite one, the candidate that held-out images choose."""
    if not isinstance(method, Composite):
        return method.fit(network, target, seed), None
    network = Network.of(network, target.some_images(method.name, "support images"))
    support = target.need_support(method.name).checked(network.output)
    names, folds = method.candidates(network, target), folds_of(support, "cv", seed)
    fit = method.fits(network, target, seed)
    if len(names) == 1 or not folds:
        return fit(names[0]), None
    choice = cross_validate(network, replace(target, support=support), method, folds, seed)
    return fit(choice.chosen), choice


def cross_validate(network: Network, target: Target, method: Method, folds: Sequence[Tensor], seed: int) -> Choice:
    """Adapt once for each fold, without it, and ask every candidate about it."""
    support = target.need_support(method.name)
    names = method.candidates(network, target) if isinstance(method, Composite) else (method.name,)
    answers: dict[str, list[HeldOut]] = {name: [] for name in names}
    splits = list(zip(support.splits(folds), folds, strict=True))
    for number, ((kept, held), positions) in enumerate(progress.track(splits, "cross-validation")):
        with progress.silent():  # each fold is one step
            fit = _fit_by_name(seen_by(network, kept), replace(target, support=kept), method, seed)
            for name in list(answers):
                try:
                    adapted = fit(name)
                except FewshiftError:
                    if len(answers) == 1:
                        raise
                    del answers[name]  # a candidate has to be fitted without every fold
                    continue
                answers[name].append(asked(network.model, adapted.predictor, held, positions, number))
    joined = {name: first.joined(others) for name, (first, *others) in answers.items()}
    return Choice(joined, choose(joined))


def _fit_by_name(network: Network, target: Target, method: Method, seed: int) -> Callable[[str], Fitted]:
    if isinstance(method, Composite):
        return method.fits(network, target, seed)
    return lambda _: fit_chosen(network, target, method, seed)[0]


def adapted_to(network: Network, target: Target, method: Method, seed: int) -> Callable[[Support], nn.Module]:
    """A function that adapts the network to a part of the support."""
    return lambda part: fit_chosen(seen_by(network, part), replace(target, support=part), method, seed)[0].predictor


def seen_by(network: Network, support: Support) -> Network:
    """The view for a part of a support: scenes may differ in size, and so does the shape of their output."""
    if len(network.output) > 1:
        return Network.of(network.model, support.images[0][None], network.head)
    return network

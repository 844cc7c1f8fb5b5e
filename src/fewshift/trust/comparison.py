"""Which method? Several of them on the same held-out images, compared image by image.

All methods are adapted to the same parts of the support and predict the same images, so how hard an image is cancels in
the difference of two methods. One of several methods is always ahead, partly by chance, so its gain is too good:
`selected_gain` says what choosing by a rule is worth.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fewshift.core import _progress as progress
from fewshift.core.method import Composite, Method, Needs
from fewshift.core.network import Network
from fewshift.core.support import FOLDS, Support, Target
from fewshift.errors import FewshiftError
from fewshift.methods.source import Source
from fewshift.trust.choice import fit_chosen
from fewshift.trust.evidence import Evidence, cross_validated, on_labelled
from fewshift.trust.gain import Gain
from fewshift.trust.guard import decide
from fewshift.trust.held_out import HeldOut, folds_of
from fewshift.trust.place import shift_of

SOURCE = "source"  # the network as it came
RULES = ("best", "clear")
LOOKING = 4.0  # passes over the support that it takes to see how far its images are from those of training
ASKING = 2.0  # passes in which both networks answer


@dataclass(frozen=True)
class Row:
    """One method: its name among the others, and what is known about it."""

    label: str
    method: Method
    evidence: Evidence
    seconds: float

    @property
    def gain(self) -> Gain | None:
        """Over the source network; None where the method failed."""
        return self.evidence.gain

    @property
    def accuracy(self) -> float | None:
        """Percent of the held-out images that are right, or of their pixels."""
        return None if self.gain is None else self.gain.after

    @property
    def accepted(self) -> bool:
        """Whether `adapt` would hand it over."""
        return decide("not-worse", self.evidence).accepted

    @property
    def cross_entropy(self) -> float | None:
        """On held-out images, under the best temperature; of pixels without one."""
        return None if self.evidence.held is None else float(self.evidence.held.losses.mean())


@dataclass(frozen=True)
class Ranking:
    """Several methods on the same held-out images. The source network is among them, named or not."""

    rows: tuple[Row, ...]  # in the order in which the methods were named
    source: Row
    select: str | None

    @property
    def judged(self) -> tuple[Row, ...]:
        """The rows that have numbers."""
        return tuple(row for row in self.rows if row.gain is not None)

    @property
    def ranked(self) -> tuple[Row, ...]:
        """The rows that have numbers: highest accuracy first, then lowest cross-entropy."""
        return tuple(sorted(self.judged, key=lambda row: (-(row.accuracy or 0.0), row.cross_entropy or 0.0)))

    @property
    def weak(self) -> bool:
        """Whether the held-out images are weak evidence."""
        return self.source.gain is not None and self.source.gain.weak

    def difference(self, first: str, second: str) -> Gain:
        """How much more `first` has right than `second`: wins are predictions that only `first` has right."""
        return self._held(first).against(self._held(second)).gain(weak=self.weak)

    @cached_property
    def differences(self) -> dict[str, dict[str, Gain]]:
        """Every method against every other."""
        labels = [row.label for row in self.judged]
        return {one: {other: self.difference(one, other) for other in labels if other != one} for one in labels}

    @cached_property
    def selected(self) -> str | None:
        """The label of the method that the rule takes; None without a rule, or where it has nothing to take from."""
        return None if self.select is None else self._taken(torch.arange(len(self._held(SOURCE).images)))

    @cached_property
    def selected_gain(self) -> Gain | None:
        """What selecting by the rule is worth: each image is predicted by the method that the other folds select.

        The gain of the winner itself is too good, because the same images made it the winner.
        """
        if self.select is None or not self.judged:
            return None
        held = self._held(SOURCE)
        # labelled images apart from the support are one fold; any cut will do
        folds = held.folds if len(held.folds.unique()) > 1 else held.images % FOLDS
        parts = []
        for fold in folds.unique().tolist():
            mine = folds == fold
            foreign = ~torch.isin(held.images, held.images[mine])
            if not foreign.any():
                return None
            parts.append(self._held(str(self._taken(foreign))).part(mine))
        return parts[0].joined(parts[1:]).gain(weak=self.weak)

    def _taken(self, rows: Tensor) -> str | None:
        """What the rule takes, by these rows alone."""
        parts = {row.label: self._held(row.label).part(rows) for row in self.judged}
        losses = {label: float(part.losses.mean()) for label, part in parts.items()}
        best = min(losses, key=losses.__getitem__, default=None)
        if self.select == "best" or best == SOURCE:
            return best
        if best is None:
            return SOURCE
        evidence = next(row.evidence for row in self.judged if row.label == best)
        judged = replace(evidence, gain=parts[best].gain(), held=parts[best])
        return best if decide("not-worse", judged).accepted else SOURCE

    def _held(self, label: str) -> HeldOut:
        """The held-out answers of a method, or one sentence when there are none."""
        known = {SOURCE: self.source} | {row.label: row for row in self.rows}
        if label not in known:
            raise FewshiftError(f"'{label}' was not compared: choose one of {', '.join(known)}")
        held = known[label].evidence.held
        if held is None:
            why = known[label].evidence.error or "nothing could be held out"
            raise FewshiftError(f"{label} has no numbers ({why}): choose another")
        return held


def rank(
    network: Network,
    target: Target,
    methods: Sequence[Method],
    validate: str | Support,
    seed: int,
    listener: progress.Listener | None = None,
) -> tuple[tuple[Row, ...], Row]:
    """A row for each method, and the source network's."""
    labels = labelled(methods)
    costs = [ASKING + method.cost * _fits(method, target, validate) for method in labels.values()]

    def row(label: str, method: Method) -> Row:
        began = time.perf_counter()
        with progress.told_to(listener and _naming(label, listener)):
            evidence = replace(judge(network, target, method, validate, seed), shift=shift)
        return Row(label, method, evidence, time.perf_counter() - began)

    with progress.plan([("images", LOOKING), ("methods", sum(costs))]):
        shift = shift_of(network, target)
        with progress.told_to(listener):
            rows = {label: row(label, labels[label]) for label in progress.track(list(labels), "methods", costs)}
    return tuple(rows.values()), rows[SOURCE] if SOURCE in rows else row(SOURCE, Source())


def _fits(method: Method, target: Target, validate: str | Support) -> int:
    """How often a method is fitted to be judged."""
    if isinstance(validate, Support) or target.support is None:
        return 1
    if validate == "loo":
        return len(target.support)
    return 1 if isinstance(method, Composite) else FOLDS


def _naming(label: str, listener: progress.Listener) -> progress.Listener:
    """A listener that hears the method's name too."""
    return lambda what, done, total: listener(f"{label}: {what}", done, total)


def judge(network: Network, target: Target, method: Method, validate: str | Support, seed: int) -> Evidence:
    """What held-out images say about a method, or why they say nothing."""
    try:
        if isinstance(validate, Support):
            return on_labelled(network, fit_chosen(network, target, method, seed)[0].predictor, validate)
        evidence = cross_validated(network, target, method, validate, seed)
        if evidence.gain is None:
            method.fit(network, target, seed)  # if it cannot do with all images either, the reason is another
    except FewshiftError as error:
        return Evidence(None, error=str(error))
    return evidence


def comparable(methods: Sequence[Method]) -> None:
    """One sentence when methods cannot be compared."""
    if not methods:
        raise FewshiftError("there is nothing to compare: name at least one method")
    for place, method in enumerate(methods):
        if method.needs is Needs.STREAM:
            raise FewshiftError(
                f"{method.name} adapts to a stream of batches while it predicts, so no image can be held out: "
                "leave it out"
            )
        if method in methods[:place]:
            raise FewshiftError(f"{method.name} is named twice with the same settings: name it once")


def labelled(methods: Sequence[Method]) -> Mapping[str, Method]:
    """A label for each method: its name, and where several share it, the settings in which they differ."""
    labels: dict[str, Method] = {}
    for method in methods:
        alike = [other.settings() for other in methods if other.name == method.name]
        apart = [
            f"{key}={value}"
            for key, value in method.settings().items()
            if any(settings.get(key) != value for settings in alike)
        ]
        labels[f"{method.name} ({', '.join(apart)})" if apart else method.name] = method
    return labels


def check_labels(network: Network, target: Target, validate: str | Support, seed: int) -> None:
    """One sentence when labels do not fit the network, or leave nothing to hold out: then every method would fail."""
    support = None if target.support is None else target.support.checked(network.output)
    if isinstance(validate, Support):
        validate.checked(network.output)
    elif support is not None and not folds_of(support, validate, seed):
        raise FewshiftError(
            "a single image leaves nothing to hold out: label another, or pass labelled images as validate"
        )

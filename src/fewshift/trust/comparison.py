"""Which method? Several of them on the same held-out images, compared image by image.

All are adapted to the same parts of the support and asked about the same images, so what an image is worth cancels in
the difference of two methods. Of several methods one is always ahead, and its gain is then too good by what chance has
added to it: whoever chooses by a rule is told what choosing by that rule is worth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.api import INSIDE, fitting, labelled_apart, method_of, moved, recommended
from fewshift.core import _progress as progress_
from fewshift.core.labels import Augment
from fewshift.core.losses import Loss, cross_entropy
from fewshift.core.method import Method, Needs
from fewshift.core.network import Network
from fewshift.core.randomness import checked_seed
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError
from fewshift.images import Preprocess
from fewshift.images.inputs import as_support, as_unlabelled
from fewshift.methods.lccs import LCCS
from fewshift.methods.source import Source
from fewshift.trust.gain import FOLDS, LEVEL, SOURCE, Gain, HeldOut, folds_of, gain_of, log_losses
from fewshift.trust.guard import Evidence, Shares, cross_validated, on_labelled, own_evidence

SELECT = ("best", "clear")
Held = HeldOut | Shares  # answers about classes, or about pixels


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
    def cross_entropy(self) -> float | None:
        """On held-out images, under the temperature that suits them best; of pixels as it is."""
        return None if self.evidence.held is None else float(_losses(self.evidence.held).mean())

    @property
    def reason(self) -> str | None:
        """Why there are no numbers."""
        return self.evidence.words if self.gain is None else None


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same held-out images. The source network is among them, named or not."""

    rows: tuple[Row, ...]  # in the order in which the methods were named
    source: Row
    select: str | None
    validate: str  # "cv", "loo" or "labelled images"
    network: str
    support: Support | None
    seed: int
    seconds: float

    @property
    def judged(self) -> tuple[Row, ...]:
        """Those that have numbers."""
        return tuple(it for it in self.rows if it.gain is not None)

    def difference(self, first: str, second: str) -> Gain:
        """How much more `first` has right than `second`: wins are predictions that only `first` has right."""
        one, other = self._held(first), self._held(second)
        return _gain(_against(one, other), weak=self.weak)

    @cached_property
    def differences(self) -> dict[str, dict[str, Gain]]:
        """Every method against every other."""
        labels = [it.label for it in self.judged]
        return {one: {other: self.difference(one, other) for other in labels if other != one} for one in labels}

    @property
    def weak(self) -> bool:
        """Whether classes have a single image, which cannot be held out and adapted to."""
        return self.source.gain is not None and self.source.gain.weak

    @property
    def dense(self) -> bool:
        """Whether every pixel has a label of its own."""
        return isinstance(self.source.evidence.held, Shares)

    @property
    def ranked(self) -> tuple[Row, ...]:
        """Those that have numbers, the highest accuracy first, of equals the lower cross-entropy."""
        return tuple(sorted(self.judged, key=lambda it: (-(it.accuracy or 0.0), it.cross_entropy or 0.0)))

    @cached_property
    def words(self) -> str:
        """Which method leads, and whether it is clearly ahead."""
        if not self.judged:
            return "no method could be judged: " + "; ".join(f"{it.label}: {it.reason}" for it in self.rows)
        first, *others = self.ranked
        gain = first.gain
        assert gain is not None  # as of all that are judged
        kind = "labelled" if self.validate not in INSIDE else "held-out"
        what = f"{'the pixels of ' if self.dense else ''}{gain.images} {kind} images"
        ahead = [] if first.label == SOURCE else [self._ahead(first.label, SOURCE, f"the {SOURCE}")]
        if others and others[0].label != SOURCE:
            ahead.append(self._ahead(first.label, others[0].label, f"{others[0].label}, the next"))
        elif others:
            ahead[-1:] = [self._ahead(first.label, SOURCE, f"the {SOURCE}, the next")]
        verdict = f": {'; '.join(ahead)}" if ahead else ""
        weak = f" ({self.source.evidence.words})" if self.weak else ""
        return f"{first.label} leads with {gain.after:.1f} % of {what} right{verdict}{weak}"

    def _ahead(self, first: str, second: str, name: str) -> str:
        gain = self.difference(first, second)
        how = "clearly ahead of" if gain.low > 0 else "not clearly ahead of" if gain.point >= 0 else "behind"
        return f"{how} {name} ({gain.point:+.1f} points, {_interval(gain)})"

    # selection

    @property
    def rule(self) -> str | None:
        """How a method was selected, in one sentence."""
        tempered = "" if self.dense else ", each under its best temperature"
        least = f"the method with the least cross-entropy on held-out images{tempered} (of equals the one named first)"
        clear = (
            f", if the whole {100 * LEVEL:.0f} % interval of its gain is above zero, and the source network otherwise"
        )
        return {None: None, "best": least, "clear": least + clear}[self.select]

    @cached_property
    def selected(self) -> str | None:
        """The label of the method that the rule takes; None without a rule, or where it has nothing to take from."""
        return None if self.select is None else self._taken(torch.arange(len(self._held(SOURCE).images)))

    @cached_property
    def selected_gain(self) -> Gain | None:
        """What selecting by the rule is worth: each image is answered by the method that the other folds take.

        The gain of the winner itself is too good, because the same images made it the winner.
        """
        if self.select is None or not self.judged:
            return None
        held = self._held(SOURCE)
        # labelled images of one's own are one fold, and may be cut at will
        folds = held.folds if len(held.folds.unique()) > 1 else held.images % FOLDS
        parts = []
        for fold in folds.unique().tolist():
            mine = folds == fold
            foreign = ~torch.isin(held.images, held.images[mine])
            if not foreign.any():
                return None
            parts.append(_part(self._held(str(self._taken(foreign))), mine))
        return _gain(_joined(parts), weak=self.weak)

    def _taken(self, rows: Tensor) -> str | None:
        """What the rule takes, by these rows alone."""
        parts = {it.label: _part(self._held(it.label), rows) for it in self.judged}
        losses = {label: float(_losses(part).mean()) for label, part in parts.items()}
        best = min(losses, key=losses.__getitem__, default=None)
        if self.select == "best" or best == SOURCE:
            return best
        return best if best is not None and _gain(parts[best]).low > 0 else SOURCE

    def _held(self, label: str) -> Held:
        """The held-out answers of a method, or one sentence when there are none."""
        known = {SOURCE: self.source} | {it.label: it for it in self.rows}
        if label not in known:
            raise FewshiftError(f"'{label}' was not compared: choose one of {', '.join(known)}")
        held = known[label].evidence.held
        if held is None:
            raise FewshiftError(f"{label} has no numbers ({known[label].reason}): choose another")
        return held

    # for people

    def table(self) -> list[dict[str, str]]:
        """One row for each method, as words; numbers are in `rows` and `to_json`."""
        return [_cells(it) for it in self.rows]

    def picture(self) -> str:
        """The gains with their intervals as one SVG; empty where no method could be judged."""
        from fewshift.report import figures

        gains = {it.label: it.gain for it in self.judged if it.gain is not None}
        if not gains:
            return ""
        told = "; ".join(
            f"{label}: {gain.point:+.1f}, {_interval(gain)}" for label, gain in gains.items() if label != SOURCE
        )
        return figures.gains(
            {label: (it.point, *((0.0, 0.0) if label == SOURCE else (it.low, it.high))) for label, it in gains.items()},
            label="gain over the source, points of accuracy",
            key="gains",
            alt=f"Gain over the source network on held-out images, in points of accuracy. {told or 'No other method'}.",
        )

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page: table, picture, every difference."""
        from fewshift.report import comparison_page

        return comparison_page(self, path)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        return {
            "words": self.words,
            "validate": self.validate,
            "rows": [
                {
                    "label": it.label,
                    "method": it.method.name,
                    "settings": it.method.settings(),
                    "accuracy": it.accuracy,
                    "cross_entropy": it.cross_entropy,
                    "gain": _plain(it.gain),
                    "reason": it.reason,
                    "seconds": it.seconds,
                }
                for it in self.rows
            ],
            "differences": {
                one: {other: _plain(gain) for other, gain in row.items()} for one, row in self.differences.items()
            },
            "select": self.select,
            "rule": self.rule,
            "selected": self.selected,
            "selected_gain": _plain(self.selected_gain),
            "seed": self.seed,
            "seconds": self.seconds,
        }


def compare(
    model: nn.Module,
    support: Any,
    methods: Sequence[str | Method | type[Method]] = ("source", "adabn", "lp-ft", "lccs"),
    *,
    unlabelled: Any = None,
    loss: Loss | None = None,
    preprocess: Preprocess | Callable[[Any], Tensor] | None = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    head: str | None = None,
    validate: Any = "cv",
    select: str | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: progress_.Listener | None = None,
) -> Comparison:
    """Judge several methods on the same images, none of which had seen the image it is asked about.

    `methods` are names or methods; the name "lccs" alone, cross-validated, stands for LCCS(classifier="evidence"), as
    in `adapt`, which takes the other arguments in the same forms. `validate` is "cv", "loo", or labelled images of the
    place that are not in the support: then every method is fitted once, to all of the support.

    `select` is a rule to choose a method by: "best" takes the least held-out cross-entropy, "clear" does so only if the
    method is clearly ahead of the source network, which it takes otherwise. A method that fails has a row that says
    why.
    """
    began = time.perf_counter()
    if select not in (None, *SELECT):
        raise FewshiftError(f"select={select!r} is no rule: choose 'best', 'clear' or None")
    inside = isinstance(validate, str) and validate in INSIDE
    if validate is None or (isinstance(validate, str) and not inside and not Path(validate).exists()):
        raise FewshiftError(
            f"validate={validate!r} is neither a way nor a folder: choose 'cv' or 'loo', or give labelled images"
        )
    checked_seed(seed)
    chosen = _labelled(_methods(methods, by_evidence=inside and validate == "cv"))
    if support is None and inside:
        raise FewshiftError("methods are compared by labels: pass a support set, or labelled images as validate")
    target = Target(
        None if support is None else as_support(support, preprocess, augment, classes),
        as_unlabelled(unlabelled, preprocess, augment),
        loss or cross_entropy,
    )
    for label, method in chosen.items():
        if method.needs is Needs.UNLABELLED:
            target.need_unlabelled(label)
    network, target = fitting(model, target, target.some_images("a comparison", "target images"), head)
    given = validate if inside else labelled_apart(validate, preprocess, target, classes)
    network = network if device is None else moved(network, device)
    _check_labels(network, target, given, seed)

    def judge(label: str, method: Method) -> Row:
        start = time.perf_counter()
        with progress_.told_to(progress and _naming(label, progress)):
            evidence = _evidence(network, target, method, given, seed)
        return Row(label, method, evidence, time.perf_counter() - start)

    with progress_.told_to(progress):
        rows = {label: judge(label, chosen[label]) for label in progress_.track(list(chosen), "methods")}
    return Comparison(
        rows=tuple(rows.values()),
        source=rows[SOURCE] if SOURCE in rows else judge(SOURCE, Source()),
        select=select,
        validate=validate if inside else "labelled images",
        network=type(model).__name__,
        support=target.support,
        seed=seed,
        seconds=time.perf_counter() - began,
    )


def _naming(label: str, listener: progress_.Listener) -> progress_.Listener:
    """A listener that is told the method too."""
    return lambda what, done, total: listener(f"{label}: {what}", done, total)


def _methods(given: Sequence[str | Method | type[Method]], *, by_evidence: bool) -> list[Method]:
    """The methods that are meant, or one sentence when they cannot be compared."""
    if isinstance(given, str):
        raise FewshiftError(f"methods={given!r} is one word: give a list of names")
    methods = [recommended(it) if by_evidence else method_of(it) for it in given]
    if not methods:
        raise FewshiftError("there is nothing to compare: name at least one method")
    for place, method in enumerate(methods):
        if method.needs is Needs.STREAM:
            raise FewshiftError(
                f"{method.name} adapts to a stream of batches while it predicts, so that no image can be held out: "
                "leave it out"
            )
        if method in methods[:place]:
            raise FewshiftError(f"{method.name} is named twice with the same settings: name it once")
    return methods


def _labelled(methods: Sequence[Method]) -> dict[str, Method]:
    """A name for each method: its own, and where several share it, the settings that tell them apart."""
    found: dict[str, Method] = {}
    for method in methods:
        alike = [it.settings() for it in methods if it.name == method.name]
        apart = {key: value for key, value in method.settings().items() if any(it.get(key) != value for it in alike)}
        told = ", ".join(f"{key}={value}" for key, value in apart.items())
        found[f"{method.name} ({told})" if told else method.name] = method
    return found


def _check_labels(network: Network, target: Target, validate: str | Support, seed: int) -> None:
    """One sentence when labels do not fit the network, or leave nothing to hold out: no method could help it."""
    support = None if target.support is None else target.support.checked(network.output)
    if isinstance(validate, Support):
        validate.checked(network.output)
    elif support is not None and not folds_of(support, validate, seed):
        raise FewshiftError(
            "a single image leaves nothing to hold out: label another, or pass labelled images as validate"
        )


def _evidence(network: Network, target: Target, method: Method, validate: str | Support, seed: int) -> Evidence:
    """What held-out images say about a method, or why they say nothing."""
    try:
        if isinstance(validate, Support):
            return on_labelled(network, method.fit(network, target, seed).predictor, validate)
        if _judges_itself(method, target, validate):
            return own_evidence(network, method.fit(network, target, seed), target.need_support(method.name))
        found = cross_validated(network, target, method, validate, seed)
        if found.gain is None:
            method.fit(network, target, seed)  # if it cannot do with all images either, the reason is another
    except FewshiftError as error:
        return Evidence(None, words=str(error))
    return found


def _judges_itself(method: Method, target: Target, validate: str) -> bool:
    """Whether the fit to the whole support comes with held-out answers on the folds of `validate`."""
    images = target.support is not None and target.support.kind.centroids
    return isinstance(method, LCCS) and method.classifier == "evidence" and validate == "cv" and images


# answers to held-out images: of one comparison all are of one kind


def _gain(held: Held, *, weak: bool = False) -> Gain:
    return gain_of(held, weak=weak) if isinstance(held, HeldOut) else held.gain


def _losses(held: Held) -> Tensor:
    return log_losses(held.adapted, held.labels) if isinstance(held, HeldOut) else held.loss_after


def _against(held: Held, other: Held) -> Held:
    """The same answers, with another method's in place of the source network's."""
    if isinstance(held, HeldOut):
        assert isinstance(other, HeldOut)
        return replace(held, source=other.adapted)
    assert isinstance(other, Shares)
    return replace(held, before=other.after, loss_before=other.loss_after)


def _part(held: Held, rows: Tensor) -> Held:
    return _made(held, lambda name: getattr(held, name)[rows])


def _joined(parts: Sequence[Held]) -> Held:
    return _made(parts[0], lambda name: torch.cat([getattr(it, name) for it in parts]))


def _made(held: Held, column: Callable[[str], Tensor]) -> Held:
    """The same kind of answers with other columns, and without the candidates of a single method."""
    kind: Any = type(held)
    made: Held = kind(**{it.name: column(it.name) for it in fields(held) if it.name != "candidates"})
    return made


# words


def _cells(row: Row) -> dict[str, str]:
    gain, same = row.gain, row.label == SOURCE
    loss = row.cross_entropy
    return {
        "method": row.label,
        "right, %": "-" if gain is None else f"{gain.after:.1f}",
        "gain": "-" if gain is None or same else f"{gain.point:+.1f}",
        f"{100 * LEVEL:.0f} % interval": "-" if gain is None or same else f"{gain.low:+.1f} to {gain.high:+.1f}",
        "became right": "-" if gain is None or same else str(gain.wins),
        "became wrong": "-" if gain is None or same else str(gain.losses),
        "cross-entropy": "-" if loss is None else f"{loss:.3f}",
        "seconds": f"{row.seconds:.1f}",
    }


def _interval(gain: Gain) -> str:
    return f"{100 * LEVEL:.0f} % interval {gain.low:+.1f} to {gain.high:+.1f}"


def _plain(gain: Gain | None) -> dict[str, Any] | None:
    """For JSON, which knows no infinity."""
    if gain is None:
        return None
    return {key: None if value == math.inf else value for key, value in asdict(gain).items()}

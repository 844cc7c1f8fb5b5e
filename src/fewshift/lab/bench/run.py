"""Running a cell: draw the support, adapt, predict the stream, count."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fewshift import __version__
from fewshift.api import Adaptation, adapt
from fewshift.core import metrics
from fewshift.core.method import Method, Needs
from fewshift.core.network import channels_last, like, logits_of
from fewshift.core.support import Support, Target, Unlabelled, draw_support, others
from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.flaws import Drawn, spoilt
from fewshift.lab.bench.scenes import Scenery, run_scenes
from fewshift.methods.catalog import METHODS

TEST_SEED = 0  # of the cap on test images: the same images for every seed of the support
GAIN = ("point", "low", "high", "images", "predictions", "wins", "losses", "weak", "nats", "loss_change", "loss_error")
AT_ONCE = 16  # images a plain network predicts together: what fits into a processor's cache is fastest


class Images(Protocol):
    """A domain: labelled images that are decoded when asked for."""

    labels: Tensor
    classes: tuple[str, ...]
    skip_rare: bool  # classes with fewer images than shots take no part in the support, instead of being refused

    def images(self, indices: Tensor) -> Tensor:
        """The images at `indices`, as one tensor."""

    def batches(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of one batch of indices after the other."""


@dataclass(frozen=True)
class Judged:
    """What an adaptation was worth, in its own eyes and in truth: both networks about the same images."""

    facts: dict[str, Any]
    source: Tensor  # probabilities, a row for each image of the test set
    candidate: Tensor


@dataclass(frozen=True)
class Answers:
    """What a fitted method says about images, and what it noted and cost."""

    probabilities: Tensor  # a row for each image of the stream, or of the test set
    support_probabilities: Tensor | None  # of the images that were left out for the support's sake
    notes: dict[str, Any]
    layers: dict[str, dict[str, Any]]
    seconds: dict[str, float]
    judged: Judged | None = None


@dataclass
class Workshop:
    """What cells share: every network and domain is loaded once, and cells that differ in the stream share a fit."""

    load_network: Callable[[Cell], nn.Module]
    load_domain: Callable[[Cell], Images]
    load_scenery: Callable[[Cell], Scenery | None] = lambda _: None
    _kept: dict[tuple[str, ...], Any] = field(default_factory=dict)
    _answers: tuple[str, Answers] | None = None  # the newest alone: a sweep brings such cells one after the other

    def network(self, cell: Cell) -> nn.Module:
        """The source network of a cell."""
        found: nn.Module = self._once(("network", cell.dataset, cell.source), self.load_network, cell)
        return found

    def domain(self, cell: Cell) -> Images:
        """The target domain of a cell."""
        # the source too: its card says how images are preprocessed
        found: Images = self._once(("domain", cell.dataset, cell.target, cell.source), self.load_domain, cell)
        return found

    def scenery(self, cell: Cell) -> Scenery | None:
        """The target of a cell whose pixels have labels; None for others."""
        found: Scenery | None = self._once(("scenery", cell.dataset, cell.target, cell.source), self.load_scenery, cell)
        return found

    def answers(self, cell: Cell, make: Callable[[], Answers]) -> Answers:
        """Those of the cell before, if it differs from this one in nothing but the stream."""
        if self._answers is None or self._answers[0] != cell.fit_key:
            self._answers = cell.fit_key, make()
        return self._answers[1]

    def source_answers(self, cell: Cell, indices: Tensor, ask: Callable[[Tensor], Tensor]) -> Tensor:
        """A row for each image of a cell's domain, `ask`ed for once: most test images are those of other cells too."""
        known: dict[int, Tensor] = self._kept.setdefault(("answers", cell.dataset, cell.target, cell.source), {})
        new = [it for it in indices.tolist() if it not in known]
        if new:
            known.update(zip(new, ask(torch.tensor(new)), strict=True))
        return torch.stack([known[it] for it in indices.tolist()])

    def _once(self, key: tuple[str, ...], load: Callable[[Cell], Any], cell: Cell) -> Any:
        if key not in self._kept:
            self._kept[key] = load(cell)
        return self._kept[key]


def run(cell: Cell, workshop: Workshop) -> dict[str, Any]:
    """The result of one experiment as plain numbers: scores, counts, what was drawn, what it cost."""
    network, method = workshop.network(cell), cell.build()
    scenery = workshop.scenery(cell)
    if scenery is not None:
        if cell.flaw or cell.validate:
            raise FewshiftError(f"{cell.dataset} has labels for pixels: leave flaw and validate out")
        return run_scenes(cell, method, network, scenery) | {"versions": versions()}
    domain = workshop.domain(cell)
    labels, classes = domain.labels, len(domain.classes)
    left_out, test = split(domain, cell)
    order = cell.condition.indices(labels[test], cell.seed, classes)
    drawn, given = _drawn(domain, method, cell)
    task = _Task(cell, method, network, domain, drawn, given, left_out)

    if sees_stream(method, drawn):
        answers = _answers(task, [test[batch] for batch in order.split(cell.condition.batch_size)])
        probabilities = answers.probabilities
    else:
        at_once = test.split(AT_ONCE)
        answers = workshop.answers(
            cell, lambda: _judged(task, at_once, workshop) if cell.validate else _answers(task, at_once)
        )
        probabilities = answers.probabilities[order]

    truth = labels[test[order]]
    counts = metrics.tally(truth, probabilities.argmax(1), classes)
    return {
        **_scores(counts),
        **_f1_beside(counts, answers.support_probabilities, labels, left_out),
        "calibration_error": metrics.calibration_error(probabilities, truth),
        "tally": counts.tolist(),
        "classes": list(domain.classes),
        "support": drawn.tolist(),
        **({"support_labels": given.tolist()} if cell.flaw else {}),
        **({"trust": _trust(answers.judged, probabilities, order, truth)} if answers.judged else {}),
        "realised_counts": truth.bincount(minlength=classes).tolist(),
        "notes": answers.notes,
        "layers": answers.layers,
        "seconds": answers.seconds,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What the result was made with."""
    return {"fewshift": __version__, "torch": torch.__version__, "python": platform.python_version()}


def split(domain: Images, cell: Cell) -> tuple[Tensor, Tensor]:
    """The largest support of this seed, and the images that every row is judged on: all others, capped if asked."""
    labels = domain.labels
    largest = draw_support(labels, cell.largest_support, cell.seed, domain.classes, skip_rare=domain.skip_rare)
    test = others(largest, len(labels))
    if cell.max_test is None or cell.max_test >= len(test):
        return largest, test
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(TEST_SEED))
    allowed = torch.zeros(len(labels), dtype=torch.bool)
    allowed[test] = True
    return largest, order[allowed[order]][: cell.max_test].sort().values


def sees_stream(method: Method, drawn: Tensor) -> bool:
    """Whether the predictor depends on which test images come, and in which order."""
    if method.needs is Needs.EITHER:
        return not len(drawn)
    return method.needs in (Needs.STREAM, Needs.UNLABELLED)


def _drawn(domain: Images, method: Method, cell: Cell) -> Drawn:
    """Where the support lies in its domain, and its labels, spoilt if that was asked for."""
    if cell.shots is None:
        if method.needs is Needs.SUPPORT:
            raise FewshiftError(f"{method.name} needs labelled images: give the row shots")
        if cell.flaw or cell.validate:
            raise FewshiftError("there is no support to spoil or to judge by: give the row shots")
        nothing = torch.empty(0, dtype=torch.long)
        return nothing, nothing
    if cell.shots > cell.largest_support:
        raise FewshiftError(f"{cell.shots} shots are more than are left out: set largest_support to {cell.shots}")
    drawn = draw_support(domain.labels, cell.shots, cell.seed, domain.classes, skip_rare=domain.skip_rare)
    labels = domain.labels[drawn]
    return spoilt(drawn, labels, cell.flaw, len(domain.classes), cell.seed) if cell.flaw else (drawn, labels)


@dataclass(frozen=True)
class _Task:
    """A cell with all that is needed to answer it."""

    cell: Cell
    method: Method
    network: nn.Module
    domain: Images
    drawn: Tensor
    given: Tensor  # the labels of what was drawn
    left_out: Tensor

    def support(self) -> Support | None:
        if not len(self.drawn):
            return None
        return Support(self.domain.images(self.drawn), self.given, self.domain.classes)

    def left_out_answers(self, predictor: nn.Module, stream: Sequence[Tensor]) -> Tensor | None:
        """About what the test set lacks, where it lacks nothing else: for the scores that count the support in."""
        if sum(map(len, stream)) + len(self.left_out) < len(self.domain.labels):
            return None
        return _probabilities(predictor, self.domain.batches(self.left_out.split(len(stream[0]))))


def _answers(task: _Task, stream: Sequence[Tensor]) -> Answers:
    """Fit, predict the stream, and after it the images that were left out, for the scores that count them in."""
    unlabelled = None
    if sees_stream(task.method, task.drawn):
        unlabelled = Unlabelled(_Lazy(task.domain, torch.cat(list(stream))))
    target = Target(task.support(), unlabelled)
    began = time.perf_counter()
    fitted = task.method.fit(task.network, target, task.cell.seed)
    adapted = time.perf_counter()
    predictor = fitted.predictor.to(memory_format=torch.channels_last)
    probabilities = _probabilities(predictor, task.domain.batches(stream))
    ended = time.perf_counter()
    notes = _small(fitted.notes) | _small(getattr(predictor, "record", {}))
    return Answers(
        probabilities,
        task.left_out_answers(predictor, stream),
        notes,
        _layers(fitted.layers),
        {"adapt": adapted - began, "predict": ended - adapted},
    )


def _judged(task: _Task, stream: Sequence[Tensor], workshop: Workshop) -> Answers:
    """Adapt as a user would, guard and all, and answer with what was handed over."""
    support = task.support()
    began = time.perf_counter()
    result = adapt(task.network, support, method=task.method, validate=task.cell.validate, seed=task.cell.seed)
    adapted = time.perf_counter()
    source = METHODS["source"]().adapt(task.network, Target()).to(memory_format=torch.channels_last)

    def asked(indices: Tensor) -> Tensor:
        return _probabilities(source, task.domain.batches(indices.split(AT_ONCE)))

    before = workshop.source_answers(task.cell, torch.cat(list(stream)), asked)
    candidate = result.candidate.to(memory_format=torch.channels_last)
    after = before if _same(candidate, source) else _probabilities(candidate, task.domain.batches(stream))
    ended = time.perf_counter()
    return Answers(
        after if result.accepted else before,
        task.left_out_answers(candidate if result.accepted else source, stream),
        _small(result.notes),
        _layers({it.name: it.details for it in result.layers if it.details}),
        {"adapt": adapted - began, "predict": ended - adapted},
        Judged(_facts(result), before, after),
    )


def _facts(result: Adaptation) -> dict[str, Any]:
    """The verdict and what it rests on, as plain numbers and words."""
    gain = None if result.gain is None else {name: getattr(result.gain, name) for name in GAIN}
    return {
        "gain": gain and {name: it if math.isfinite(it) else None for name, it in gain.items()},
        "accepted": result.accepted,
        "reason": result.reason,
        "support_nats": None if result.evidence.support_loss is None else result.evidence.support_loss.nats,
        "classifier": result.notes.get("classifier"),
    }


def _trust(judged: Judged, returned: Tensor, order: Tensor, truth: Tensor) -> dict[str, Any]:
    """What was said of the adaptation, beside the accuracies of all three networks on the test images."""
    answers = {"source": judged.source[order], "candidate": judged.candidate[order], "returned": returned}
    right = {name: float((it.argmax(1) == truth).double().mean()) for name, it in answers.items()}
    return judged.facts | {"accuracy": right}


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two networks have the same tensors, so that there is nothing to ask the second."""
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(tensor, its[name]) for name, tensor in mine.items())


@torch.no_grad()
def _probabilities(predictor: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    return torch.cat([logits_of(predictor(like(predictor, channels_last(it)))).double().softmax(1) for it in batches])


@dataclass(frozen=True)
class _Lazy:
    domain: Images
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Tensor:
        return self.domain.images(self.indices[index : index + 1])[0]


def _scores(counts: Tensor) -> dict[str, float]:
    return {
        "accuracy": metrics.accuracy(counts),
        "macro_recall": metrics.macro_recall(counts),
        "macro_f1": metrics.macro_f1(counts),
    }


def _f1_beside(counts: Tensor, answers: Tensor | None, labels: Tensor, left_out: Tensor) -> dict[str, float]:
    """Macro-F1 over the classes there were before the support was taken out, and with the support counted in."""
    found = {"macro_f1_fixed": metrics.macro_f1(counts, labels.unique())}
    if answers is not None:
        both = counts + metrics.tally(labels[left_out], answers.argmax(1), len(counts))
        found["macro_f1_with_support"] = metrics.macro_f1(both)
    return found


def _small(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes without long lists: a record is a line."""
    return {key: value for key, value in notes.items() if not isinstance(value, (list, dict)) or len(value) <= 20}


def _layers(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per layer the numbers, and of lists the first two: the weights of the source's and the support's statistics."""
    return {
        name: {
            key: [round(it, 6) for it in value[:2]] if isinstance(value, list) else round(value, 6)
            for key, value in details.items()
            if isinstance(value, (int, float, list))
        }
        for name, details in layers.items()
    }

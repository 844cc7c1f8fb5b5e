"""Running a cell: draw the support, adapt, predict the stream, count."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.api import adapt
from fewshift.core.draws import draw_support, others
from fewshift.core.labels import IMAGES
from fewshift.core.layout import fastest_layout, laid_out, with_layout
from fewshift.core.method import Method, Needs
from fewshift.core.metrics import Predicted, scores
from fewshift.core.network import like, logits_of
from fewshift.core.support import Support, Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.damage import Drawn, damaged
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.provenance import made_by
from fewshift.lab.bench.scenes import capped, in_precision, run_scenes, short_notes
from fewshift.lab.datasets.domain import Domain
from fewshift.methods.catalog import METHODS
from fewshift.report.results import Adaptation
from fewshift.trust.choice import fit_chosen
from fewshift.trust.leaks import repeats

GAIN = ("point", "low", "high", "images", "predictions", "wins", "losses", "weak", "nats", "loss_change", "loss_error")
AT_ONCE = 16  # images a plain network predicts together: what fits into a processor's cache is fastest


@dataclass(frozen=True)
class JudgedAdaptation:
    """An adaptation's own verdict, and the probabilities of both networks for every test image."""

    facts: dict[str, Any]
    source: Tensor
    candidate: Tensor


@dataclass(frozen=True)
class Answers:
    """The predictions of a fitted method, its notes and its cost."""

    probabilities: Tensor  # a row for each image of the stream, or of the test set
    support_probabilities: Tensor | None  # of the images that are left out of the test set for the support's sake
    notes: dict[str, Any]
    layers: dict[str, dict[str, Any]]
    seconds: dict[str, float]
    judged: JudgedAdaptation | None = None


def run(cell: Cell, materials: Materials) -> dict[str, Any]:
    """The result of one experiment as plain numbers: scores, counts, the support, the cost."""
    network, method = materials.network(cell), cell.build()
    scenes = materials.scenes(cell)
    if scenes is not None:
        if cell.damage or cell.validate:
            raise FewshiftError(f"{cell.dataset} has labels for pixels: leave damage and validate out")
        return run_scenes(cell, method, network, scenes) | made_by(network)
    domain = materials.domain(cell)
    labels, classes = domain.labels, len(domain.classes)
    left_out, test = split(domain, cell)
    order = cell.condition.indices(labels[test], cell.seed, classes)
    drawn, drawn_labels = _drawn(domain, method, cell)
    task = _Task(cell, method, network, domain, drawn, drawn_labels, left_out)

    if sees_stream(method, drawn):
        answers = _answers(task, [test[batch] for batch in order.split(cell.condition.batch_size)])
        probabilities = answers.probabilities
    else:
        at_once = test.split(AT_ONCE)
        answers = materials.shared_fit(
            cell, lambda: _judged(task, at_once, materials) if cell.validate else _answers(task, at_once)
        )
        probabilities = answers.probabilities[order]

    truth = labels[test[order]]
    tally = IMAGES.tally(truth, probabilities.argmax(1), classes)
    support = answers.support_probabilities
    support_tally = None if support is None else IMAGES.tally(labels[left_out], support.argmax(1), classes)
    return {
        **scores(Predicted(tally, probabilities, truth, labels.unique(), support_tally), IMAGES.unit),
        "tally": tally.tolist(),
        "classes": list(domain.classes),
        "support": drawn.tolist(),
        **({"support_labels": drawn_labels.tolist()} if cell.damage else {}),
        **({"trust": _trust(answers.judged, probabilities, order, truth)} if answers.judged else {}),
        "realised_counts": truth.bincount(minlength=classes).tolist(),
        "notes": answers.notes,
        "layers": answers.layers,
        "seconds": answers.seconds,
        **made_by(network),
    }


def split(domain: Domain, cell: Cell) -> tuple[Tensor, Tensor]:
    """The largest support of this seed, and the test images of every row: all others, up to `max_test`."""
    labels = domain.labels
    largest = draw_support(labels, cell.largest_support, cell.seed, domain.classes, skip_rare=domain.skip_rare)
    return largest, capped(others(largest, len(labels)), len(labels), cell.max_test)


def sees_stream(method: Method, drawn: Tensor) -> bool:
    """Whether the predictor depends on the test images and their order."""
    if method.needs is Needs.EITHER:
        return not len(drawn)
    return method.needs in (Needs.STREAM, Needs.UNLABELLED)


def _drawn(domain: Domain, method: Method, cell: Cell) -> Drawn:
    """The positions of the support in its domain, and its labels; damaged if the cell says so."""
    if cell.shots is None:
        if method.needs is Needs.SUPPORT:
            raise FewshiftError(f"{method.name} needs labelled images: give the row shots")
        if cell.damage or cell.validate:
            raise FewshiftError("there is no support to damage or to judge by: give the row shots")
        nothing = torch.empty(0, dtype=torch.long)
        return nothing, nothing
    if cell.shots > cell.largest_support:
        raise FewshiftError(
            f"{cell.shots} shots exceed largest_support = {cell.largest_support}: set it to {cell.shots}"
        )
    drawn = draw_support(domain.labels, cell.shots, cell.seed, domain.classes, skip_rare=domain.skip_rare)
    labels = domain.labels[drawn]
    return damaged(drawn, labels, cell.damage, len(domain.classes), cell.seed) if cell.damage else (drawn, labels)


@dataclass(frozen=True)
class _Task:
    """A cell with its method, network and images."""

    cell: Cell
    method: Method
    network: nn.Module
    domain: Domain
    drawn: Tensor
    drawn_labels: Tensor
    left_out: Tensor

    @cached_property
    def layout(self) -> torch.memory_format:
        """How passes over test images are fastest."""
        images = self.domain.images(self.left_out[:1])
        return fastest_layout(self.network, like(self.network, images))

    def support(self) -> Support | None:
        if not len(self.drawn):
            return None
        support = Support(self.domain.images(self.drawn), self.drawn_labels, self.domain.classes)
        if not self.cell.validate:
            return support
        # data sets have pictures twice, and no network may judge one that it has seen: what a user is told to do
        again = [index for _, index in repeats(support)]
        return support.part(others(torch.tensor(again, dtype=torch.long), len(support)))

    def unlabelled(self, test: Tensor) -> Tensor:
        """The positions of images that are neither in a support of this seed nor test images."""
        wanted = self.cell.unlabelled or 0
        rest = others(torch.cat([self.left_out, test]), len(self.domain.labels))
        if len(rest) < wanted:
            raise FewshiftError(
                f"{wanted} unlabelled images are wanted and {len(rest)} are neither support nor test: lower max_test"
            )
        generator = torch.Generator().manual_seed(self.cell.seed)
        return rest[torch.randperm(len(rest), generator=generator)[:wanted]]

    def probabilities(self, predictor: nn.Module, batches: Sequence[Tensor]) -> Tensor:
        """A row of probabilities for each image."""
        with in_precision(self.cell.precision, changing=sees_stream(self.method, self.drawn)):
            images = self.domain.batches(batches)
            return _probabilities(with_layout(predictor, self.layout), (laid_out(each, self.layout) for each in images))

    def left_out_answers(self, predictor: nn.Module, stream: Sequence[Tensor]) -> Tensor | None:
        """Predictions for the largest support, where the test set lacks nothing else."""
        if sum(map(len, stream)) + len(self.left_out) < len(self.domain.labels):
            return None
        return self.probabilities(predictor, self.left_out.split(len(stream[0])))


def _answers(task: _Task, stream: Sequence[Tensor]) -> Answers:
    """Fit, predict the stream, then the images that were left out of it."""
    unlabelled = None
    if sees_stream(task.method, task.drawn):
        unlabelled = Unlabelled(_Lazy(task.domain, torch.cat(list(stream))))
    elif task.cell.unlabelled is not None:
        unlabelled = Unlabelled(_Lazy(task.domain, task.unlabelled(torch.cat(list(stream)))))
    target = Target(task.support(), unlabelled)
    began = time.perf_counter()
    with in_precision(task.cell.precision, changing=True):
        fitted, _ = fit_chosen(task.network, target, task.method, task.cell.seed)
    adapted = time.perf_counter()
    predictor = fitted.predictor
    probabilities = task.probabilities(predictor, stream)
    ended = time.perf_counter()
    return Answers(
        probabilities,
        task.left_out_answers(predictor, stream),
        short_notes(fitted.notes) | short_notes(getattr(predictor, "record", {})),
        _layers(fitted.layers),
        {"adapt": adapted - began, "predict": ended - adapted},
    )


def _judged(task: _Task, stream: Sequence[Tensor], materials: Materials) -> Answers:
    """Adapt as a user would, guard included, and predict with the network that was returned."""
    support = task.support()
    began = time.perf_counter()
    seen = task.unlabelled(torch.cat(list(stream))) if task.cell.unlabelled is not None else None
    unlabelled = None if seen is None else _Lazy(task.domain, seen)
    with in_precision(task.cell.precision, changing=True):
        result = adapt(
            task.network, support, method=task.method, unlabelled=unlabelled, validate=task.cell.validate,
            check=False, seed=task.cell.seed,
        )  # fmt: skip
    adapted = time.perf_counter()
    source = METHODS["source"]().adapt(task.network, Target())

    def by_source(indices: Tensor) -> Tensor:
        return task.probabilities(source, indices.split(AT_ONCE))

    before = materials.source_answers(task.cell, torch.cat(list(stream)), by_source)
    candidate = result.candidate
    after = before if _same(candidate, source) else task.probabilities(candidate, stream)
    ended = time.perf_counter()
    return Answers(
        after if result.accepted else before,
        task.left_out_answers(candidate if result.accepted else source, stream),
        short_notes(result.notes),
        _layers({layer.name: layer.details for layer in result.layers if layer.details}),
        {"adapt": adapted - began, "predict": ended - adapted},
        JudgedAdaptation(_facts(result), before, after),
    )


def _facts(result: Adaptation) -> dict[str, Any]:
    """The verdict and its evidence, as plain numbers and words."""
    gain = None if result.gain is None else {name: getattr(result.gain, name) for name in GAIN}
    return {
        "gain": gain and {name: value if math.isfinite(value) else None for name, value in gain.items()},
        "accepted": result.accepted,
        "reason": result.reason,
        "strength": None if result.verdict.strength is None else result.verdict.strength.margin,
        "chosen": None if result.choice is None else result.choice.chosen,
    }


def _trust(judged: JudgedAdaptation, returned: Tensor, order: Tensor, truth: Tensor) -> dict[str, Any]:
    """The verdict, beside the accuracies of all three networks on the test images."""
    answers = {"source": judged.source[order], "candidate": judged.candidate[order], "returned": returned}
    right = {name: float((rows.argmax(1) == truth).double().mean()) for name, rows in answers.items()}
    return judged.facts | {"accuracy": right}


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two networks have the same tensors, and so the same predictions."""
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@torch.no_grad()
def _probabilities(predictor: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    return torch.cat([logits_of(predictor(like(predictor, batch))).double().softmax(1) for batch in batches])


@dataclass(frozen=True)
class _Lazy:
    domain: Domain
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Tensor:
        return self.domain.images(self.indices[index : index + 1])[0]


def _layers(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per layer its numbers, and the first two of each list: the weights of source and support statistics."""
    return {
        name: {
            key: [round(number, 6) for number in value[:2]] if isinstance(value, list) else round(value, 6)
            for key, value in details.items()
            if isinstance(value, (int, float, list))
        }
        for name, details in layers.items()
    }

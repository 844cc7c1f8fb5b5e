"""Running a cell: draw the support, adapt, predict the stream, count."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fewshift import metrics
from fewshift.bench.cell import Cell
from fewshift.method import Needs
from fewshift.network import like, logits_of
from fewshift.target import Support, Target, Unlabelled, draw_support, others
from fewshift.version import __version__

TEST_SEED = 0  # of the cap on test images: the same images for every seed of the support


class Images(Protocol):
    """A domain: labelled images that are decoded when asked for."""

    labels: Tensor
    classes: tuple[str, ...]

    def images(self, indices: Tensor) -> Tensor:
        """The images at `indices`, as one tensor."""


@dataclass
class Workshop:
    """What cells share: every source network and every domain is loaded once."""

    load_network: Callable[[Cell], nn.Module]
    load_domain: Callable[[Cell], Images]
    _kept: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def network(self, cell: Cell) -> nn.Module:
        """The source network of a cell."""
        found: nn.Module = self._once(("network", cell.dataset, cell.source), self.load_network, cell)
        return found

    def domain(self, cell: Cell) -> Images:
        """The target domain of a cell."""
        # the source too: its card says how images are preprocessed
        found: Images = self._once(("domain", cell.dataset, cell.target, cell.source), self.load_domain, cell)
        return found

    def _once(self, key: tuple[str, ...], load: Callable[[Cell], Any], cell: Cell) -> Any:
        if key not in self._kept:
            self._kept[key] = load(cell)
        return self._kept[key]


def run(cell: Cell, workshop: Workshop) -> dict[str, Any]:
    """The result of one experiment as plain numbers: scores, counts, what was drawn, what it cost."""
    network, domain = workshop.network(cell), workshop.domain(cell)
    labels = domain.labels
    test = held_out(labels, cell)
    stream = [test[batch] for batch in cell.condition.batches(labels[test], cell.seed, len(domain.classes))]
    drawn = draw_support(labels, cell.shots or 1, cell.seed, domain.classes)
    method = cell.build()
    support = Support(domain.images(drawn), labels[drawn], domain.classes)
    whole_target = method.needs is Needs.UNLABELLED or (method.needs is Needs.EITHER and cell.shots is None)
    unlabelled = Unlabelled(_Lazy(domain, torch.cat(stream))) if whole_target else None

    began = time.perf_counter()
    fitted = method.fit(network, Target(support, unlabelled), cell.seed)
    adapted = time.perf_counter()
    probabilities = torch.cat([_probabilities(fitted.predictor, domain.images(batch)) for batch in stream])
    ended = time.perf_counter()

    truth = labels[torch.cat(stream)]
    counts = metrics.tally(truth, probabilities.argmax(1), len(domain.classes))
    return {
        "accuracy": metrics.accuracy(counts),
        "macro_recall": metrics.macro_recall(counts),
        "macro_f1": metrics.macro_f1(counts),
        "calibration_error": metrics.calibration_error(probabilities, truth),
        "tally": counts.tolist(),
        "support": drawn.tolist(),
        "realised_counts": truth.bincount(minlength=len(domain.classes)).tolist(),
        "notes": _small(fitted.notes) | _small(getattr(fitted.predictor, "record", {})),
        "seconds": {"adapt": adapted - began, "predict": ended - adapted},
        "versions": {"fewshift": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def held_out(labels: Tensor, cell: Cell) -> Tensor:
    """The images that every row is judged on: all but the largest support of this seed, capped if asked."""
    test = others(draw_support(labels, cell.largest_support, cell.seed), len(labels))
    if cell.max_test is None or cell.max_test >= len(test):
        return test
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(TEST_SEED))
    allowed = torch.zeros(len(labels), dtype=torch.bool)
    allowed[test] = True
    return order[allowed[order]][: cell.max_test].sort().values


@dataclass(frozen=True)
class _Lazy:
    domain: Images
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Tensor:
        return self.domain.images(self.indices[index : index + 1])[0]


@torch.no_grad()
def _probabilities(predictor: nn.Module, images: Tensor) -> Tensor:
    return logits_of(predictor(like(predictor, images))).double().softmax(1)


def _small(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes without long lists: a record is a line."""
    return {key: value for key, value in notes.items() if not isinstance(value, (list, dict)) or len(value) <= 20}

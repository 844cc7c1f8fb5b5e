"""Evidence from a handful of labels: what networks say about support images that they were not adapted to.

The support is cut into folds. For each fold the network is adapted to all other images and asked about these; the
source network is asked about the same images. Few labels make weak evidence, so everything is paired, image by image,
and every number comes with how many images it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fewshift.core import _progress as progress
from fewshift.core.support import Support
from fewshift.errors import FewshiftError

FOLDS = 5  # few, for the number: each adapts with most of the images
REPEATED = 5  # adaptations with the whole support that a cross-validation may cost, about
SINGLE_FOLDS = 6  # where classes have a single image
LEVEL = 0.90  # of intervals
CLEAR = math.log(20)  # nats: such a ratio of likelihoods, or a higher one, is seen by chance once in twenty times
TEMPERATURES = torch.logspace(-2, 2, 81, dtype=torch.float64)


SOURCE = "source"  # the network that was given


# folds


def folds_of(support: Support, kind: str, seed: int) -> list[Tensor]:
    """The positions that are held out together, one tensor for each adaptation.

    "cv" is stratified and repeated, with up to five folds; where a class has a single image no class can be both
    adapted to and held out, and the folds are any images. "loo" leaves out one image at a time.
    """
    total = len(support)
    if kind == "loo":
        return list(torch.arange(total).split(1)) if total > 1 else []
    if kind != "cv":
        raise FewshiftError(f"validate={kind!r} is unknown: choose 'cv', 'loo', None, or give labelled images")
    generator = torch.Generator().manual_seed(seed)
    if not support.kind.centroids or support.shots < 2:
        parts = min(total, FOLDS if not support.kind.centroids else SINGLE_FOLDS)
        order = torch.randperm(total, generator=generator)
        return [order[part::parts].sort().values for part in range(parts)] if parts > 1 else []
    parts = min(support.shots, FOLDS)
    repeats = max(1, REPEATED // (parts - 1))
    return [fold for _ in range(repeats) for fold in support.kind.folds(support.labels, parts, generator)]


# answers


@dataclass(frozen=True)
class HeldOut:
    """What the source network and adapted ones say about images that the latter had not seen.

    Rows are predictions; an image that was held out several times has several. `candidates` are the answers of all
    ways to adapt that were tried, where there was a choice, the preferred one first; `adapted` are then those of the
    way that would have been chosen without the row's own fold.
    """

    labels: Tensor  # (n,)
    images: Tensor  # (n,) positions in the support
    folds: Tensor  # (n,)
    source: Tensor  # (n, classes) logits
    adapted: Tensor  # (n, classes) logits
    candidates: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)


def gathered(
    support: Support, folds: Sequence[Tensor], answer: Callable[[Support, Support], Mapping[str, Tensor]]
) -> HeldOut:
    """Ask about every fold; `answer(kept, held)` gives logits by candidate, and those of the "source" network."""
    answers = []
    for split in progress.track(support.splits(folds), "cross-validation"):
        with progress.told_to(_nobody):  # each fold is one step of what is told
            answers.append(answer(*split))
    names = [name for name in answers[0] if all(name in it for it in answers)]
    candidates = {name: torch.cat([it[name].double().cpu() for it in answers]) for name in names}
    source = candidates.pop(SOURCE)
    images = torch.cat(list(folds))
    numbers = torch.cat([torch.full((len(fold),), number) for number, fold in enumerate(folds)])
    labels = support.targets[images.to(support.targets.device)].cpu()
    held = HeldOut(labels, images, numbers, source, source, candidates)
    return replace(held, adapted=chosen_without_own_fold(held))


def _nobody(what: str, done: int, total: int) -> None:
    del what, done, total


# choice


def temperature(logits: Tensor, labels: Tensor) -> float:
    """The T under which softmax(logits / T) has the least cross-entropy."""
    scaled = logits.double().unsqueeze(0) / TEMPERATURES.view(-1, 1, 1)
    losses = F.cross_entropy(scaled.flatten(0, 1), labels.repeat(len(TEMPERATURES)), reduction="none")
    return float(TEMPERATURES[losses.view(len(TEMPERATURES), -1).mean(1).argmin()])


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) of every row, under the temperature that suits these rows best."""
    return F.cross_entropy(logits.double() / temperature(logits, labels), labels, reduction="none")


def choose(held: HeldOut, rows: Tensor | None = None) -> str:
    """The first candidate, unless another is better by more than the standard error of the difference.

    Better is a smaller cross-entropy on held-out images, each candidate under its best temperature. The least loss of
    many is small by luck as much as by merit: with a few dozen images it is that of another one for every draw.
    """
    rows = torch.arange(len(held)) if rows is None else rows
    losses = {name: log_losses(logits[rows], held.labels[rows]) for name, logits in held.candidates.items()}
    first, best = next(iter(losses)), min(losses, key=lambda name: float(losses[name].mean()))
    change = _by_image(held.images[rows], losses[best] - losses[first])
    return best if float(change.mean()) < -_standard_error(change) else first


def chosen_without_own_fold(held: HeldOut) -> Tensor:
    """(n, classes): for each row, the answer of the candidate that the rows of all other images would choose."""
    answers = torch.empty_like(held.source)
    for fold in held.folds.unique().tolist():
        mine = held.folds == fold
        foreign = ~torch.isin(held.images, held.images[mine])
        name = choose(held, foreign.nonzero().flatten())
        answers[mine] = held.candidates[name][mine]
    return answers


# on the support itself


@dataclass(frozen=True)
class SupportLoss:
    """How much likelier a blend of source and support statistics makes the labels of the support.

    The labels were used to find the blend, but it is one number for the whole network, the share `v` of the support's
    statistics, and one number cannot fit much: by chance it makes labels 20 times as likely in 1.4 % of all cases. The
    images also made the statistics that they are normalised by, which is worth more the fewer there are.
    """

    v: float
    before: float  # mean cross-entropy with the source's statistics
    after: float  # with the blend
    images: int

    @property
    def nats(self) -> float:
        """The log of how many times likelier the labels became, together."""
        return self.images * (self.before - self.after)

    @property
    def words(self) -> str:
        """In plain words."""
        return (
            f"with {100 * self.v:.0f} % of the support's statistics its own {self.images} labels are "
            f"{times(self.nats)} likely"
        )


def times(nats: float) -> str:
    """A ratio of likelihoods in words: 2.3 times as, or 2.3 times less."""
    ratio = math.exp(min(abs(nats), 100))
    number = "over 1,000" if ratio > 1000 else f"{ratio:.1f}"
    return f"{number} times {'as' if nats >= 0 else 'less'}"


# gain


@dataclass(frozen=True)
class Gain:
    """How much more of the target is right after adaptation, in points of accuracy, and how sure that is."""

    point: float
    low: float
    high: float
    images: int
    wins: int  # predictions that became right
    losses: int  # predictions that became wrong
    predictions: int
    before: float  # accuracy of the source network on the same images
    after: float
    per_class: Mapping[int, tuple[int, float, float]]  # class -> images, before, after
    interval: str  # how it was computed
    loss_change: float  # of the cross-entropy, each network under its best temperature; negative is better
    loss_error: float  # its standard error
    weak: bool = False

    @property
    def nats(self) -> float:
        """The log of how many times likelier the labels of the held-out images became, together."""
        return -self.images * self.loss_change

    @property
    def words(self) -> str:
        """In plain words."""
        what = "images" if self.predictions == self.images else f"predictions for {self.images} images"
        return (
            f"of {self.predictions} held-out {what}, {self.wins} became right and {self.losses} became wrong: "
            f"{self.point:+.1f} points, {100 * LEVEL:.0f} % interval {self.low:+.1f} to {self.high:+.1f}"
        )


def gain_of(held: HeldOut, *, weak: bool = False) -> Gain:
    """The paired difference in accuracy, image by image, with an interval."""
    before = (held.source.argmax(1) == held.labels).double()
    after = (held.adapted.argmax(1) == held.labels).double()
    loss = log_losses(held.adapted, held.labels) - log_losses(held.source, held.labels)
    per_class = {
        int(label): (
            len(held.images[held.labels == label].unique()),
            100 * float(before[held.labels == label].mean()),
            100 * float(after[held.labels == label].mean()),
        )
        for label in held.labels.unique()
    }
    return gain_from(held.images, before, after, loss, per_class, weak=weak)


def gain_from(
    images: Tensor,
    before: Tensor,
    after: Tensor,
    loss: Tensor,
    per_class: Mapping[int, tuple[int, float, float]] | None = None,
    *,
    weak: bool = False,
) -> Gain:
    """From predictions: which image, the share of it that was right before and is after, the change of its loss."""
    change = _by_image(images, after - before)
    loss_change = _by_image(images, loss)
    low, high = paired_interval(change)
    return Gain(
        point=100 * float(change.mean()),
        low=100 * low,
        high=100 * high,
        images=len(change),
        wins=int((after > before).sum()),
        losses=int((after < before).sum()),
        predictions=len(images),
        before=100 * float(_by_image(images, before).mean()),
        after=100 * float(_by_image(images, after).mean()),
        per_class=per_class or {},
        interval="paired by image, normal after Agresti and Min",
        loss_change=float(loss_change.mean()),
        loss_error=_standard_error(loss_change),
        weak=weak,
    )


def paired_interval(change: Tensor, level: float = LEVEL) -> tuple[float, float]:
    """An interval for the mean of paired differences in [-1, 1], one for each image.

    A normal interval after half an image was added that became right, half a one that became wrong and a whole one that
    stayed: with few or no changes the plain one would be too short (Agresti and Min, 2005).
    """
    total = len(change) + 2
    mean = float(change.sum()) / total
    variance = (float(change.square().sum()) + 1) / total - mean**2
    half = float(torch.distributions.Normal(0, 1).icdf(torch.tensor((1 + level) / 2))) * math.sqrt(variance / total)
    return max(-1.0, mean - half), min(1.0, mean + half)


def _standard_error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf


def _by_image(images: Tensor, values: Tensor) -> Tensor:
    """The mean value of every image."""
    which, inverse = images.unique(return_inverse=True)
    sums = torch.zeros(len(which), dtype=torch.float64).index_add_(0, inverse, values.double())
    means: Tensor = sums / inverse.bincount(minlength=len(which))
    return means

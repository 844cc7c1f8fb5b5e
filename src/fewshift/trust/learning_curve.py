"""How many labels are worth it? The gain of adapting to k images per class, for growing k.

A support of K images per class contains smaller ones. Each draw puts the images of every class in a random order and
adapts to the first k, so a larger k only adds images. All k of a draw are judged by the same images: those that the
largest k leaves out, or labelled ones outside the support. So differences along the curve are due to k, and
differences between draws to the images that were labelled. The images left out rotate, as in cross-validation: no
image judges a second time before every other of its class has judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.special import chdtri, stdtrit  # type: ignore[import-untyped]
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.support import Support
from fewshift.errors import FewshiftError
from fewshift.trust.gain import LEVEL, paired_interval
from fewshift.trust.held_out import shares_right

DRAWS = 5
LADDER = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # images per class that are tried
APART = 1.25  # the largest k is at least this many times the one before
FURTHER = 1.5  # a curve can be flat from k on only if the largest k is at least this many times k
SMALL = 1.0  # points of accuracy that are not worth a label
ONE_IN_TWENTY = 0.05  # how often chance alone is taken for more


@dataclass(frozen=True)
class Point:
    """The gain at one k: points of accuracy over the source network, on the same images."""

    shots: int
    gains: tuple[float, ...]  # one for each draw
    low: float  # of the interval of their mean
    high: float
    draws: int  # different ones: there is only one draw of all images
    chance: float | None  # the spread over draws that the sampling noise of the judging images makes alone

    @property
    def mean(self) -> float:
        """Over the draws."""
        return statistics.fmean(self.gains)

    @property
    def spread(self) -> float | None:
        """Population standard deviation over the draws; None where they do not differ in their images."""
        return statistics.pstdev(self.gains) if self.draws > 1 else None

    @property
    def matters(self) -> bool:
        """Whether the draws differ by more than chance: which images were labelled matters at this k."""
        if self.spread is None or self.chance is None:
            return False
        most = float(chdtri(len(self.gains) - 1, ONE_IN_TWENTY)) * self.chance**2
        return len(self.gains) * self.spread**2 > most

    @property
    def lowest(self) -> float:
        """Of the draws."""
        return min(self.gains)

    @property
    def highest(self) -> float:
        """Of the draws."""
        return max(self.gains)

    def to_json(self) -> dict[str, Any]:
        """The fields and what follows from them, ready for JSON."""
        figures = {name: getattr(self, name) for name in ("mean", "spread", "matters", "lowest", "highest")}
        return asdict(self) | {"gains": list(self.gains)} | figures


@dataclass(frozen=True)
class Step:
    """What `more` images per class add to `shots`: points of accuracy, with an interval."""

    shots: int
    more: int
    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether it is certainly a rise, and not certainly a small one."""
        return self.low > 0 and self.high >= SMALL


# which images


def checked_shots(shots: Sequence[int] | None, pool: Support, *, outside: bool = False) -> tuple[int, ...]:
    """The k to measure, in their order: those asked for, or a few up to the most there can be."""
    most = pool.shots if outside else pool.shots - 1
    rarest = min(pool.counts, key=pool.counts.__getitem__)
    whose = f"class {pool.class_name(rarest)}" if pool.kind.stratified else "the support"
    if most < 1:
        raise FewshiftError(
            f"{whose} has a single image, which cannot both be adapted to and judge: label another, or give "
            "labelled images outside the support"
        )
    if shots is None:
        return (*(k for k in LADDER if APART * k <= most), most)
    if not isinstance(shots, Sequence):
        raise FewshiftError(f"shots={shots!r} is no list: give numbers of images, such as (1, 2, 5)")
    for k in shots:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise FewshiftError(f"shots={k!r} is no number of images: give 1, 2, ...")
        if k > most:
            judging = "" if outside else " and one has to judge"
            raise FewshiftError(f"{whose} has {pool.shots} images{judging}, {k} shots asked: ask for at most {most}")
    if not shots:
        raise FewshiftError("there are no shots: ask for at least one number of images")
    return tuple(sorted(set(shots)))


def strata(pool: Support) -> Tensor:
    """What k is drawn from: each class; with pixel labels, all images."""
    return pool.targets.cpu() if pool.kind.stratified else torch.zeros(len(pool), dtype=torch.long)


def rotated(labels: Tensor, most: int, draws: int, seed: int) -> Tensor:
    """(draws, images): the place of every image in a random order of its class; from place `most` on it is left out.

    Those left out rotate: none is left out a second time before every other of its class was.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.zeros(draws, len(labels), dtype=torch.long)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        times = torch.zeros(len(members), dtype=torch.long)  # left out
        for place in places:
            order = torch.randperm(len(members), generator=generator)
            order = order[times[order].argsort(stable=True, descending=True)]
            kept, out = order[:most], order[most:]
            times[out] += 1
            kept = kept[torch.randperm(len(kept), generator=generator)]  # in a fresh order
            place[members[torch.cat([kept, out])]] = torch.arange(len(members))
    return places


# what they say


@dataclass(frozen=True)
class Measured:
    """Which share of every image was right, (draws, images): all or nothing where an image has one label."""

    images: Tensor  # positions, in the support or among the labelled images outside it
    before: Tensor  # by the source network
    after: Mapping[int, Tensor]  # by networks adapted to k images per class, k rising
    different: Mapping[int, int]  # draws of k that differ

    @property
    def points(self) -> tuple[Point, ...]:
        """The curve."""
        changes = {k: after - self.before for k, after in self.after.items()}
        return tuple(
            Point(
                k,
                tuple((100 * change.mean(1)).tolist()),
                *self._interval(change),
                self.different[k],
                self._chance(k, change),
            )
            for k, change in changes.items()
        )

    def verdict(self) -> tuple[int | None, Step | None]:
        """From which k on the curve is flat, if so, and the comparison that decided it.

        Flat from k on: no larger measured k is better by a point or more, none is clearly better (the whole interval
        of what it adds is above zero, and not all of it below a point), and the largest is at least 1.5 k.
        """
        most = max(self.after)
        later = {k: [self._step(k, more) for more in self.after if more > k] for k in self.after if FURTHER * k <= most}
        if len(self.before) == 1 or not later:
            return None, None
        for k, steps in later.items():
            if all(step.mean < SMALL and not step.clear for step in steps):
                return k, steps[-1]
        if rises := [step for step in later[max(later)] if step.clear]:
            return None, rises[-1]
        unclear = next(steps for steps in later.values() if not any(step.clear for step in steps))
        return None, max(unclear, key=lambda step: step.mean)

    def _step(self, k: int, more: int) -> Step:
        change = self.after[more] - self.after[k]
        return Step(k, more, 100 * float(change.mean()), *self._interval(change))

    def _interval(self, change: Tensor) -> tuple[float, float]:
        """Of the mean change, in points of accuracy: what it might be with other images to judge by and other draws.

        For the images it is an interval paired by image, for the draws Student's. Where the same images judge every
        draw the two are independent and their squares add up. Where every draw has its own, the draws differ by both
        already, and the wider one is taken.
        """
        which, draws = self.images.flatten(), len(change)
        times = which.bincount()
        low, high = paired_interval((which.bincount(change.flatten()) / times)[times > 0])
        middle, half = (low + high) / 2, (high - low) / 2
        if draws > 1:
            over_draws = float(stdtrit(draws - 1, (1 + LEVEL) / 2) * change.mean(1).std()) / math.sqrt(draws)
            half = math.hypot(half, over_draws) if self._same else max(half, over_draws)
        return 100 * max(-1.0, middle - half), 100 * min(1.0, middle + half)

    def _chance(self, k: int, change: Tensor) -> float | None:
        """The deviation of the draws' means if images changed independently of each other, in points of accuracy.

        Of the same images only what differs between draws counts, of each draw's own all that differs between images.
        """
        images = change.shape[1]
        if self.different[k] == 1 or (not self._same and images == 1):
            return None
        variance = change.var(0).mean() if self._same else change.var(1).mean()
        return 100 * math.sqrt(float(variance) / images)

    @property
    def _same(self) -> bool:
        """Whether all draws are judged by the same images."""
        return bool((self.images == self.images[0]).all())


def measure(
    source: nn.Module,
    adapted: Callable[[Support], nn.Module],
    pool: Support,
    outside: Support | None,
    ks: Sequence[int],
    places: Tensor,
) -> Measured:
    """Adapt to the first k images of every class, for every draw and k, and predict images that no k has seen."""
    asked = pool if outside is None else outside
    everyone = torch.arange(len(asked))
    judging = [everyone if outside is not None else (place >= ks[-1]).nonzero().flatten() for place in places]
    known: dict[tuple[int, ...], Tensor] = {}
    after: dict[int, list[Tensor]] = {k: [] for k in ks}
    runs = [(draw, k) for draw in range(len(places)) for k in ks]
    for draw, k in progress.track(runs, "adaptations", [float(k) for _, k in runs]):
        kept, out = (places[draw] < k).nonzero().flatten(), judging[draw]
        same = (*kept.tolist(), -1, *out.tolist())
        if same not in known:  # there is only one draw of all images
            try:
                with progress.silent():  # an adaptation is one step
                    known[same] = shares_right(adapted(pool.part(kept)), asked.part(out))
            except FewshiftError as error:
                raise FewshiftError(f"at k = {k}, {error}") from error
        after[k].append(known[same])
    images = torch.stack(judging)
    return Measured(
        images,
        shares_right(source, asked)[images],
        {k: torch.stack(rows) for k, rows in after.items()},
        {k: len((places < k).unique(dim=0)) for k in ks},
    )

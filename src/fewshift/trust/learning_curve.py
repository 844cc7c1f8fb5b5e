"""How many labels are worth it? The gain of adapting to k images per class, for growing k.

A support of K images per class holds smaller ones. Each draw puts the images of every class in a random order, the
first k of which are adapted to: a larger k only adds images. All k of a draw are judged by the same images, those that
the largest k leaves out, or labelled ones outside the support. What differs along the curve is then due to k, and what
differs between draws to which images were labelled. The images left out go round, as in cross-validation: none judges
a second time before every other of its class has.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from scipy.special import chdtri, stdtrit  # type: ignore[import-untyped]
from torch import Tensor, nn

from fewshift.api import fitting, labelled_apart, method_of, moved
from fewshift.core import _progress as progress_
from fewshift.core.labels import Augment
from fewshift.core.losses import IGNORE, Loss, at_labels, cross_entropy
from fewshift.core.method import Method, Needs
from fewshift.core.network import like, logits_of
from fewshift.core.randomness import checked_seed
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError
from fewshift.images import Preprocess
from fewshift.images.inputs import as_support, as_unlabelled
from fewshift.trust.gain import LEVEL, paired_interval
from fewshift.trust.guard import answers, seen_by

DRAWS = 5
LADDER = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # images per class that are tried
APART = 1.25  # times the one before it that the largest of them has to be
FURTHER = 1.5  # times k up to which a curve has to be measured before it can be called flat from k on
SMALL = 1.0  # points of accuracy that nobody would label for
HIDDEN = 3.0  # points that may go unseen without a word
ONE_IN_TWENTY = 0.05  # times that chance alone is called more than chance
POINTS = " points"
MORE = "take more draws, or more images to judge by"


@dataclass(frozen=True)
class Point:
    """The gain at one k: points of accuracy over the source network, on the same images."""

    shots: int
    gains: tuple[float, ...]  # one for each draw
    low: float  # of the interval of their mean
    high: float
    draws: int  # different ones: of all images there is only one
    chance: float | None  # the spread over draws that the number of images that judge makes alone

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
        """Give fields and figures as JSON knows them."""
        figures = {name: getattr(self, name) for name in ("mean", "spread", "matters", "lowest", "highest")}
        return asdict(self) | {"gains": list(self.gains)} | figures


def _at(point: Point, unit: str = "") -> str:
    return f"{point.mean:+.1f}{unit} at k = {point.shots}"


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
        """Whether it is a rise for certain, and not one that is small for certain."""
        return self.low > 0 and self.high >= SMALL


@dataclass(frozen=True)
class LearningCurve:
    """The gain against k, and whether more labels are worth it.

    `flat_from` is the smallest measured k from which on the curve is flat: no larger measured k is better by a point or
    more, none is clearly better (the whole interval of what it adds is above zero, and not all of it below a point),
    and the largest is at least 1.5 k. It is None where the curve still rises, where a larger k adds a point or more but
    not clearly, and where a single draw cannot tell. `step` is the comparison that decided; its `high` is the rise that
    may have gone unseen.

    Draws from one support share images, the more of them the closer k is to its size: there the spread is too small.
    """

    source: float  # accuracy of the source network on the images that judged, in percent
    points: tuple[Point, ...]
    flat_from: int | None
    step: Step | None
    draws: int
    images: int  # that judged
    outside: bool  # whether these are labelled images outside the support
    method: Method
    network: str
    support: Support = field(repr=False, compare=False)
    seed: int
    seconds: float

    @property
    def words(self) -> str:
        """The verdict in one sentence."""
        first, last = self.points[0], self.points[-1]
        if first is last:
            return f"a single k is no curve: {_at(first, POINTS)}: measure others, or label more"
        if self.step is None and self.draws == 1:
            return f"one draw cannot tell a rise from chance: {_at(first, POINTS)}, {_at(last)}: take more draws"
        if self.step is None:
            return f"these k are too close together to tell a rise: {_at(first, POINTS)}, {_at(last)}: measure others"
        return self._rises(self.step) if self.flat_from is None else self._flat(self.step)

    def _rises(self, step: Step) -> str:
        both = f"{_at(self.at(step.shots), POINTS)}, {_at(self.at(step.more))}"
        if step.clear:
            return f"the curve still rises at k = {step.more}: {both}: label more"
        interval = f"{step.low:+.1f} to {step.high:+.1f}"
        return f"whether the curve rises is not clear: {both}, a difference of {interval}: {MORE}"

    def _flat(self, step: Step) -> str:
        below, above = self.at(step.shots), self.at(step.more)
        there = f"{below.mean:+.1f} points there, {_at(above)}"
        if step.high < 0:
            return f"no larger k is better than k = {step.shots}: {there}"
        if step.high >= HIDDEN:
            return (
                f"the curve looks flat from k = {step.shots} on: {there}; but with {self.images} images to judge by, "
                f"a rise of up to {step.high:.1f} points could go unseen: {MORE}"
            )
        if max(below.low, above.low) <= 0 and max(below.mean, above.mean) < SMALL:
            return f"labels do not help {self.method.name} here: {_at(below, POINTS)}, {_at(above)}"
        return f"the curve is flat from k = {step.shots} on: {there}"

    @property
    def luck(self) -> str:
        """How much it matters which images were labelled, in one sentence."""
        told = [
            f"{it.spread:.1f} points at k = {it.shots}, where chance in the images that judge makes {it.chance:.1f}"
            for it in self.points
            if it.spread is not None and it.chance is not None
        ]
        if not told:
            return "how much it matters which images are labelled is not known: take more draws, or label more"
        seen = [it.shots for it in self.points if it.matters]
        if not seen:
            return f"which images were labelled made no difference that can be seen: draws spread by {told[0]} alone"
        ks = ", ".join(map(str, seen))
        return f"which images were labelled matters at k = {ks}: draws spread by {told[0]} alone"

    @property
    def unit(self) -> str:
        """What k counts."""
        return "labelled images" if not self.support.kind.centroids else "labelled images per class"

    def at(self, k: int) -> Point:
        """The point of a k that was measured."""
        found = {it.shots: it for it in self.points}
        if k not in found:
            raise FewshiftError(f"k = {k} was not measured: choose one of {', '.join(map(str, found))}")
        return found[k]

    def table(self) -> list[dict[str, str]]:
        """One row for each k, as words; numbers are in `points` and `to_json`."""
        return [
            {
                "k": str(it.shots),
                "gain": f"{it.mean:+.1f}",
                "spread": "-" if it.spread is None else f"{it.spread:.1f}",
                "by chance": "-" if it.chance is None else f"{it.chance:.1f}",
                "lowest": f"{it.lowest:+.1f}",
                "highest": f"{it.highest:+.1f}",
                f"{100 * LEVEL:.0f} % interval": f"{it.low:+.1f} to {it.high:+.1f}",
            }
            for it in self.points
        ]

    def picture(self) -> str:
        """An SVG: the mean gain against k with the spread over draws, and every draw as a dot."""
        from fewshift.report import figures

        told = "; ".join(
            f"{it.mean:+.1f} at k = {it.shots} ({it.lowest:+.1f} to {it.highest:+.1f})" for it in self.points
        )
        return figures.gain_curve(
            {it.shots: it.gains for it in self.points},
            across=f"k, {self.unit}",
            label="gain, points of accuracy",
            flat_from=self.flat_from,
            key="learning-curve",
            alt=f"Gain over the source network for growing k, mean of {self.draws} draws and their range: {told}.",
        )

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page that a colleague can read."""
        from fewshift.report import curve_page

        return curve_page(self, path)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        return {
            "words": self.words,
            "luck": self.luck,
            "flat_from": self.flat_from,
            "source": self.source,
            "points": [it.to_json() for it in self.points],
            "step": None if self.step is None else asdict(self.step),
            "draws": self.draws,
            "images": self.images,
            "outside": self.outside,
            "support": len(self.support),
            "method": self.method.name,
            "settings": self.method.settings(),
            "seed": self.seed,
            "seconds": self.seconds,
        }


def learning_curve(
    model: nn.Module,
    support: Any,
    *,
    method: str | Method = "lccs",
    shots: Sequence[int] | None = None,
    draws: int = DRAWS,
    labelled: Any = None,
    unlabelled: Any = None,
    loss: Loss | None = None,
    preprocess: Preprocess | Callable[[Any], Tensor] | None = None,
    augment: Augment | None = None,
    classes: Sequence[str] | None = None,
    head: str | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: progress_.Listener | None = None,
) -> LearningCurve:
    """How the gain of adapting `model` grows with k, the labelled images per class, and from where on it does not.

    For every k of `shots`, k images of each class (with pixel labels: in all) are drawn from the support, `draws`
    times. The network is adapted to them, and both networks are asked about images that no k of the draw has seen.
    Without `shots` these are 1, 2, 3, 5, 10, 20, 50 and so on up to the most that leave one image of each class to
    judge by; smaller shots leave more. With `labelled`, images of the place outside the support, those judge, and k
    goes up to all images of the support. Other arguments are as for `adapt`.

    The name "lccs" stands for LCCS() here: LCCS(classifier="evidence"), which `adapt` makes of it, would cross-validate
    within every draw. Nothing is rejected: where adaptation hurts, the gain is below zero.
    """
    began = time.perf_counter()
    chosen = method_of(method)
    if chosen.needs in (Needs.STREAM, Needs.UNLABELLED):
        raise FewshiftError(
            f"{chosen.name} does not learn from labelled images, so that more of them change nothing: choose another "
            "method"
        )
    if not isinstance(draws, int) or draws < 1:
        raise FewshiftError(f"draws={draws!r} is no number of draws: give 1, 2, ...")
    if support is None:
        raise FewshiftError("a learning curve needs labelled target images: pass a support set")
    checked_seed(seed)
    target = Target(
        as_support(support, preprocess, augment, classes),
        as_unlabelled(unlabelled, preprocess, augment),
        loss or cross_entropy,
    )
    with progress_.told_to(progress):
        network, target = fitting(model, target, target.some_images(chosen.name, "support images"), head)
        pool = target.need_support(chosen.name).checked(network.output)
        others = None if labelled is None else _outside(labelled, preprocess, target, classes, model, head)
        ks = checked_shots(shots, pool, outside=others is not None)
        network = network if device is None else moved(network, device)

        def adapted(kept: Support) -> nn.Module:
            return chosen.fit(seen_by(network, kept), replace(target, support=kept), seed).predictor

        judged = judge(network.model, adapted, pool, others, ks, rotated(_strata(pool), ks[-1], draws, seed))
    flat_from, step = judged.verdict()
    return LearningCurve(
        source=100 * float(judged.before.mean()),
        points=judged.points,
        flat_from=flat_from,
        step=step,
        draws=draws,
        images=len(judged.images.unique()),
        outside=others is not None,
        method=chosen,
        network=type(model).__name__,
        support=pool,
        seed=seed,
        seconds=time.perf_counter() - began,
    )


def _outside(
    labelled: Any, preprocess: Any, target: Target, classes: Sequence[str] | None, model: nn.Module, head: str | None
) -> Support:
    """Labelled images to judge by, none of them in the support, as the network takes them."""
    given = Path(labelled) if isinstance(labelled, str) else labelled
    alone = Target(labelled_apart(given, preprocess, target, classes))
    network, alone = fitting(model, alone, alone.some_images("judging", "labelled images"), head)
    return alone.need_support("judging").checked(network.output)


# which images


def checked_shots(shots: Sequence[int] | None, pool: Support, *, outside: bool = False) -> tuple[int, ...]:
    """The k to measure, in their order: those asked for, or a few up to the most there can be."""
    most = pool.shots if outside else pool.shots - 1
    rarest = min(pool.counts, key=pool.counts.__getitem__)
    whose = "the support" if not pool.kind.centroids else f"class {pool.class_name(rarest)}"
    if most < 1:
        raise FewshiftError(
            f"{whose} has a single image, which cannot be learned from and judge as well: label another, or give "
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
            judging = "" if outside else ", one of which has to judge"
            raise FewshiftError(f"{whose} has {pool.shots} images{judging}, {k} shots asked: ask for at most {most}")
    if not shots:
        raise FewshiftError("no shots are given: ask for at least one number of images")
    return tuple(sorted(set(shots)))


def _strata(pool: Support) -> Tensor:
    """Of what k are drawn: of each class; with pixel labels, of all images."""
    return torch.zeros(len(pool), dtype=torch.long) if not pool.kind.centroids else pool.targets.cpu()


def rotated(labels: Tensor, most: int, draws: int, seed: int) -> Tensor:
    """(draws, images): the place of every image in a random order of its class; from place `most` on it is left out.

    Those left out go round: none is a second time before every other of its class was.
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
            kept = kept[torch.randperm(len(kept), generator=generator)]  # in an order that knows nothing of others
            place[members[torch.cat([kept, out])]] = torch.arange(len(members))
    return places


# what they say


@dataclass(frozen=True)
class Judged:
    """Which share of every image was right, (draws, images): all or nothing where an image has one label."""

    images: Tensor  # positions, in the support or among the labelled images outside it
    before: Tensor  # said by the source network
    after: Mapping[int, Tensor]  # by networks adapted to k images per class, k rising
    different: Mapping[int, int]  # draws of k that differ

    @property
    def points(self) -> tuple[Point, ...]:
        """The curve."""
        changes = {k: after - self.before for k, after in self.after.items()}
        return tuple(
            Point(k, tuple((100 * it.mean(1)).tolist()), *self._interval(it), self.different[k], self._chance(k, it))
            for k, it in changes.items()
        )

    def verdict(self) -> tuple[int | None, Step | None]:
        """From which k on the curve is flat, if so, and the comparison that decided: see `LearningCurve`."""
        most = max(self.after)
        later = {k: [self._step(k, it) for it in self.after if it > k] for k in self.after if FURTHER * k <= most}
        if len(self.before) == 1 or not later:
            return None, None
        for k, steps in later.items():
            if all(it.mean < SMALL and not it.clear for it in steps):
                return k, steps[-1]
        if rises := [it for it in later[max(later)] if it.clear]:
            return None, rises[-1]
        unclear = next(steps for steps in later.values() if not any(it.clear for it in steps))
        return None, max(unclear, key=lambda it: it.mean)

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


def judge(
    source: nn.Module,
    adapted: Callable[[Support], nn.Module],
    pool: Support,
    outside: Support | None,
    ks: Sequence[int],
    places: Tensor,
) -> Judged:
    """Adapt to the first k images of every class, for every draw and k, and ask about images that no k has seen."""
    asked = pool if outside is None else outside
    everyone = torch.arange(len(asked))
    judging = [everyone if outside is not None else (place >= ks[-1]).nonzero().flatten() for place in places]
    known: dict[tuple[int, ...], Tensor] = {}
    after: dict[int, list[Tensor]] = {k: [] for k in ks}
    for draw, k in progress_.track([(draw, k) for draw in range(len(places)) for k in ks], "adaptations"):
        kept, out = (places[draw] < k).nonzero().flatten(), judging[draw]
        same = (*kept.tolist(), -1, *out.tolist())
        if same not in known:  # of all images there is but one draw
            known[same] = _asked(adapted, pool.part(kept), asked.part(out), k)
        after[k].append(known[same])
    images = torch.stack(judging)
    return Judged(
        images,
        _right(source, asked)[images],
        {k: torch.stack(rows) for k, rows in after.items()},
        {k: len((places < k).unique(dim=0)) for k in ks},
    )


def _asked(adapted: Callable[[Support], nn.Module], kept: Support, out: Support, k: int) -> Tensor:
    with progress_.told_to(_nobody):  # an adaptation is one step of what is told
        try:
            return _right(adapted(kept), out)
        except FewshiftError as error:
            raise FewshiftError(f"at k = {k}, {error}") from error


@torch.no_grad()
def _right(model: nn.Module, images: Support) -> Tensor:
    """The share of every image that is right."""
    if images.kind.centroids:
        return (answers(model, images).argmax(1).cpu() == images.targets.cpu()).double()
    shares = []
    for image, label in images.chunks(1):
        labels = label.cpu()
        said = at_labels(logits_of(model(like(model, image))).cpu(), labels).argmax(1)
        shares.append((said == labels)[labels != IGNORE].double().mean())
    return torch.stack(shares)


def _nobody(what: str, done: int, total: int) -> None:
    del what, done, total

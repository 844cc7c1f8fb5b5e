"""Trust: what adaptations were said to be worth, beside what they were worth on images that nobody had looked at."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fewshift.lab.bench.results import Outcome
from fewshift.report import figures
from fewshift.report import prose as words
from fewshift.report.figures import Estimate
from fewshift.report.pages import Picture
from fewshift.report.tables import Listing
from fewshift.trust.gain import LEVEL

HARM = 1.0  # points of accuracy that may be lost before it counts
MOST_HARMFUL = 2.0  # percent of runs
LEAST_KEPT = 90.0  # percent of the gain
COVERAGE = (85.0, 95.0)  # percent of runs
DECIMALS = 6  # of points: shares of so many images differ by more, errors of rounding by less
TOGETHER = "all"

HEADER = (
    "Accuracies and shares in %, gains over the source network in points, all on the same test images; "
    "mean ± population standard deviation over all targets and seeds. The candidate is the adapted network before the "
    f"guard, and harmful if it is worse by more than {HARM:g} point; let through are those that were handed over. "
    "Gain kept: the gain of what was handed over, of that of a guard which refuses every loss and nothing else. "
    f"Coverage: runs whose {100 * LEVEL:.0f} % interval holds the true gain of the candidate."
)


@dataclass(frozen=True)
class Trial:
    """One adaptation: the accuracies of three networks on the test images in percent, and the estimate of the gain."""

    condition: str
    shots: int | None
    target: str
    seed: int
    source: float
    candidate: float  # the adapted network
    returned: float  # that, or the source network if the guard refused it
    accepted: bool
    estimate: float | None = None  # None where nothing could be held out
    low: float | None = None
    high: float | None = None

    @property
    def gain(self) -> float:
        """What adaptation was worth."""
        return round(self.candidate - self.source, DECIMALS)

    @property
    def kept(self) -> float:
        """What of it was handed over."""
        return round(self.returned - self.source, DECIMALS)

    @property
    def harmful(self) -> bool:
        """Whether the candidate is worse than the source network, and not by little."""
        return self.gain < -HARM

    @property
    def let_through(self) -> bool:
        """Whether what was handed over is."""
        return self.kept < -HARM

    @property
    def covered(self) -> bool | None:
        """Whether the interval holds the true gain; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return round(self.low, DECIMALS) <= self.gain <= round(self.high, DECIMALS)


@dataclass(frozen=True)
class Summary:
    """Many trials in numbers; those in points or percent are one for each trial."""

    source: tuple[float, ...]
    gains: tuple[float, ...]
    kept: tuple[float, ...]
    estimates: tuple[float, ...]
    accepted: int
    harmful: int
    let_through: int
    intervals: int
    covered: int

    @property
    def runs(self) -> int:
        """How many trials."""
        return len(self.gains)

    @property
    def attainable(self) -> float:
        """The sum of points that a guard would keep that is never wrong."""
        return sum(max(0.0, gain) for gain in self.gains)

    @property
    def kept_share(self) -> float | None:
        """In percent; None where there was nothing to gain."""
        return 100 * sum(self.kept) / self.attainable if self.attainable else None

    @property
    def let_through_share(self) -> float | None:
        """In percent of all runs."""
        return 100 * self.let_through / self.runs if self.runs else None

    @property
    def coverage(self) -> float | None:
        """In percent of the runs that have an interval."""
        return 100 * self.covered / self.intervals if self.intervals else None


@dataclass(frozen=True)
class Goal:
    """Something to reach, and whether it was; None where nobody can tell."""

    met: bool | None
    words: str

    @property
    def sentence(self) -> str:
        """With the verdict first."""
        return f"{ {True: 'Met', False: 'Missed', None: 'Open'}[self.met] }: {self.words}."


def trials(found: Iterable[Outcome]) -> list[Trial]:
    """Those of the outcomes whose adaptation was judged; a cell that stands in several places counts once."""
    return [_trial(it) for it in {it.cell.key: it for it in found if "trust" in it.result}.values()]


def _trial(it: Outcome) -> Trial:
    told = it.result["trust"]
    gain = told["gain"] or {}
    return Trial(
        it.row.name,
        it.cell.shots,
        it.place.label,
        it.cell.seed,
        **{name: 100 * told["accuracy"][name] for name in ("source", "candidate", "returned")},
        accepted=told["accepted"],
        estimate=gain.get("point"),
        low=gain.get("low"),
        high=gain.get("high"),
    )


def summed(them: Sequence[Trial]) -> Summary:
    """What the trials have in common."""
    return Summary(
        tuple(it.source for it in them),
        tuple(it.gain for it in them),
        tuple(it.kept for it in them),
        tuple(it.estimate for it in them if it.estimate is not None),
        accepted=sum(it.accepted for it in them),
        harmful=sum(it.harmful for it in them),
        let_through=sum(it.let_through for it in them),
        intervals=sum(it.covered is not None for it in them),
        covered=sum(it.covered is True for it in them),
    )


def by_condition(them: Iterable[Trial]) -> dict[tuple[str, int | None], list[Trial]]:
    """Groups with one condition and k, in the order of appearance."""
    groups: dict[tuple[str, int | None], list[Trial]] = {}
    for it in them:
        groups.setdefault((it.condition, it.shots), []).append(it)
    return groups


def goals(found: Summary) -> tuple[Goal, ...]:
    """What the guard and the interval have to reach to be trusted."""
    least, most = COVERAGE
    passed, kept, coverage = found.let_through_share, found.kept_share, found.coverage
    return (
        Goal(
            None if passed is None else passed <= MOST_HARMFUL,
            f"harmful adaptations were let through in {found.let_through} of {words.counted(found.runs, 'run')} "
            f"({_percent(passed)}), at most {MOST_HARMFUL:g} % are wanted",
        ),
        Goal(
            None if kept is None else kept >= LEAST_KEPT,
            f"{_percent(kept)} of the attainable gain was kept, at least {LEAST_KEPT:g} % is wanted"
            if kept is not None
            else "no adaptation would have gained anything, so there was nothing to keep",
        ),
        Goal(
            None if coverage is None else least <= coverage <= most,
            f"the {100 * LEVEL:.0f} % intervals held the true gain in {found.covered} of "
            f"{words.counted(found.intervals, 'run')} ({_percent(coverage)}), {least:g} to {most:g} % are wanted",
        ),
    )


# tables


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "runs": lambda it: str(it.runs),
    "source accuracy": lambda it: _over(it.source),
    "true gain, candidate": lambda it: _over(it.gains, "+z"),
    "true gain, returned": lambda it: _over(it.kept, "+z"),
    "estimated gain": lambda it: _over(it.estimates, "+z"),
    "accepted": lambda it: _percent(100 * it.accepted / it.runs),
    "harmful candidates": lambda it: str(it.harmful),
    "harmful let through": lambda it: f"{it.let_through} ({_percent(it.let_through_share)})",
    "gain kept": lambda it: _percent(it.kept_share),
    "coverage": lambda it: _percent(it.coverage),
}


def listing(title: str, them: Sequence[Trial]) -> Listing:
    """A line for each condition and k, one for all, and whether the goals were met."""
    groups = [((name, "-" if shots is None else str(shots)), group) for (name, shots), group in _groups(them)]
    if len(groups) > 1:
        groups.append(((TOGETHER, ""), list(them)))
    return Listing(
        title,
        HEADER,
        ("condition", "k", *COLUMNS),
        tuple((*leading, *(tell(summed(group)) for tell in COLUMNS.values())) for leading, group in groups),
        tuple(goal.sentence for goal in goals(summed(them))),
    )


def comma_separated(them: Iterable[Trial]) -> str:
    """One line per trial, with all its numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [it.name for it in fields(Trial)]
    writer.writerow([{"shots": "k"}.get(name, name) for name in names])
    for it in them:
        writer.writerow([_cell(getattr(it, name)) for name in names])
    return text.getvalue()


def plain(them: Sequence[Trial]) -> dict[str, Any]:
    """Numbers and words, ready for JSON."""
    lines = [{"condition": name, "k": shots, **_numbers(summed(group))} for (name, shots), group in _groups(them)]
    return {"lines": lines, TOGETHER: _numbers(summed(them)), "goals": [asdict(it) for it in goals(summed(them))]}


def _groups(them: Iterable[Trial]) -> list[tuple[tuple[str, int | None], list[Trial]]]:
    return list(by_condition(them).items())


def _numbers(found: Summary) -> dict[str, Any]:
    means = {
        "source_accuracy": found.source,
        "candidate_gain": found.gains,
        "returned_gain": found.kept,
        "estimated_gain": found.estimates,
    }
    return {
        "runs": found.runs,
        **{
            name: {"mean": statistics.fmean(it), "spread": statistics.pstdev(it), "n": len(it)} if it else None
            for name, it in means.items()
        },
        **{name: getattr(found, name) for name in ("accepted", "harmful", "let_through", "attainable")},
        **{name: getattr(found, name) for name in ("let_through_share", "kept_share", "coverage")},
    }


# picture


def picture(them: Sequence[Trial], key: str) -> list[Picture]:
    """The estimated gain of every candidate against its true one; none where nothing was estimated."""
    told: dict[str, list[Estimate]] = {}
    for it in them:
        if it.estimate is not None and it.low is not None and it.high is not None:
            told.setdefault(it.condition, []).append(Estimate(it.gain, it.estimate, it.low, it.high))
    if not told:
        return []
    found = summed(them)
    facts = "; ".join(
        f"{name}: {words.counted(len(points), 'run')}, true {_over([it.truth for it in points], '+z')}, "
        f"estimated {_over([it.point for it in points], '+z')}"
        for name, points in told.items()
    )
    coverage = (
        f"{found.covered} of {found.intervals} intervals ({_percent(found.coverage)}) hold the true gain and cross the "
        "diagonal"
    )
    svg = figures.estimates(
        told,
        across="true gain, points",
        label="estimated gain, points",
        key=f"{key}trust",
        alt=f"Estimated against true gain of adaptation, one mark per run. {facts}. {words.sentence(coverage)}.",
    )
    caption = (
        "Estimated against true gain of the candidates, in points: one mark per run, the line through it is its "
        f"{100 * LEVEL:.0f} % interval. On the dashed diagonal an estimate is exact; {coverage}."
    )
    return [Picture(svg, caption)]


def _over(values: Sequence[float], sign: str = "") -> str:
    return words.over_draws(values, sign) if values else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1f} %"


def _cell(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else value

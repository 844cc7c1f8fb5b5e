"""Trust: the estimated gains of adaptations beside their true gains on test images."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fewshift.lab.bench.results import Outcome, grouped
from fewshift.report import prose as words
from fewshift.report import run_figures as figures
from fewshift.report.pictures import Picture
from fewshift.report.run_figures import Estimate
from fewshift.report.tables import Listing
from fewshift.trust.gain import LEVEL

HARM = 1.0  # points of accuracy that may be lost before it counts
MOST_HARMFUL = 2.0  # percent of runs
LEAST_KEPT = 90.0  # percent of the gain
COVERAGE = (85.0, 95.0)  # percent of runs
DECIMALS = 6  # of points: less than one image makes, more than rounding errors
TOGETHER = "all"

HEADER = (
    "Accuracies and shares in %, gains over the source network in points, all on the same test images; "
    "mean ± population standard deviation over all targets and seeds. The candidate is the adapted network before the "
    f"guard. It is harmful if it is worse than the source by more than {HARM:g} point, and let through if the guard "
    "accepted it. Gain kept: the gain of the returned networks, as a share of what a perfect guard would keep. "
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
        """The true gain of the candidate."""
        return round(self.candidate - self.source, DECIMALS)

    @property
    def kept(self) -> float:
        """The true gain of the returned network."""
        return round(self.returned - self.source, DECIMALS)

    @property
    def harmful(self) -> bool:
        """Whether the candidate is clearly worse than the source network."""
        return self.gain < -HARM

    @property
    def let_through(self) -> bool:
        """Whether the returned network is clearly worse than the source network."""
        return self.kept < -HARM

    @property
    def covered(self) -> bool | None:
        """Whether the interval holds the true gain; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return round(self.low, DECIMALS) <= self.gain <= round(self.high, DECIMALS)


@dataclass(frozen=True)
class Summary:
    """Many trials in numbers; the tuples have one value per trial."""

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
        """The points that a perfect guard would keep."""
        return sum(max(0.0, gain) for gain in self.gains)

    @property
    def kept_share(self) -> float | None:
        """Percent of the attainable gain; None where there was nothing to gain."""
        return 100 * sum(self.kept) / self.attainable if self.attainable else None

    @property
    def let_through_share(self) -> float | None:
        """Percent of all runs."""
        return 100 * self.let_through / self.runs if self.runs else None

    @property
    def coverage(self) -> float | None:
        """Percent of the runs that have an interval."""
        return 100 * self.covered / self.intervals if self.intervals else None


@dataclass(frozen=True)
class Goal:
    """A goal, and whether it was met; None where the data cannot tell."""

    met: bool | None
    words: str

    @property
    def sentence(self) -> str:
        """The verdict, then the facts."""
        return f"{ {True: 'Met', False: 'Missed', None: 'Open'}[self.met] }: {self.words}."


def trials(outcomes: Iterable[Outcome]) -> list[Trial]:
    """The outcomes whose adaptation was judged; a cell that stands in several columns counts once."""
    judged = {outcome.cell.key: outcome for outcome in outcomes if "trust" in outcome.result}
    return [_trial(outcome) for outcome in judged.values()]


def _trial(outcome: Outcome) -> Trial:
    facts = outcome.result["trust"]
    gain = facts["gain"] or {}
    return Trial(
        outcome.row.name,
        outcome.cell.shots,
        outcome.column.label,
        outcome.cell.seed,
        **{name: 100 * facts["accuracy"][name] for name in ("source", "candidate", "returned")},
        accepted=facts["accepted"],
        estimate=gain.get("point"),
        low=gain.get("low"),
        high=gain.get("high"),
    )


def summed(judged: Sequence[Trial]) -> Summary:
    """Many trials in numbers."""
    return Summary(
        tuple(trial.source for trial in judged),
        tuple(trial.gain for trial in judged),
        tuple(trial.kept for trial in judged),
        tuple(trial.estimate for trial in judged if trial.estimate is not None),
        accepted=sum(trial.accepted for trial in judged),
        harmful=sum(trial.harmful for trial in judged),
        let_through=sum(trial.let_through for trial in judged),
        intervals=sum(trial.covered is not None for trial in judged),
        covered=sum(trial.covered is True for trial in judged),
    )


def _by_condition(judged: Iterable[Trial]) -> list[tuple[tuple[str, int | None], list[Trial]]]:
    """Groups with one condition and k, in the order of appearance."""
    return list(grouped(judged, lambda trial: (trial.condition, trial.shots)).items())


def goals(summary: Summary) -> tuple[Goal, ...]:
    """What the guard and the interval have to reach to be trusted."""
    least, most = COVERAGE
    passed, kept, coverage = summary.let_through_share, summary.kept_share, summary.coverage
    return (
        Goal(
            None if passed is None else passed <= MOST_HARMFUL,
            f"harmful adaptations were let through in {summary.let_through} of {words.counted(summary.runs, 'run')} "
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
            f"the {100 * LEVEL:.0f} % intervals held the true gain in {summary.covered} of "
            f"{words.counted(summary.intervals, 'run')} ({_percent(coverage)}), {least:g} to {most:g} % are wanted",
        ),
    )


# tables


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "runs": lambda summary: str(summary.runs),
    "source accuracy": lambda summary: _over(summary.source),
    "true gain, candidate": lambda summary: _over(summary.gains, "+z"),
    "true gain, returned": lambda summary: _over(summary.kept, "+z"),
    "estimated gain": lambda summary: _over(summary.estimates, "+z"),
    "accepted": lambda summary: _percent(100 * summary.accepted / summary.runs),
    "harmful candidates": lambda summary: str(summary.harmful),
    "harmful let through": lambda summary: f"{summary.let_through} ({_percent(summary.let_through_share)})",
    "gain kept": lambda summary: _percent(summary.kept_share),
    "coverage": lambda summary: _percent(summary.coverage),
}


def listing(title: str, judged: Sequence[Trial]) -> Listing:
    """A line for each condition and k, one for all, and whether the goals were met."""
    groups = [((name, "-" if shots is None else str(shots)), group) for (name, shots), group in _by_condition(judged)]
    if len(groups) > 1:
        groups.append(((TOGETHER, ""), list(judged)))
    return Listing(
        title,
        HEADER,
        ("condition", "k", *COLUMNS),
        tuple((*leading, *(tell(summed(group)) for tell in COLUMNS.values())) for leading, group in groups),
        tuple(goal.sentence for goal in goals(summed(judged))),
    )


def comma_separated(judged: Iterable[Trial]) -> str:
    """One line per trial, with all its numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [each.name for each in fields(Trial)]
    writer.writerow([{"shots": "k"}.get(name, name) for name in names])
    for trial in judged:
        writer.writerow([_cell(getattr(trial, name)) for name in names])
    return text.getvalue()


def plain(judged: Sequence[Trial]) -> dict[str, Any]:
    """Numbers and words, ready for JSON."""
    lines = [{"condition": name, "k": k, **_numbers(summed(group))} for (name, k), group in _by_condition(judged)]
    together = summed(judged)
    return {"lines": lines, TOGETHER: _numbers(together), "goals": [asdict(goal) for goal in goals(together)]}


COUNTS = ("accepted", "harmful", "let_through", "attainable", "let_through_share", "kept_share", "coverage")


def _numbers(summary: Summary) -> dict[str, Any]:
    draws = {
        "source_accuracy": summary.source,
        "candidate_gain": summary.gains,
        "returned_gain": summary.kept,
        "estimated_gain": summary.estimates,
    }
    means = {
        name: {"mean": statistics.fmean(values), "spread": statistics.pstdev(values), "n": len(values)}
        if values
        else None
        for name, values in draws.items()
    }
    return {"runs": summary.runs, **means, **{name: getattr(summary, name) for name in COUNTS}}


# picture


def picture(judged: Sequence[Trial], key: str) -> list[Picture]:
    """The estimated gain of every candidate against its true gain; no picture where nothing was estimated."""
    estimates: dict[str, list[Estimate]] = {}
    for trial in judged:
        if trial.estimate is not None and trial.low is not None and trial.high is not None:
            estimate = Estimate(trial.gain, trial.estimate, trial.low, trial.high)
            estimates.setdefault(trial.condition, []).append(estimate)
    if not estimates:
        return []
    summary = summed(judged)
    facts = "; ".join(
        f"{name}: {words.counted(len(group), 'run')}, true {_over([each.truth for each in group], '+z')}, "
        f"estimated {_over([each.point for each in group], '+z')}"
        for name, group in estimates.items()
    )
    coverage = (
        f"{summary.covered} of {summary.intervals} intervals ({_percent(summary.coverage)}) hold the true gain and "
        "cross the diagonal"
    )
    svg = figures.estimates(
        estimates,
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

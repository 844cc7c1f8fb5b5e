"""Trust: the estimated gains of adaptations beside their true gains on test images, and the goals for both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.results import Outcome, grouped
from fewshift.report import prose as words
from fewshift.trust.gain import LEVEL

HARM = 1.0  # points of accuracy that may be lost before it counts
MILD = 10.0  # points below its home accuracy at which a network has met a mild shift
MOST_HARMFUL = 2.0  # percent of runs
LEAST_KEPT = 92.0  # percent of the gain
LEAST_KEPT_MILD = 60.0  # percent of the gain on mild shifts
COVERAGE = (87.0, 95.0)  # percent of runs
DECIMALS = 6  # of points: less than one image makes, more than rounding errors

NetworkName = tuple[str, str]  # a data set, and the name of a source network


@dataclass(frozen=True)
class Trial:
    """One adaptation: the accuracies of three networks on the test images in percent, and the estimate of the gain.

    `tuned`: thresholds were chosen with runs of this target in sight. `home` is the accuracy of the source network on
    clean, unseen images of its own domains. `strength` is that of the evidence: the guard accepts above a threshold.
    """

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
    corruption: str | None = None
    tuned: bool = False
    home: float | None = None  # None where it was not measured
    strength: float | None = None  # None where it was not recorded, minus infinity where there was no evidence

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

    @property
    def mild(self) -> bool | None:
        """Whether the source network is nearly as good as at home; None where its home accuracy is unknown."""
        return None if self.home is None else round(self.home - self.source, DECIMALS) <= MILD


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


def trials(outcomes: Iterable[Outcome], homes: Mapping[NetworkName, float]) -> list[Trial]:
    """The outcomes whose adaptation was judged; a cell that stands in several columns counts once.

    If one of these columns was tuned on, so was the cell.
    """
    judged = grouped((outcome for outcome in outcomes if "trust" in outcome.result), lambda outcome: outcome.cell.key)
    return [
        _trial(same[-1], any(outcome.column.tuned for outcome in same), homes.get(_network(same[-1].cell)))
        for same in judged.values()
    ]


def home_accuracies(outcomes: Iterable[Outcome]) -> dict[NetworkName, float]:
    """Each source network's accuracy on clean, unseen images of its own domains, in percent, over all such runs."""
    at_home = [outcome for outcome in outcomes if "trust" in outcome.result and _is_home(outcome.cell)]
    return {
        network: statistics.fmean(100 * outcome.result["trust"]["accuracy"]["source"] for outcome in group)
        for network, group in grouped(at_home, lambda outcome: _network(outcome.cell)).items()
    }


def _is_home(cell: Cell) -> bool:
    return cell.target == OWN_SOURCE and cell.corruption is None and cell.damage is None


def _network(cell: Cell) -> NetworkName:
    return cell.dataset, cell.source


def _trial(outcome: Outcome, tuned: bool, home: float | None) -> Trial:
    facts = outcome.result["trust"]
    gain = facts["gain"] or {}
    strength = facts.get("strength")
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
        corruption=outcome.cell.corruption,
        tuned=tuned,
        home=home,
        strength=-math.inf if strength is None and "strength" in facts else strength,
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


def halves(judged: Sequence[Trial]) -> dict[str, list[Trial]]:
    """The trials that were tuned on, and those that check the result; all under "" if none was tuned on."""
    if not any(trial.tuned for trial in judged):
        return {"": list(judged)}
    parts = {
        "tuned on": [trial for trial in judged if trial.tuned],
        "checked": [trial for trial in judged if not trial.tuned],
    }
    return {half: part for half, part in parts.items() if part}


def mild_shifts(judged: Iterable[Trial]) -> list[Trial]:
    """The trials whose source network is nearly as good as at home."""
    return [trial for trial in judged if trial.mild]


def goals(judged: Sequence[Trial]) -> tuple[Goal, ...]:
    """What the guard and the interval have to reach to be trusted, on trials that were not tuned on."""
    checked = [trial for trial in judged if not trial.tuned]
    where = "in the checked half " if len(checked) < len(judged) else ""
    summary, (least, most) = summed(checked), COVERAGE
    passed, coverage = summary.let_through_share, summary.coverage
    return (
        Goal(
            None if passed is None else passed <= MOST_HARMFUL,
            f"{where}harmful adaptations were let through in {summary.let_through} of "
            f"{words.counted(summary.runs, 'run')} ({percent(passed)}), at most {MOST_HARMFUL:g} % are wanted",
        ),
        _kept_goal(summary, LEAST_KEPT, where),
        _mild_goal(checked, where),
        Goal(
            None if coverage is None else least <= coverage <= most,
            f"{where}the {100 * LEVEL:.0f} % intervals held the true gain in {summary.covered} of "
            f"{words.counted(summary.intervals, 'run')} ({percent(coverage)}), {least:g} to {most:g} % are wanted",
        ),
    )


def _mild_goal(checked: Sequence[Trial], where: str) -> Goal:
    if all(trial.mild is None for trial in checked):
        return Goal(None, f"{where}no network was tested on its own source, so it is unknown which shifts are mild")
    return _kept_goal(summed(mild_shifts(checked)), LEAST_KEPT_MILD, f"{where}on mild shifts ")


def _kept_goal(summary: Summary, least: float, where: str) -> Goal:
    kept = summary.kept_share
    if kept is None:
        return Goal(None, f"{where}no adaptation would have gained anything, so there was nothing to keep")
    return Goal(
        kept >= least, f"{where}{percent(kept)} of the attainable gain was kept, at least {least:g} % is wanted"
    )


def percent(share: float | None) -> str:
    """A share in words; a dash where there is none."""
    return "-" if share is None else f"{share:.1f} %"

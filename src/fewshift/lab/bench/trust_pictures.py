"""Pictures of judged adaptations: estimates against the truth, and what a stricter guard would keep and let through."""

from __future__ import annotations

from collections.abc import Sequence

from fewshift.lab.bench.results import grouped
from fewshift.lab.bench.trust import HARM, LEAST_KEPT, MOST_HARMFUL, Trial, halves, percent, summed
from fewshift.lab.bench.trust_tables import over
from fewshift.report import prose as words
from fewshift.report import run_figures as figures
from fewshift.report.pictures import Picture
from fewshift.report.run_figures import Estimate, TradeOff
from fewshift.trust.gain import LEVEL


def trust_pictures(judged: Sequence[Trial], key: str) -> list[Picture]:
    """Every figure of judged adaptations, each only where it has data."""
    return [*estimates(judged, key), *trade_offs(judged, key)]


def estimates(judged: Sequence[Trial], key: str) -> list[Picture]:
    """The estimated gain of every candidate against its true gain; no picture where nothing was estimated."""
    groups: dict[str, list[Estimate]] = {}
    for trial in judged:
        if trial.estimate is not None and trial.low is not None and trial.high is not None:
            estimate = Estimate(trial.gain, trial.estimate, trial.low, trial.high)
            groups.setdefault(trial.condition, []).append(estimate)
    if not groups:
        return []
    summary = summed(judged)
    facts = "; ".join(
        f"{name}: {words.counted(len(group), 'run')}, true {over([each.truth for each in group], '+z')}, "
        f"estimated {over([each.point for each in group], '+z')}"
        for name, group in groups.items()
    )
    coverage = (
        f"{summary.covered} of {summary.intervals} intervals ({percent(summary.coverage)}) hold the true gain and "
        "cross the diagonal"
    )
    svg = figures.estimates(
        groups,
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


def trade_offs(judged: Sequence[Trial], key: str) -> list[Picture]:
    """Harm let through against gain kept for a guard of any strictness, a picture for each half.

    Runs without a recorded strength of their evidence are left out.
    """
    pictures = []
    for half, members in halves([trial for trial in judged if trial.strength is not None]).items():
        groups = sorted(grouped(members, lambda trial: trial.shots).items(), key=lambda group: group[0] or 0)
        lines = [
            TradeOff("no labels" if shots is None else f"k = {shots}", trade_off(group), _default(group))
            for shots, group in groups
            if summed(group).attainable
        ]
        if lines:
            pictures.append(_trade_off_picture(lines, half, f"{key}trade-off-{half.replace(' ', '-')}"))
    return pictures


def trade_off(judged: Sequence[Trial]) -> list[tuple[float, float]]:
    """Gain kept (percent of the attainable) and harm let through (percent of runs) at every threshold.

    From the strictest guard, which refuses everything, to one that accepts whatever has evidence.
    """
    attainable = summed(judged).attainable
    strengths = {trial.strength for trial in judged if trial.strength is not None and trial.strength > float("-inf")}
    points = [(0.0, 0.0)]
    kept, harmful = 0.0, 0
    by_strength = grouped(judged, lambda trial: trial.strength)
    for strength in sorted(strengths, reverse=True):
        kept += sum(trial.gain for trial in by_strength[strength])
        harmful += sum(trial.harmful for trial in by_strength[strength])
        points.append((100 * kept / attainable, 100 * harmful / len(judged)))
    return points


def _default(judged: Sequence[Trial]) -> tuple[float, float]:
    """Where the guard stood in these runs."""
    summary = summed(judged)
    return summary.kept_share or 0.0, summary.let_through_share or 0.0


def _trade_off_picture(lines: Sequence[TradeOff], half: str, key: str) -> Picture:
    facts = "; ".join(
        f"{line.name}: {percent(line.default[0])} of the gain kept and {percent(line.default[1])} of runs harmed, "
        f"at the lowest threshold {percent(line.points[-1][0])} and {percent(line.points[-1][1])}"
        for line in lines
    )
    what = f"Harm let through against gain kept as the guard becomes less strict{half and f', {half}'}"
    svg = figures.trade_offs(
        lines,
        across="gain kept, % of the attainable",
        label="harmful and let through, % of runs",
        goal=(LEAST_KEPT, MOST_HARMFUL),
        key=key,
        alt=f"{what}. {facts}.",
    )
    caption = (
        f"{what}: one step per run that is accepted in addition, the strongest evidence first. Large marks: the "
        f"default. Harmful: more than {HARM:g} point lost. Dashed: the goals, at most {MOST_HARMFUL:g} % harmful and "
        f"at least {LEAST_KEPT:g} % kept."
    )
    return Picture(svg, caption)

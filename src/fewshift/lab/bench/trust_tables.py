"""Tables of judged adaptations: a listing for people, one line per run as CSV, numbers for JSON."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fewshift.lab.bench.results import grouped
from fewshift.lab.bench.trust import HARM, MILD, Summary, Trial, goals, halves, mild_shifts, percent, summed
from fewshift.report import prose as words
from fewshift.report.tables import Listing
from fewshift.trust.gain import LEVEL

TOGETHER, MILDLY = "all", "mild shifts"
HEADER = (
    "Accuracies and shares in %, gains over the source network in points, all on the same test images; "
    "mean ± population standard deviation over all targets and seeds. The candidate is the adapted network before the "
    f"guard. It is harmful if it is worse than the source by more than {HARM:g} point, and let through if the guard "
    "accepted it. Gain kept: the gain of the returned networks, as a share of what a perfect guard would keep. "
    f"Coverage: runs whose {100 * LEVEL:.0f} % interval holds the true gain of the candidate."
)
MILD_HEADER = (
    f" Mild shifts: runs whose source network is at most {MILD:g} points below its accuracy on clean, unseen images of "
    "its own domains."
)
HALVES_HEADER = (
    " Tuned on: runs that were looked at while thresholds were chosen. Checked: all others; the goals are about them."
)

COLUMNS: dict[str, Callable[[Summary], str]] = {
    "runs": lambda summary: str(summary.runs),
    "source accuracy": lambda summary: over(summary.source),
    "true gain, candidate": lambda summary: over(summary.gains, "+z"),
    "true gain, returned": lambda summary: over(summary.kept, "+z"),
    "estimated gain": lambda summary: over(summary.estimates, "+z"),
    "accepted": lambda summary: percent(100 * summary.accepted / summary.runs),
    "harmful candidates": lambda summary: str(summary.harmful),
    "harmful let through": lambda summary: f"{summary.let_through} ({percent(summary.let_through_share)})",
    "gain kept": lambda summary: percent(summary.kept_share),
    "coverage": lambda summary: percent(summary.coverage),
}


@dataclass(frozen=True)
class _Part:
    """Trials that share a line."""

    condition: str
    shots: str
    trials: Sequence[Trial]


def listing(title: str, judged: Sequence[Trial]) -> Listing:
    """For each half a line per condition and k, lines that join them, and whether the goals were met."""
    parts = halves(judged)
    divided = "" not in parts
    lines = [
        (*([half] if divided else []), part.condition, part.shots, *_told(part.trials))
        for half, members in parts.items()
        for part in _parts(members)
    ]
    return Listing(
        title,
        HEADER + MILD_HEADER * bool(mild_shifts(judged)) + HALVES_HEADER * divided,
        (*(["half"] if divided else []), "condition", "k", *COLUMNS),
        tuple(lines),
        tuple(goal.sentence for goal in goals(judged)),
    )


def _parts(judged: Sequence[Trial]) -> Iterator[_Part]:
    """A part for each condition and k; then, where there are several, one for each k, for mild shifts and for all."""
    groups = _by_condition(judged)
    for (condition, shots), group in groups:
        yield _Part(condition, "-" if shots is None else str(shots), group)
    if len(groups) == 1:
        return
    shots_groups = _by_shots(judged)
    for shots, group in shots_groups if len(shots_groups) > 1 else ():
        yield _Part(TOGETHER, "-" if shots is None else str(shots), group)
    if mild := mild_shifts(judged):
        yield _Part(MILDLY, "", mild)
    yield _Part(TOGETHER, "", judged)


def _told(judged: Sequence[Trial]) -> tuple[str, ...]:
    summary = summed(judged)
    return tuple(tell(summary) for tell in COLUMNS.values())


def _by_condition(judged: Iterable[Trial]) -> list[tuple[tuple[str, int | None], list[Trial]]]:
    """Groups with one condition and k, in the order of appearance."""
    return list(grouped(judged, lambda trial: (trial.condition, trial.shots)).items())


def _by_shots(judged: Iterable[Trial]) -> list[tuple[int | None, list[Trial]]]:
    """Groups with one k, the smallest first."""
    return sorted(grouped(judged, lambda trial: trial.shots).items(), key=lambda group: group[0] or 0)


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
    parts = halves(judged)
    lines = [
        {"half": half or None, "condition": name, "k": k, **_numbers(group)}
        for half, members in parts.items()
        for (name, k), group in _by_condition(members)
    ]
    return {
        "lines": lines,
        **_joined(judged),
        **({"halves": {half: _joined(members) for half, members in parts.items()}} if "" not in parts else {}),
        "goals": [asdict(goal) for goal in goals(judged)],
    }


def _joined(judged: Sequence[Trial]) -> dict[str, Any]:
    """The numbers of all trials, of each k, and of mild shifts."""
    mild = mild_shifts(judged)
    return {
        TOGETHER: _numbers(judged),
        "by_k": [{"k": k, **_numbers(group)} for k, group in _by_shots(judged)],
        "mild_shifts": _numbers(mild) if mild else None,
    }


COUNTS = ("accepted", "harmful", "let_through", "attainable", "let_through_share", "kept_share", "coverage")


def _numbers(judged: Sequence[Trial]) -> dict[str, Any]:
    summary = summed(judged)
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


def over(values: Sequence[float], sign: str = "") -> str:
    """Mean and spread in words; a dash where there is nothing."""
    return words.over_draws(values, sign) if values else "-"


def _cell(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else value

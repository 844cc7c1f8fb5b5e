"""What `compare` hands back: several methods on the same held-out images, as numbers, a sentence, a picture, a page."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fewshift.core._display import Displayed
from fewshift.core.support import Support
from fewshift.report import figures, prose
from fewshift.trust.comparison import SOURCE, Ranking, Row
from fewshift.trust.gain import LEVEL, Gain
from fewshift.trust.held_out import INSIDE, PixelAnswers


@dataclass(frozen=True, repr=False)
class Comparison(Displayed, Ranking):
    """Several methods on the same held-out images. The source network is among them, named or not."""

    validate: str  # "cv", "loo" or "labelled images"
    network: str
    support: Support | None
    seed: int
    seconds: float

    @property
    def title(self) -> str:
        """What was compared."""
        return f"Comparison of {prose.counted(len(self.rows), 'method')} on {self.network}"

    @property
    def facts(self) -> dict[str, str]:
        """The share that each method has right, the best first, and which leads."""
        right = {row.label: f"{row.accuracy:.1f} % right" for row in self.ranked}
        gains = {row.label: row.gain for row in self.judged if row.label != SOURCE and row.gain is not None}
        compared = {
            label: f"{right[label]}, {gain.point:+.1f} points, {prose.interval(gain)}" for label, gain in gains.items()
        }
        return right | compared | self.failures | {"verdict": self.words}

    @property
    def of_pixels(self) -> bool:
        """Whether an image counts by the share of its pixels that is right."""
        return isinstance(self.source.evidence.held, PixelAnswers)

    @property
    def failures(self) -> dict[str, str]:
        """Why methods have no numbers, by their labels."""
        return {row.label: prose.missing(row.evidence) for row in self.rows if row.gain is None}

    @property
    def words(self) -> str:
        """Which method leads, and whether it is clearly ahead."""
        if not self.judged:
            reasons = "; ".join(f"{label}: {reason}" for label, reason in self.failures.items())
            return f"no method could be judged: {reasons}"
        first, *others = self.ranked
        gain = first.gain
        assert gain is not None  # as of all that are judged
        kind = "held-out" if self.validate in INSIDE else "labelled"
        what = f"{'the pixels of ' if self.of_pixels else ''}{gain.images} {kind} images"
        ahead = [] if first.label == SOURCE else [self._ahead(first.label, SOURCE, f"the {SOURCE}")]
        if others and others[0].label != SOURCE:
            ahead.append(self._ahead(first.label, others[0].label, f"{others[0].label}, the next"))
        elif others:
            ahead[-1:] = [self._ahead(first.label, SOURCE, f"the {SOURCE}, the next")]
        verdict = f": {'; '.join(ahead)}" if ahead else ""
        weak = f" (weak evidence: {prose.weakness(self.source.evidence)})" if self.weak else ""
        return f"{first.label} leads with {gain.after:.1f} % of {what} right{verdict}{weak}"

    def _ahead(self, first: str, second: str, name: str) -> str:
        gain = self.difference(first, second)
        how = "clearly ahead of" if gain.low > 0 else "not clearly ahead of" if gain.point >= 0 else "behind"
        return f"{how} {name} ({gain.point:+.1f} points, {prose.interval(gain)})"

    @property
    def rule(self) -> str | None:
        """How a method was selected, in one sentence."""
        tempered = "" if self.of_pixels else ", each under its best temperature"
        lowest = f"the method with the lowest cross-entropy on held-out images{tempered} (of equals the first named)"
        clear = ", if `adapt` would hand it over, otherwise the source network"
        return {None: None, "best": lowest, "clear": lowest + clear}[self.select]

    def table(self) -> list[dict[str, str]]:
        """One row for each method, as words; numbers are in `rows` and `to_json`."""
        return [_cells(row) for row in self.rows]

    def picture(self) -> str:
        """The gains with their intervals as one SVG; empty where no method could be judged."""
        gains = {row.label: row.gain for row in self.judged if row.gain is not None}
        if not gains:
            return ""
        spoken = "; ".join(
            f"{label}: {gain.point:+.1f}, {prose.interval(gain)}" for label, gain in gains.items() if label != SOURCE
        )
        return figures.gains(
            {
                label: (gain.point, *((0.0, 0.0) if label == SOURCE else (gain.low, gain.high)))
                for label, gain in gains.items()
            },
            label="gain over the source, points of accuracy",
            key="gains",
            alt=f"Gain over the source network on held-out images, in points. {spoken or 'No other method'}.",
        )

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page: table, picture, every difference."""
        from fewshift.report.pages import comparison_page

        return comparison_page(self, path)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        return {
            "words": self.words,
            "validate": self.validate,
            "rows": [
                {
                    "label": row.label,
                    "method": row.method.name,
                    "settings": row.method.settings(),
                    "accuracy": row.accuracy,
                    "cross_entropy": row.cross_entropy,
                    "accepted": row.accepted,
                    "gain": _plain(row.gain),
                    "reason": self.failures.get(row.label),
                    "seconds": row.seconds,
                }
                for row in self.rows
            ],
            "differences": {
                one: {other: _plain(gain) for other, gain in row.items()} for one, row in self.differences.items()
            },
            "select": self.select,
            "rule": self.rule,
            "selected": self.selected,
            "selected_gain": _plain(self.selected_gain),
            "seed": self.seed,
            "seconds": self.seconds,
        }


def _cells(row: Row) -> dict[str, str]:
    gain = row.gain
    compared = gain is not None and row.label != SOURCE
    return {
        "method": row.label,
        "right, %": "-" if gain is None else f"{gain.after:.1f}",
        "gain": f"{gain.point:+.1f}" if gain and compared else "-",
        f"{100 * LEVEL:.0f} % interval": f"{gain.low:+.1f} to {gain.high:+.1f}" if gain and compared else "-",
        "became right": str(gain.wins) if gain and compared else "-",
        "became wrong": str(gain.losses) if gain and compared else "-",
        "cross-entropy": "-" if row.cross_entropy is None else f"{row.cross_entropy:.3f}",
        "adapt says": ("take it" if row.accepted else "leave it") if compared else "-",
        "seconds": f"{row.seconds:.1f}",
    }


def _plain(gain: Gain | None) -> dict[str, Any] | None:
    """For JSON, which knows no infinity."""
    if gain is None:
        return None
    return {key: None if value == math.inf else value for key, value in asdict(gain).items()}

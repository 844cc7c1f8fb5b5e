"""What `learning_curve` hands back: the gain against k, as numbers, sentences, a picture, a page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from fewshift.core._display import Displayed
from fewshift.core.method import Method
from fewshift.core.support import Support
from fewshift.errors import FewshiftError
from fewshift.report import figures
from fewshift.report.prose import counted
from fewshift.trust.gain import LEVEL
from fewshift.trust.learning_curve import SMALL, Point, Step


class Mark(Enum):
    """How a curve does not rise: what the picture says, at that k."""

    FALLS = "best: k = {k}"
    LOOKS_FLAT = "looks flat"
    NO_HELP = "labels do not help"
    FLAT = "flat from k = {k}"


VERDICTS = {  # what the sentence says
    Mark.FALLS: "no larger k is better than k = {k}",
    Mark.LOOKS_FLAT: "the curve looks flat from k = {k} on",
    Mark.NO_HELP: "labels do not help {method} here",
    Mark.FLAT: "the curve is flat from k = {k} on",
}

HIDDEN = 3.0  # points: a rise this large that could go unseen is mentioned
POINTS = " points"
MORE = "take more draws, or more images to judge by"


@dataclass(frozen=True, repr=False)
class LearningCurve(Displayed):
    """The gain against k, and whether more labels are worth it.

    `flat_from` is the smallest measured k from which on the curve is flat (see `trust.learning_curve`). It is None
    where the curve still rises, where a larger k adds a point or more but not clearly, and where there is one draw.
    `step` is the comparison that decided; its `high` is the rise that may have gone unseen.

    Draws from one support share images, and more of them as k nears its size: there the spread is too small.
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
    support: Support = field(compare=False)
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
            return f"these k are too close together to show a rise: {_at(first, POINTS)}, {_at(last)}: measure others"
        return self._rises(self.step) if self.mark is None else self._flat(self.step, self.mark)

    def _rises(self, step: Step) -> str:
        both = f"{_at(self.at(step.shots), POINTS)}, {_at(self.at(step.more))}"
        if step.clear:
            return f"the curve still rises at k = {step.more}: {both}: label more"
        interval = f"{step.low:+.1f} to {step.high:+.1f}"
        return f"whether the curve rises is not clear: {both}, a difference of {interval}: {MORE}"

    def _flat(self, step: Step, mark: Mark) -> str:
        below, above = self.at(step.shots), self.at(step.more)
        here = _at(below, POINTS) if mark is Mark.NO_HELP else f"{below.mean:+.1f} points there"
        verdict = f"{VERDICTS[mark].format(k=step.shots, method=self.method.name)}: {here}, {_at(above)}"
        if mark is not Mark.LOOKS_FLAT:
            return verdict
        images = counted(self.images, "image")
        return (
            f"{verdict}; but with {images} to judge by, a rise of up to {step.high:.1f} points could go unseen: {MORE}"
        )

    @property
    def mark(self) -> Mark | None:
        """How the curve does not rise from `flat_from` on, for the sentence and the picture; None where it may."""
        step = self.step
        if step is None or self.flat_from is None:
            return None
        below, above = self.at(step.shots), self.at(step.more)
        if step.high < 0:
            return Mark.FALLS
        if step.high >= HIDDEN:
            return Mark.LOOKS_FLAT
        helpless = max(below.low, above.low) <= 0 and max(below.mean, above.mean) < SMALL
        return Mark.NO_HELP if helpless else Mark.FLAT

    @property
    def luck(self) -> str:
        """How much it matters which images were labelled, in one sentence."""
        known = [point for point in self.points if point.spread is not None and point.chance is not None]
        if not known:
            return "how much it matters which images you label is not known: take more draws, or label more"
        matters = [point for point in known if point.matters]
        first = (matters or known)[0]
        numbers = (
            f"results vary by {first.spread:.1f} points at k = {first.shots}, "
            f"and sampling noise alone explains {first.chance:.1f}"
        )
        if not matters:
            return f"which images you labelled made no measurable difference: {numbers}"
        return f"which images you labelled matters at k = {', '.join(str(point.shots) for point in matters)}: {numbers}"

    @property
    def title(self) -> str:
        """What was measured, and how."""
        right = f"has {self.source:.1f} % of the {self.support.kind.unit}s right"
        where = "outside the support" if self.outside else "over all draws"
        return (
            f"gain of {self.method.name} in points of accuracy over the source network, which {right}; "
            f"k {self.unit}, {counted(self.draws, 'draw')}, judged by {counted(self.images, 'image')} {where}"
        )

    @property
    def facts(self) -> dict[str, str]:
        """The gain at each k, and the verdict."""
        gains = {
            f"k = {point.shots}": f"{point.mean:+.1f} ({point.low:+.1f} to {point.high:+.1f})" for point in self.points
        }
        return gains | {"verdict": self.words, "luck": self.luck}

    @property
    def unit(self) -> str:
        """What k counts."""
        return self.support.kind.shots_mean

    def at(self, k: int) -> Point:
        """The point of a k that was measured."""
        points = {point.shots: point for point in self.points}
        if k not in points:
            raise FewshiftError(f"k = {k} was not measured: choose one of {', '.join(map(str, points))}")
        return points[k]

    def table(self) -> list[dict[str, str]]:
        """One row for each k, as words; numbers are in `points` and `to_json`."""
        return [
            {
                "k": str(point.shots),
                "gain": f"{point.mean:+.1f}",
                "spread": "-" if point.spread is None else f"{point.spread:.1f}",
                "by chance": "-" if point.chance is None else f"{point.chance:.1f}",
                "lowest": f"{point.lowest:+.1f}",
                "highest": f"{point.highest:+.1f}",
                f"{100 * LEVEL:.0f} % interval": f"{point.low:+.1f} to {point.high:+.1f}",
            }
            for point in self.points
        ]

    def picture(self) -> str:
        """An SVG: the mean gain against k with the spread over draws, and every draw as a dot."""
        spoken = "; ".join(f"{_at(point)} ({point.lowest:+.1f} to {point.highest:+.1f})" for point in self.points)
        words, k = self.mark, self.flat_from
        mark = None if words is None or k is None else (k, words.value.format(k=k))
        return figures.gain_curve(
            {point.shots: point.gains for point in self.points},
            across=f"k, {self.unit}",
            label="gain, points of accuracy",
            mark=mark,
            key="learning-curve",
            alt=f"Gain over the source network, mean and range of {counted(self.draws, 'draw')}: {spoken}.",
        )

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page that a colleague can read."""
        from fewshift.report.pages import curve_page

        return curve_page(self, path)

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "words": self.words,
            "luck": self.luck,
            "flat_from": self.flat_from,
            "source": self.source,
            "points": [point.to_json() for point in self.points],
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


def _at(point: Point, unit: str = "") -> str:
    return f"{point.mean:+.1f}{unit} at k = {point.shots}"

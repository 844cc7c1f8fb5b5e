"""Figures of the documentation: our curves beside the paper's, as PNG files on a light ground.

A method has one colour in all of them. Ours is solid with a band of one standard deviation, the paper's dashed. Names
stand at the end of the lines, so that nobody has to look them up. The same data give the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fewshift.core._files import whole
from fewshift.report.drawing import COLOURS, DASHES, FAINT, INK, PAPER, STYLE, mean_and_spread

SIZE = (8.0, 4.6)  # inches: 800 by 460 units on a page
DOTS = 200  # for each inch: sharp on a dense screen
APART = 0.052  # of the height: the least distance of two names
LEFT, TOP = 0.085, 0.915  # of the plot, in shares of the picture
NOTE_LINE = 0.0375  # of the height
LONGEST_LINE = 104  # letters beneath the plot
QUIET = "#6b6b73"
ROOM = 0.06  # of the height, above and below the lines
LEAST_SPAN = 10.0  # points: noise shall not look like a difference


class MethodStyle(NamedTuple):
    """How a method is called and drawn in every figure."""

    name: str
    colour: str


METHOD_STYLES = {
    "source": MethodStyle("source network", QUIET),
    "testtime-bn": MethodStyle("test-time BN", COLOURS["second"]),
    "tent": MethodStyle("Tent", COLOURS["sixth"]),
    "adabn": MethodStyle("AdaBN", COLOURS["eighth"]),
    "l2": MethodStyle("L2", COLOURS["fourth"]),
    "lccs": MethodStyle("LCCS", COLOURS["first"]),
    "auto": MethodStyle("auto", COLOURS["fifth"]),
}


class ComparedCurve(NamedTuple):
    """A method's values, one per draw, at every x, and the paper's. A level does not depend on x, and has one."""

    method: str
    ours: Mapping[float, Sequence[float]]
    paper: Mapping[float, float]
    shots: int | None = None  # where all of its points have the same
    level: bool = False

    @property
    def name(self) -> str:
        """What stands at its line."""
        name = METHOD_STYLES[self.method].name
        return name if self.shots is None else f"{name}, k = {self.shots}"


class ComparedFigure(NamedTuple):
    """Curves, and the words around them."""

    curves: Sequence[ComparedCurve]
    across: str
    label: str
    ticks: Mapping[float, str]
    note: str  # in small letters beneath


def draw_compared(figure: ComparedFigure, path: Path) -> Path:
    """Write a PNG."""
    with matplotlib.style.context(["default", STYLE | {"lines.linewidth": 2.0, "lines.markersize": 5.5}]):
        canvas = Figure(figsize=SIZE, facecolor=PAPER)
        note = wrapped(figure.note)
        bottom = 0.14 + NOTE_LINE * len(note)
        axes = canvas.add_axes((LEFT, bottom, 0.70, TOP - bottom), facecolor=PAPER)
        _paint(axes, figure)
        canvas.text(LEFT, 0.025, "\n".join(note), color=QUIET, fontsize=9, va="bottom", linespacing=1.4)
        with whole(path) as draft:
            canvas.savefig(draft, format="png", dpi=DOTS, metadata={"Software": None})
    return path


def wrapped(note: str) -> list[str]:
    """The lines of a note, none of which leaves the picture."""
    return [line for paragraph in note.splitlines() for line in textwrap.wrap(paragraph, LONGEST_LINE)]


def _paint(axes: Any, figure: ComparedFigure) -> None:
    first, last = min(figure.ticks), max(figure.ticks)
    axes.set_xscale("log")
    axes.set_xticks(list(figure.ticks), list(figure.ticks.values()))
    axes.minorticks_off()
    axes.set_xlim(first / (last / first) ** 0.03, last * (last / first) ** 0.015)
    axes.set_ylim(*span_of_curves(figure.curves))
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))  # whole points
    axes.set_xlabel(figure.across)
    axes.set_title(figure.label, loc="left", fontsize=11, color=INK, pad=10)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for curve in figure.curves:
        _paint_curve(axes, curve, (first, last))
    _name_ends(axes, figure.curves)
    if any(curve.paper for curve in figure.curves):
        samples = [
            Line2D([], [], color=INK, linewidth=2),
            Line2D([], [], color=INK, linewidth=1.3, alpha=0.75, linestyle=DASHES),
        ]
        words = ["measured here", "the paper's"]
        form = {"ncols": 2, "loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        axes.legend(samples, words, handlelength=2.6, columnspacing=1.6, fontsize=10, **form)


def _paint_curve(axes: Any, curve: ComparedCurve, ends: tuple[float, float]) -> None:
    colour = METHOD_STYLES[curve.method].colour
    across = list(ends) if curve.level else list(curve.ours)
    pairs = [mean_and_spread(values) for values in curve.ours.values()] * (2 if curve.level else 1)
    low, middle, high = ([mean + sign * spread for mean, spread in pairs] for sign in (-1, 0, 1))
    axes.fill_between(across, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(across, middle, color=colour, marker="" if curve.level else "o")
    if curve.paper:
        there = list(ends) if curve.level else list(curve.paper)
        values = list(curve.paper.values()) * (2 if curve.level else 1)
        shape = {"marker": "" if curve.level else "o", "markerfacecolor": PAPER, "markersize": 4.5}
        axes.plot(there, values, color=colour, linestyle=DASHES, linewidth=1.3, alpha=0.75, **shape)


def _name_ends(axes: Any, curves: Sequence[ComparedCurve]) -> None:
    """Names right of the plot, at the height of the last point of our line or as near as there is room."""
    low, high = axes.get_ylim()
    heights = [(mean_and_spread(list(curve.ours.values())[-1])[0] - low) / (high - low) for curve in curves]
    for curve, height in zip(curves, spread_apart(heights, APART), strict=True):
        colour = METHOD_STYLES[curve.method].colour
        where = {"xycoords": "axes fraction", "ha": "left", "va": "center", "annotation_clip": False}
        axes.annotate(curve.name, (1.015, height), color=colour, fontsize=11, **where)


def spread_apart(heights: Sequence[float], apart: float) -> list[float]:
    """Heights moved as little as needed for any two to be `apart`, in the same order, and within 0 to 1 if that fits.

    Neighbours that are too near form a block around the middle of where its members want to be.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    blocks: list[list[int]] = []
    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and _bottom(blocks[-1], heights, apart) - _top(blocks[-2], heights, apart) < apart:
            upper = blocks.pop()
            blocks[-1] += upper
    placed = [0.0] * len(heights)
    for block in blocks:
        for step, index in enumerate(block):
            placed[index] = _bottom(block, heights, apart) + step * apart
    return placed


def _bottom(block: Sequence[int], heights: Sequence[float], apart: float) -> float:
    """Where the lowest name of a block stands; blocks do not leave the plot."""
    length = (len(block) - 1) * apart
    middle = sum(heights[index] for index in block) / len(block)
    return max(0.0, min(1.0 - length, middle - length / 2))


def _top(block: Sequence[int], heights: Sequence[float], apart: float) -> float:
    return _bottom(block, heights, apart) + (len(block) - 1) * apart


def span_of_curves(curves: Sequence[ComparedCurve]) -> tuple[float, float]:
    """The range of the vertical axis: every line, ours with its band, and a margin."""
    pairs = [mean_and_spread(values) for curve in curves for values in curve.ours.values()]
    numbers = [mean + sign * spread for mean, spread in pairs for sign in (-1, 1)]
    numbers += [value for curve in curves for value in curve.paper.values()]
    low, high = min(numbers), max(numbers)
    margin = max(ROOM * (high - low), (LEAST_SPAN - (high - low)) / 2)
    return low - margin, min(high + margin, max(100.0, high))

"""Figures of a benchmark run: data in, one SVG out. `drawing` has the style."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from fewshift.report.drawing import (
    DASHED,
    DASHES,
    FAINT,
    FIRST,
    HEIGHT,
    MARKS,
    PAPER,
    WIDTH,
    drawn,
    legend_height,
    mean_and_spread,
    name_lines,
    name_rows,
    short,
)
from fewshift.report.figures import LEAST_POINTS, MANY_CLASSES

MOST_LINES = len(MARKS)  # of one picture


class Curve(NamedTuple):
    """A line: for every x its values, one per draw. A level has one x and holds for all."""

    name: str
    points: Mapping[float, Sequence[float]]
    level: bool = False


def curves(
    lines: Sequence[Curve],
    *,
    across: str,
    label: str,
    ticks: Sequence[float],
    span: tuple[float, float],
    key: str,
    alt: str,
) -> str:
    """Mean ± standard deviation over the draws against x, on a logarithmic axis; levels are dashed."""

    def paint(axes: Any) -> None:
        axes.set(xlabel=across, ylabel=label, xscale="log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        handles = []
        for line, mark in zip(lines, MARKS, strict=False):
            means, spreads = zip(*map(mean_and_spread, line.points.values()), strict=True)
            if line.level:
                handles += axes.plot((ticks[0], ticks[-1]), means * 2, linestyle=DASHES, **mark)
                axes.axhspan(means[0] - spreads[0], means[0] + spreads[0], color=mark["color"], alpha=0.1, linewidth=0)
            else:
                bars = {"yerr": spreads, "elinewidth": 0.9, "capsize": 2.5}
                handles.append(axes.errorbar(list(line.points), means, **bars, **mark).lines[0])
        name_lines(axes, handles, [line.name for line in lines])
        axes.set_ylim(*span)

    return drawn(paint, key, alt, height=HEIGHT + legend_height([line.name for line in lines]))


def span_of(lines: Iterable[Curve], least: float = LEAST_POINTS) -> tuple[float, float]:
    """The range of a vertical axis that shows these lines and their spreads, with a margin."""
    pairs = [mean_and_spread(values) for line in lines for values in line.points.values()]
    low, high = min(mean - spread for mean, spread in pairs), max(mean + spread for mean, spread in pairs)
    margin = max(0.06 * (high - low), (least - (high - low)) / 2)
    return low - margin, high + margin


def chosen(counts: Mapping[str, Mapping[float, int]], *, key: str, alt: str) -> str:
    """How often each v was chosen: one panel of columns per name, the counts above them."""
    most = max(max(count.values()) for count in counts.values())

    def paint(*panels: Any) -> None:
        for axes, (name, count) in zip(panels, counts.items(), strict=True):
            columns = axes.bar(list(count), list(count.values()), width=0.06, color=FIRST)
            axes.bar_label(columns, fontsize=9, padding=1)
            axes.set(xlim=(-0.06, 1.06), ylim=(0, 1.35 * most), yticks=[])
            axes.set_ylabel(short(name), rotation=0, ha="right", va="center")
            axes.spines["left"].set_visible(False)
        panels[-1].set(xlabel="v, the weight of the support's statistics", xticks=[step / 5 for step in range(6)])

    return drawn(paint, key, alt, height=0.6 + 0.75 * len(counts), panels=len(counts))


class BlendPanel(NamedTuple):
    """A quantity over v, values for every draw, and how often each v was chosen by it."""

    label: str
    points: Mapping[float, Sequence[float]]
    chosen: Mapping[float, int]


def over_v(panels: Sequence[BlendPanel], *, key: str, alt: str) -> str:
    """Quantities one above the other over the blend v, mean ± standard deviation; large marks: what was chosen."""

    def paint(*all_axes: Any) -> None:
        for axes, panel, mark in zip(all_axes, panels, MARKS, strict=False):
            means, spreads = zip(*map(mean_and_spread, panel.points.values()), strict=True)
            axes.errorbar(list(panel.points), means, yerr=spreads, elinewidth=0.9, capsize=2.5, **mark)
            axes.set_ylabel(panel.label)
            axes.margins(y=0.25 if panel.chosen else 0.1)
            for v, count in panel.chosen.items():
                place = (v, mean_and_spread(panel.points[v])[0])
                axes.plot(*place, color=mark["color"], marker="o", markersize=9)
                words = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 9}
                axes.annotate(f"{count}\N{MULTIPLICATION SIGN}", place, (0, -8), **words)
        all_axes[-1].set_xlabel("v, the weight of the support's statistics")
        all_axes[0].figure.align_ylabels(all_axes)

    return drawn(paint, key, alt, height=0.5 + 1.5 * len(panels), panels=len(panels))


def clouds(
    samples: Sequence[tuple[str, Sequence[Sequence[float]]]],
    places: Mapping[str, tuple[float, float]],
    *,
    key: str,
    alt: str,
) -> str:
    """Samples as points in a plane without units; `places` are the positions of words, unless there are many."""

    def paint(axes: Any) -> None:
        handles: list[Any] = []
        for (_, points), mark in zip(samples, MARKS, strict=False):
            across, up = zip(*points, strict=True)
            handles += axes.plot(across, up, linestyle="", markersize=3, markeredgewidth=0.6, alpha=0.7, **mark)
        for name, place in places.items() if len(places) <= MANY_CLASSES else ():
            ground = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "boxstyle": "round,pad=0.15"}
            axes.annotate(short(name, 16), place, ha="center", va="center", fontsize=10, bbox=ground)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        name_lines(axes, handles, [name for name, _ in samples])

    return drawn(paint, key, alt, height=HEIGHT + 0.5 + legend_height([name for name, _ in samples]))


def costs(rows: Mapping[str, Mapping[str, Sequence[float]]], *, label: str, key: str, alt: str) -> str:
    """Per row and kind the mean as a mark, least to most as a line; logarithmic where they differ widely."""
    kinds = list(dict.fromkeys(kind for values in rows.values() for kind in values))
    marks = dict(zip(kinds, itertools.cycle(MARKS), strict=False))

    def paint(axes: Any) -> None:
        axes.set_xlabel(label, loc="right")  # it has room there even beneath long names
        positive = [value for kinds in rows.values() for values in kinds.values() for value in values if value > 0]
        if positive and max(positive) > 20 * min(positive):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        for place, row in enumerate(rows.values()):
            axes.axhline(place, color=FAINT, linewidth=0.4, zorder=0)
            for step, (kind, values) in enumerate(row.items()):
                height = place + 0.18 * (step - (len(row) - 1) / 2)
                axes.plot([min(values), max(values)], [height] * 2, color=marks[kind]["color"], linewidth=1)
                axes.plot([statistics.fmean(values)], [height], linestyle="", **marks[kind])
        name_rows(axes, list(rows))
        samples = [Line2D([], [], linestyle="", **marks[kind]) for kind in kinds]
        name_lines(axes, samples, kinds)

    return drawn(paint, key, alt, height=0.75 + 0.32 * len(rows) + legend_height(kinds))


class Estimate(NamedTuple):
    """A true value, and its estimate with an interval."""

    truth: float
    point: float
    low: float
    high: float


def estimates(groups: Mapping[str, Sequence[Estimate]], *, across: str, label: str, key: str, alt: str) -> str:
    """Estimates (up) against the truth (across) on the same scale: on the diagonal they are exact."""
    every = [estimate for group in groups.values() for estimate in group]
    numbers = [number for each in every for number in (each.truth, each.point)]  # intervals may leave the picture
    margin = max(LEAST_POINTS, 0.08 * (max(numbers) - min(numbers)))
    span = (min(numbers) - margin, max(numbers) + margin)

    def paint(axes: Any) -> None:
        axes.set(xlabel=across, ylabel=label, xlim=span, ylim=span, aspect="equal")
        axes.plot(span, span, zorder=0, **DASHED)
        for line in (axes.axhline, axes.axvline):
            line(0, color=FAINT, linewidth=0.4, zorder=0)
        handles: list[Any] = []
        for group, mark in zip(groups.values(), itertools.cycle(MARKS), strict=False):
            truth = [each.truth for each in group]
            axes.vlines(
                truth, [each.low for each in group], [each.high for each in group], color=mark["color"], alpha=0.25
            )
            handles += axes.plot(truth, [each.point for each in group], linestyle="", markersize=4, alpha=0.8, **mark)
        name_lines(axes, handles, list(groups))

    return drawn(paint, key, alt, height=WIDTH - 0.4 + legend_height(list(groups)))


class TradeOff(NamedTuple):
    """A line from strict to careless: places (across, up), and the place that was chosen."""

    name: str
    points: Sequence[tuple[float, float]]
    default: tuple[float, float]


def trade_offs(
    lines: Sequence[TradeOff], *, across: str, label: str, goal: tuple[float, float], key: str, alt: str
) -> str:
    """What is lost (up) against what is won (across), in percent; large marks: what was chosen; dashed: the goal."""

    def paint(axes: Any) -> None:
        axes.set(xlabel=across, ylabel=label)
        axes.axvline(goal[0], zorder=0, **DASHED)
        axes.axhline(goal[1], zorder=0, **DASHED)
        handles: list[Any] = []
        for line, mark in zip(lines, itertools.cycle(MARKS), strict=False):
            won, lost = zip(*line.points, strict=True)
            axes.plot(won, lost, color=mark["color"], linewidth=1.2)
            handles += axes.plot(*([place] for place in line.default), markersize=9, **mark)
        places = [place for line in lines for place in (*line.points, line.default)]
        # where harm outweighs the gain, a line may leave the picture at the left
        axes.set_xlim(max(-10.0, min(won for won, _ in places) - 3), 103)
        axes.set_ylim(-0.4, max(2 * goal[1], *(lost for _, lost in places)) + 0.6)
        name_lines(axes, handles, [line.name for line in lines])

    return drawn(paint, key, alt, height=HEIGHT + legend_height([line.name for line in lines]))

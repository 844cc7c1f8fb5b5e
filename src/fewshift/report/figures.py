"""Figures of an adaptation: data in, one SVG (or one embedded picture) out. `drawing` has the style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D
from PIL import Image
from torch import Tensor

from fewshift.report.drawing import (
    BELOW,
    DASHED,
    FAINT,
    FIRST,
    HEIGHT,
    INK,
    MARKS,
    PAPER,
    SECOND,
    WIDTH,
    drawn,
    keep_calm,
    legend_height,
    mean_and_spread,
    name_lines,
    name_rows,
    short,
)
from fewshift.report.scenes import encoded

MANY_CLASSES, TOO_MANY_CLASSES = 12, 30  # beyond these a matrix has no numbers, and no names
SHADES = 20  # of a matrix
INTERVAL = 0.9  # inches
LEAST_SPAN = 0.05  # of the vertical axis over layers: smaller differences shall look small
LEAST_POINTS = 2.0  # and of one that counts percent
MOST_MARKS = 120  # of one picture over layers


def grid_curve(losses: Mapping[float, float], chosen: float, *, key: str, alt: str) -> str:
    """Loss on the support against the blend v, with the chosen v marked."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="v, the weight of the support's statistics", ylabel="loss on the support")
        axes.plot(list(losses), list(losses.values()), color=FIRST, marker="o")
        best = (chosen, losses[chosen])
        axes.plot(*best, color=SECOND, marker="o", markersize=9)
        axes.annotate(f"v = {chosen:.3g}", best, (0, -9), textcoords="offset points", ha="center", va="top")
        axes.margins(x=0.08, y=0.22)  # room for the words beneath the mark

    return drawn(paint, key, alt)


def interval(point: float, low: float, high: float, *, key: str, alt: str) -> str:
    """A gain with its interval on one line, against no change."""

    def paint(axes: Any) -> None:
        axes.axvline(0, **DASHED)
        axes.plot([low, high], [0, 0], color=FIRST, linewidth=5, solid_capstyle="round", alpha=0.45)
        axes.plot(point, 0, color=FIRST, marker="o", markersize=9)
        axes.annotate(f"{point:+.1f}", (point, 0), (0, 8), textcoords="offset points", ha="center")
        axes.set(yticks=[])
        axes.set_xlim(min(low, 0.0) - 4, max(high, 0.0) + 4)
        axes.set_ylim(-0.5, 0.9)
        axes.spines["left"].set_visible(False)

    return drawn(paint, key, alt, height=INTERVAL)


def loss_curve(losses: Sequence[float], *, key: str, alt: str) -> str:
    """Mean loss on the support in every epoch."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="epoch", ylabel="loss on the support")
        axes.plot(range(1, len(losses) + 1), losses, color=FIRST, marker="o")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    return drawn(paint, key, alt)


def over_layers(
    lines: Mapping[str, Sequence[float]], *, label: str, level: float | None = None, key: str, alt: str
) -> str:
    """Quantities over the layers in order of execution; `level` is a line to compare them with."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="layer, in order of execution", ylabel=label)
        levels = [] if level is None else [level]
        for height in levels:
            axes.axhline(height, **DASHED)
        handles: list[Any] = []
        for values, mark in zip(lines.values(), MARKS, strict=False):
            every = math.ceil(len(values) * len(lines) / MOST_MARKS)
            handles += axes.plot(range(1, len(values) + 1), values, linewidth=0.8, markevery=every, **mark)
        name_lines(axes, handles, list(lines), "outside upper right" if len(lines) == 2 else BELOW)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        keep_calm(axes, [*levels, *(value for values in lines.values() for value in values)], LEAST_SPAN)

    return drawn(paint, key, alt, height=HEIGHT + (0 if len(lines) == 2 else legend_height(list(lines))))


def accuracies(draws: Mapping[str, Sequence[float]], level: float, *, key: str, alt: str) -> str:
    """Per label its draws as points, and mean ± standard deviation above them; `level` is what to compare with."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="accuracy on the target, percent")
        axes.axvline(level, **DASHED)
        for place, values in enumerate(draws.values()):
            mean, spread = mean_and_spread(values)
            axes.plot(values, [place + 0.28] * len(values), color=FAINT, marker="o", markersize=2.5, linestyle="")
            axes.errorbar([mean], [place], xerr=[spread], color=FIRST, marker="o", markersize=6, elinewidth=2.2)
        name_rows(axes, list(draws))

    return drawn(paint, key, alt, height=0.75 + 0.32 * len(draws))


def gains(rows: Mapping[str, tuple[float, float, float]], *, label: str, key: str, alt: str) -> str:
    """Per row a difference and its interval (point, low, high); the dashed line is no difference."""

    def paint(axes: Any) -> None:
        axes.set_xlabel(label, loc="right")  # it has room there even beneath long names
        axes.axvline(0, **DASHED)
        for place, (point, low, high) in enumerate(rows.values()):
            around = [[point - low], [high - point]]
            axes.errorbar([point], [place], xerr=around, color=FIRST, marker="o", markersize=6, elinewidth=2.2)
        name_rows(axes, list(rows))

    return drawn(paint, key, alt, height=0.75 + 0.32 * len(rows))


def gain_curve(
    draws: Mapping[int, Sequence[float]], *, across: str, label: str, mark: tuple[int, str] | None, key: str, alt: str
) -> str:
    """Differences against k, on a logarithmic axis: mean ± standard deviation, the draws as dots beside them.

    `mark` is a k and the words to put there.
    """
    means, spreads = zip(*map(mean_and_spread, draws.values()), strict=True)
    values = [value for group in draws.values() for value in group]

    def paint(axes: Any) -> None:
        axes.set(xlabel=across, ylabel=label, xscale="log", xlim=(min(draws) / 1.2, max(draws) * 1.3))
        axes.set_xticks(list(draws), [f"{k}" for k in draws])
        axes.minorticks_off()
        axes.axhline(0, **DASHED)
        for k, group in draws.items():
            axes.plot([k * 1.07] * len(group), group, color=FAINT, marker="o", markersize=2.5, linestyle="")
        axes.errorbar(list(draws), means, yerr=spreads, color=FIRST, marker="o", elinewidth=0.9, capsize=2.5)
        if mark is not None:
            k, words = mark
            axes.plot(k, means[list(draws).index(k)], color=SECOND, marker="o", markersize=9)
            where = {"textcoords": "offset points", "ha": "left", "va": "top"}  # larger k leave room at the right
            axes.annotate(words, (k, min(draws[k])), (-5, -9), **where)
        margin = max(0.12 * (max(values) - min(values)), LEAST_POINTS / 2)
        axes.set_ylim(min(0.0, *values) - 2 * margin, max(0.0, *values) + margin)

    return drawn(paint, key, alt)


class Strips(NamedTuple):
    """A PNG as a data URI, and its size in pixels."""

    data: str
    width: int
    height: int


def strips(above: Tensor, below: Tensor, *, columns: int = 10, gap: int = 2) -> Strips:
    """Two sets of pictures of one size, (N, channels, H, W) in [0, 1], one above the other in rows of `columns`.

    What lies between the pictures is transparent.
    """
    first, second = above.split(columns), below.split(columns)
    rows = first + second
    height, width = (side + gap for side in above.shape[-2:])
    apart = 4 * gap  # the two sets
    sheet = Image.new("RGBA", (max(map(len, rows)) * width - gap, len(rows) * height - gap + apart))
    for line, row in enumerate(rows):
        top = line * height + (apart if line >= len(first) else 0)
        for place, picture in enumerate(row):
            pixels = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).squeeze(2)
            sheet.paste(Image.fromarray(pixels.cpu().numpy()), (place * width, top))
    return Strips(f"data:image/png;base64,{encoded(sheet, 'png', optimize=True)}", *sheet.size)


def confusion(
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    *,
    counts: Sequence[Sequence[int]] | None = None,
    key: str,
    alt: str,
) -> str:
    """For each true class (row) the share of each predicted class (column); NaN where a class has no image.

    With `counts` these stand in the cells, otherwise percentages do.
    """
    size = len(names)
    cells = [(row, column, share) for row, line in enumerate(shares) for column, share in enumerate(line) if share > 0]

    def paint(axes: Any) -> None:
        axes.set(xlabel="answer", ylabel="truth", aspect="equal", xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
        for shade in range(1, SHADES + 1):
            squares = [Path.unit_rectangle().transformed(Affine2D().translate(column - 0.5, row - 0.5))
                       for row, column, share in cells if round(share * SHADES) == shade]  # fmt: skip
            if squares:
                one = PathPatch(Path.make_compound_path(*squares), color=FIRST, alpha=shade / SHADES, linewidth=0)
                axes.add_patch(one)
        if size <= MANY_CLASSES:
            for row, column, share in cells:
                if share >= 0.005:
                    text = {"ha": "center", "va": "center", "fontsize": 10, "color": PAPER if share > 0.7 else INK}
                    number = f"{100 * share:.0f}" if counts is None else str(counts[row][column])
                    axes.text(column, row, number, **text)
        if size <= TOO_MANY_CLASSES:
            letters = [short(name, 16) for name in names]
            small = 10 if size <= MANY_CLASSES else 7
            axes.set_xticks(range(size), letters, rotation=90, fontsize=small)
            axes.set_yticks(range(size), letters, fontsize=small)
        axes.tick_params(length=0)

    return drawn(paint, key, alt, height=WIDTH)

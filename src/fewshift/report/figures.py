"""Figures: data in, one SVG (or one embedded picture) out.

An SVG is meant to stand inside a page. Its colours are CSS variables with a fallback, so that the page's light and
dark themes reach into it; its ids depend on the figure's `key`, so that several can share a page; `alt` is what a
reader hears who cannot see it. The same data give the same bytes.
"""

from __future__ import annotations

import base64
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
from markupsafe import escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

WIDTH = 5.0  # inches, 360 units of SVG: about as many as a phone, or half a page, has pixels
HEIGHT = 3.1
LEAST_SPAN = 0.05  # of the vertical axis over layers: smaller differences shall look small

INK, FAINT, FIRST, SECOND = "#1c1c20", "#8b8b93", "#2b6c96", "#b8622c"
THEME = {
    INK: "currentColor",
    FAINT: f"var(--faint, {FAINT})",
    FIRST: f"var(--first, {FIRST})",
    SECOND: f"var(--second, {SECOND})",
}
MARKS = (  # shape as well as colour: for print, and for eyes that see fewer colours
    {"color": FIRST, "marker": "o"},
    {"color": SECOND, "marker": "s", "markerfacecolor": "none"},  # what lies beneath shows through
)
DASHED = {"color": FAINT, "linewidth": 1, "linestyle": (0, (4, 3))}

FONT = "DejaVu Sans"  # travels with matplotlib, so the layout is the same everywhere
STYLE = {
    "font.family": FONT,
    "font.size": 11,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "text.parse_math": False,
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
}


def grid_curve(losses: Mapping[float, float], chosen: float, *, key: str, alt: str) -> str:
    """Loss on the support against the blend v, with the chosen v marked."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="v, the weight of the support's statistics", ylabel="loss on the support")
        axes.plot(list(losses), list(losses.values()), color=FIRST, marker="o")
        best = (chosen, losses[chosen])
        axes.plot(*best, color=SECOND, marker="o", markersize=9)
        axes.annotate(f"v = {chosen:g}", best, (0, -9), textcoords="offset points", ha="center", va="top")
        axes.margins(x=0.08, y=0.22)  # room for the words beneath the mark

    return _drawn(paint, key, alt)


def loss_curve(losses: Sequence[float], *, key: str, alt: str) -> str:
    """Mean loss on the support in every epoch."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="epoch", ylabel="loss on the support")
        axes.plot(range(1, len(losses) + 1), losses, color=FIRST, marker="o")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    return _drawn(paint, key, alt)


def over_layers(
    lines: Mapping[str, Sequence[float]], *, label: str, level: float | None = None, key: str, alt: str
) -> str:
    """One or two quantities over the layers in order of execution; `level` is a line to compare them with."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="layer, in order of execution", ylabel=label)
        levels = [] if level is None else [level]
        for height in levels:
            axes.axhline(height, **DASHED)
        for (name, values), mark in zip(lines.items(), MARKS, strict=False):
            axes.plot(range(1, len(values) + 1), values, linewidth=0.8, label=name, **mark)
        if len(lines) > 1:
            axes.figure.legend(loc="outside upper right", ncols=2, handlelength=1.2, columnspacing=1.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _keep_calm(axes, [*levels, *(value for values in lines.values() for value in values)])

    return _drawn(paint, key, alt)


def accuracies(draws: Mapping[str, Sequence[float]], level: float, *, key: str, alt: str) -> str:
    """Per label its draws as points, and mean ± standard deviation above them; `level` is what to compare with."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="accuracy on the target, percent")
        axes.axvline(level, **DASHED)
        for place, values in enumerate(draws.values()):
            mean, spread = statistics.fmean(values), statistics.pstdev(values)
            axes.plot(values, [place + 0.28] * len(values), color=FAINT, marker="o", markersize=2.5, linestyle="")
            axes.errorbar([mean], [place], xerr=[spread], color=FIRST, marker="o", markersize=6, elinewidth=2.2)
        axes.set_yticks(range(len(draws)), list(draws))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(len(draws) - 0.4, -0.6)
        axes.margins(x=0.06)

    return _drawn(paint, key, alt, height=0.75 + 0.32 * len(draws))


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
    file = io.BytesIO()
    sheet.save(file, "png", optimize=True)
    return Strips("data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), *sheet.size)


def _drawn(paint: Callable[[Any], None], key: str, alt: str, height: float = HEIGHT) -> str:
    """Paint on fresh axes, in our style whatever the reader's own settings are, which stay as they are."""
    file = io.StringIO()
    with matplotlib.style.context(["default", STYLE | {"svg.hashsalt": key}]):
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
        paint(figure.add_subplot(facecolor="none"))
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(file.getvalue(), alt)


def _inline(svg: str, alt: str) -> str:
    """The same SVG as a guest in a page, whose font, colours and width it takes.

    Ids of groups are the same in every figure and go; those of marks and clips are hashes salted with the key.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*", " ", svg).strip()
    svg = re.sub(r' (width|height)="[^"]*pt"|(?<=<g) id="[^"]*"', "", svg)
    svg = re.sub(rf"'{FONT}'[^;\"]*", "var(--font, sans-serif)", svg)
    for colour, themed in THEME.items():
        svg = svg.replace(colour, themed)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}" stroke-linejoin="round"', 1)


def _keep_calm(axes: Any, values: Iterable[float]) -> None:
    """Never look so closely that noise becomes news."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(finite) - min(finite) < LEAST_SPAN:
        middle = (max(finite) + min(finite)) / 2
        axes.set_ylim(middle - LEAST_SPAN / 2, middle + LEAST_SPAN / 2)

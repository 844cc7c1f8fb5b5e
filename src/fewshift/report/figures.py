"""Figures: data in, one SVG (or one embedded picture) out.

An SVG is meant to stand inside a page. Its colours are CSS variables with a fallback, so that the page's light and
dark themes reach into it; its ids depend on the figure's `key`, so that several can share a page; `alt` is what a
reader hears who cannot see it. The same data give the same bytes.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
from markupsafe import escape
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from matplotlib.transforms import Affine2D
from PIL import Image
from torch import Tensor

WIDTH = 5.0  # inches, 360 units of SVG: about as many as a phone, or half a page, has pixels
HEIGHT = 3.1
LEAST_SPAN = 0.05  # of the vertical axis over layers: smaller differences shall look small
LEAST_POINTS = 2.0  # and of one that counts percent
LEGEND_LINE = 0.22  # inches
LONG_NAME, LONG_ROW = 44, 30  # letters that fit beneath a picture, and beside it
MANY_CLASSES, TOO_MANY_CLASSES = 12, 30  # beyond these a matrix has no numbers, and no names
SHADES = 20  # of a matrix

INK, PAPER, FAINT = "#1c1c20", "#fdfcfa", "#8b8b93"
COLOURS = {
    "first": "#2b6c96",
    "second": "#b8622c",
    "third": "#3f7d4e",
    "fourth": "#8a4f9e",
    "fifth": "#a3362f",
    "sixth": "#7a6a1f",
    "seventh": "#1f8a8a",
    "eighth": "#c2528b",
}
FIRST, SECOND = COLOURS["first"], COLOURS["second"]
THEME = {
    INK: "currentColor",
    **{colour: f"var(--{name}, {colour})" for name, colour in ({"paper": PAPER, "faint": FAINT} | COLOURS).items()},
}
MARKS: tuple[dict[str, Any], ...] = tuple(  # shape as well as colour: for print, and for eyes that see fewer colours
    {"color": colour, "marker": shape, **filling}
    for colour, shape, filling in zip(
        COLOURS.values(),
        "os^DvPX<",
        [{}, {"markerfacecolor": "none"}] * 4,  # what lies beneath shows through
        strict=True,
    )
)
MOST_MARKS = 120  # of one picture over layers
MOST_LINES = len(MARKS)  # of one picture
BELOW = "outside lower left"  # a legend
DASHES = (0, (4, 3))
DASHED = {"color": FAINT, "linewidth": 1, "linestyle": DASHES}

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
        _name_lines(axes, handles, list(lines), "outside upper right" if len(lines) == 2 else BELOW)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _keep_calm(axes, [*levels, *(value for values in lines.values() for value in values)])

    return _drawn(paint, key, alt, height=HEIGHT + (0 if len(lines) == 2 else _legend_height(list(lines))))


class Curve(NamedTuple):
    """A line of a picture: for every x its values, one per draw. A level has one x, and holds for every other too."""

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
        axes.set_xticks(ticks, [f"{it:g}" for it in ticks])
        axes.minorticks_off()
        handles = []
        for line, mark in zip(lines, MARKS, strict=False):
            means, spreads = zip(*map(_mean_and_spread, line.points.values()), strict=True)
            if line.level:
                handles += axes.plot((ticks[0], ticks[-1]), means * 2, linestyle=DASHES, **mark)
                axes.axhspan(means[0] - spreads[0], means[0] + spreads[0], color=mark["color"], alpha=0.1, linewidth=0)
            else:
                bars = {"yerr": spreads, "elinewidth": 0.9, "capsize": 2.5}
                handles.append(axes.errorbar(list(line.points), means, **bars, **mark).lines[0])
        _name_lines(axes, handles, [it.name for it in lines])
        axes.set_ylim(*span)

    return _drawn(paint, key, alt, height=HEIGHT + _legend_height([it.name for it in lines]))


def span_of(lines: Iterable[Curve], least: float = LEAST_POINTS) -> tuple[float, float]:
    """What a vertical axis has to show of these lines and their spreads, with a margin."""
    pairs = [_mean_and_spread(values) for line in lines for values in line.points.values()]
    low, high = min(mean - spread for mean, spread in pairs), max(mean + spread for mean, spread in pairs)
    margin = max(0.06 * (high - low), (least - (high - low)) / 2)
    return low - margin, high + margin


def chosen(counts: Mapping[str, Mapping[float, int]], *, key: str, alt: str) -> str:
    """How often each v was chosen: one panel of columns per name, the counts above them."""

    def paint(*panels: Any) -> None:
        for axes, (name, count) in zip(panels, counts.items(), strict=True):
            columns = axes.bar(list(count), list(count.values()), width=0.06, color=FIRST)
            axes.bar_label(columns, fontsize=9, padding=1)
            axes.set(xlim=(-0.06, 1.06), ylim=(0, 1.35 * max(max(it.values()) for it in counts.values())), yticks=[])
            axes.set_ylabel(_short(name), rotation=0, ha="right", va="center")
            axes.spines["left"].set_visible(False)
        panels[-1].set(xlabel="v, the weight of the support's statistics", xticks=[it / 5 for it in range(6)])

    return _drawn(paint, key, alt, height=0.6 + 0.75 * len(counts), panels=len(counts))


class BlendPanel(NamedTuple):
    """A quantity over v, values for every draw, and how often each v was chosen by it."""

    label: str
    points: Mapping[float, Sequence[float]]
    chosen: Mapping[float, int]


def over_v(panels: Sequence[BlendPanel], *, key: str, alt: str) -> str:
    """Quantities one above the other over the blend v, mean ± standard deviation; large marks: what was chosen."""

    def paint(*all_axes: Any) -> None:
        for axes, panel, mark in zip(all_axes, panels, MARKS, strict=False):
            means, spreads = zip(*map(_mean_and_spread, panel.points.values()), strict=True)
            axes.errorbar(list(panel.points), means, yerr=spreads, elinewidth=0.9, capsize=2.5, **mark)
            axes.set_ylabel(panel.label)
            axes.margins(y=0.25 if panel.chosen else 0.1)
            for v, count in panel.chosen.items():
                place = (v, _mean_and_spread(panel.points[v])[0])
                axes.plot(*place, color=mark["color"], marker="o", markersize=9)
                words = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 9}
                axes.annotate(f"{count}\N{MULTIPLICATION SIGN}", place, (0, -8), **words)
        all_axes[-1].set_xlabel("v, the weight of the support's statistics")
        all_axes[0].figure.align_ylabels(all_axes)

    return _drawn(paint, key, alt, height=0.5 + 1.5 * len(panels), panels=len(panels))


def confusion(shares: Sequence[Sequence[float]], names: Sequence[str], *, key: str, alt: str) -> str:
    """Of the images of a class (row), which share was taken for which (column); NaN where a class has no image."""
    size = len(names)
    cells = [(row, column, it) for row, line in enumerate(shares) for column, it in enumerate(line) if it > 0]

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
                    axes.text(column, row, f"{100 * share:.0f}", **text)
        if size <= TOO_MANY_CLASSES:
            letters = [_short(name, 16) for name in names]
            small = 10 if size <= MANY_CLASSES else 7
            axes.set_xticks(range(size), letters, rotation=90, fontsize=small)
            axes.set_yticks(range(size), letters, fontsize=small)
        axes.tick_params(length=0)

    return _drawn(paint, key, alt, height=WIDTH)


def clouds(
    samples: Sequence[tuple[str, Sequence[Sequence[float]]]],
    places: Mapping[str, tuple[float, float]],
    *,
    key: str,
    alt: str,
) -> str:
    """Samples as points in a plane that has no units; `places` are where to write words, unless they are many."""

    def paint(axes: Any) -> None:
        handles: list[Any] = []
        for (_, points), mark in zip(samples, MARKS, strict=False):
            across, up = zip(*points, strict=True)
            handles += axes.plot(across, up, linestyle="", markersize=3, markeredgewidth=0.6, alpha=0.7, **mark)
        for name, place in places.items() if len(places) <= MANY_CLASSES else ():
            ground = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "boxstyle": "round,pad=0.15"}
            axes.annotate(_short(name, 16), place, ha="center", va="center", fontsize=10, bbox=ground)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        _name_lines(axes, handles, [name for name, _ in samples])

    return _drawn(paint, key, alt, height=HEIGHT + 0.5 + _legend_height([name for name, _ in samples]))


def costs(rows: Mapping[str, Mapping[str, Sequence[float]]], *, label: str, key: str, alt: str) -> str:
    """Per row and kind the mean as a mark, least to most as a line; logarithmic where they differ widely."""
    kinds = list(dict.fromkeys(kind for values in rows.values() for kind in values))
    marks = dict(zip(kinds, itertools.cycle(MARKS), strict=False))

    def paint(axes: Any) -> None:
        axes.set_xlabel(label, loc="right")  # beneath long names too it has room
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
        _name_rows(axes, list(rows))
        samples = [Line2D([], [], linestyle="", **marks[kind]) for kind in kinds]
        _name_lines(axes, samples, kinds)

    return _drawn(paint, key, alt, height=0.75 + 0.32 * len(rows) + _legend_height(kinds))


def accuracies(draws: Mapping[str, Sequence[float]], level: float, *, key: str, alt: str) -> str:
    """Per label its draws as points, and mean ± standard deviation above them; `level` is what to compare with."""

    def paint(axes: Any) -> None:
        axes.set(xlabel="accuracy on the target, percent")
        axes.axvline(level, **DASHED)
        for place, values in enumerate(draws.values()):
            mean, spread = _mean_and_spread(values)
            axes.plot(values, [place + 0.28] * len(values), color=FAINT, marker="o", markersize=2.5, linestyle="")
            axes.errorbar([mean], [place], xerr=[spread], color=FIRST, marker="o", markersize=6, elinewidth=2.2)
        _name_rows(axes, list(draws))

    return _drawn(paint, key, alt, height=0.75 + 0.32 * len(draws))


def gains(rows: Mapping[str, tuple[float, float, float]], *, label: str, key: str, alt: str) -> str:
    """Per row a difference and its interval (point, low, high); the dashed line is no difference."""

    def paint(axes: Any) -> None:
        axes.set_xlabel(label, loc="right")  # beneath long names too it has room
        axes.axvline(0, **DASHED)
        for place, (point, low, high) in enumerate(rows.values()):
            around = [[point - low], [high - point]]
            axes.errorbar([point], [place], xerr=around, color=FIRST, marker="o", markersize=6, elinewidth=2.2)
        _name_rows(axes, list(rows))

    return _drawn(paint, key, alt, height=0.75 + 0.32 * len(rows))


def gain_curve(
    draws: Mapping[int, Sequence[float]], *, across: str, label: str, flat_from: int | None, key: str, alt: str
) -> str:
    """Differences against k, on a logarithmic axis: mean ± standard deviation, the draws as dots beside them."""
    means, spreads = zip(*map(_mean_and_spread, draws.values()), strict=True)
    values = [value for them in draws.values() for value in them]

    def paint(axes: Any) -> None:
        axes.set(xlabel=across, ylabel=label, xscale="log", xlim=(min(draws) / 1.2, max(draws) * 1.3))
        axes.set_xticks(list(draws), [f"{k}" for k in draws])
        axes.minorticks_off()
        axes.axhline(0, **DASHED)
        for k, them in draws.items():
            axes.plot([k * 1.07] * len(them), them, color=FAINT, marker="o", markersize=2.5, linestyle="")
        axes.errorbar(list(draws), means, yerr=spreads, color=FIRST, marker="o", elinewidth=0.9, capsize=2.5)
        if flat_from is not None:
            place = (flat_from, means[list(draws).index(flat_from)])
            axes.plot(*place, color=SECOND, marker="o", markersize=9)
            words = {"textcoords": "offset points", "ha": "left", "va": "top"}  # larger k leave room at the right
            axes.annotate(f"flat from k = {flat_from}", (place[0], min(draws[flat_from])), (-5, -9), **words)
        margin = max(0.12 * (max(values) - min(values)), LEAST_POINTS / 2)
        axes.set_ylim(min(0.0, *values) - 2 * margin, max(0.0, *values) + margin)

    return _drawn(paint, key, alt)


class Estimate(NamedTuple):
    """A quantity in truth, and as it was estimated with its interval."""

    truth: float
    point: float
    low: float
    high: float


def estimates(groups: Mapping[str, Sequence[Estimate]], *, across: str, label: str, key: str, alt: str) -> str:
    """Estimates (up) against the truth (across) on the same scale: on the diagonal they are exact."""
    every = [it for group in groups.values() for it in group]
    numbers = [number for it in every for number in (it.truth, it.point)]  # intervals may leave the picture
    margin = max(LEAST_POINTS, 0.08 * (max(numbers) - min(numbers)))
    span = (min(numbers) - margin, max(numbers) + margin)

    def paint(axes: Any) -> None:
        axes.set(xlabel=across, ylabel=label, xlim=span, ylim=span, aspect="equal")
        axes.plot(span, span, zorder=0, **DASHED)
        for line in (axes.axhline, axes.axvline):
            line(0, color=FAINT, linewidth=0.4, zorder=0)
        handles: list[Any] = []
        for group, mark in zip(groups.values(), itertools.cycle(MARKS), strict=False):
            truth = [it.truth for it in group]
            axes.vlines(truth, [it.low for it in group], [it.high for it in group], color=mark["color"], alpha=0.25)
            handles += axes.plot(truth, [it.point for it in group], linestyle="", markersize=4, alpha=0.8, **mark)
        _name_lines(axes, handles, list(groups))

    return _drawn(paint, key, alt, height=WIDTH - 0.4 + _legend_height(list(groups)))


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


def _drawn(paint: Callable[..., None], key: str, alt: str, height: float = HEIGHT, panels: int = 1) -> str:
    """Paint on fresh axes, in our style whatever the reader's own settings are, which stay as they are."""
    file = io.StringIO()
    with matplotlib.style.context(["default", STYLE | {"svg.hashsalt": key}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page's own font has more letters
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
        paint(*figure.subplots(panels, 1, sharex=True, squeeze=False, subplot_kw={"facecolor": "none"})[:, 0])
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
    svg = re.sub(r' font-family: var\(--font, sans-serif\);?| transform="rotate\(-0 [^"]*"', "", svg)
    # two decimals are a hundredth of a pixel; words between the tags stay as they are
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    svg = _said_once(svg)
    for colour, themed in THEME.items():
        svg = svg.replace(colour, themed)
    font = 'style="font-family: var(--font, sans-serif)"'
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}" stroke-linejoin="round" {font}', 1)


def _said_once(svg: str) -> str:
    """The style that all uses of a mark share, moved to the mark itself, where its own words still win."""
    for mark in sorted(set(re.findall(r'<use xlink:href="#(\w+)"', svg))):
        use = rf'(<use xlink:href="#{mark}"[^>]*?) style="([^"]*)"'
        styles = {style for _, style in re.findall(use, svg)}
        if len(styles) == 1:
            svg = re.sub(use, r"\1", svg)
            svg = re.sub(rf'(<path id="{mark}"[^>]* style=")', rf"\1{styles.pop()}; ", svg)
    return svg


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.pstdev(values)


def _short(name: str, most: int = LONG_NAME) -> str:
    """A name as a picture can hold it: one line, not too long; a leading underscore would hide it from a legend."""
    line = " ".join(name.split()).encode("utf-8", "replace").decode()  # a file name may hold bytes that are no text
    line = line if len(line) <= most else line[: most - 1] + "…"
    return f" {line}" if line.startswith("_") else line


def _name_lines(axes: Any, handles: Sequence[Any], names: Sequence[str], where: str = BELOW) -> None:
    if len(names) > 1:
        form = {"ncols": _legend_columns(names), "handlelength": 2.8, "columnspacing": 1.4}
        axes.figure.legend(handles, [_short(name) for name in names], loc=where, **form)


def _legend_columns(names: Sequence[str]) -> int:
    longest = max(map(len, names))
    return next((columns for columns, room in ((4, 8), (2, 20)) if longest <= room), 1)


def _legend_height(names: Sequence[str]) -> float:
    return LEGEND_LINE * math.ceil(len(names) / _legend_columns(names)) if len(names) > 1 else 0.0


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Names in place of numbers at the left, from top to bottom."""
    axes.set_yticks(range(len(names)), [_short(name, LONG_ROW) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.06)


def _keep_calm(axes: Any, values: Iterable[float]) -> None:
    """Never look so closely that noise becomes news."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(finite) - min(finite) < LEAST_SPAN:
        middle = (max(finite) + min(finite)) / 2
        axes.set_ylim(middle - LEAST_SPAN / 2, middle + LEAST_SPAN / 2)

"""Drawing: axes in the project's style, turned into an SVG that takes its page's font, colours and width.

Colours are CSS variables with a fallback, so that the page's light and dark themes reach into the figure. Ids depend on
the figure's `key`, so that several figures can share a page. `alt` is what a screen reader says. The same data give the
same bytes.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib.style
from markupsafe import escape
from matplotlib.figure import Figure

WIDTH = 5.0  # inches, 360 units of SVG: the width of a phone, or of half a page, in pixels
HEIGHT = 3.1
LEGEND_LINE = 0.22  # inches
LONG_NAME, LONG_ROW = 44, 30  # letters that fit beneath a picture, and beside it

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
MARKS: tuple[dict[str, Any], ...] = tuple(  # shape as well as colour: for print, and for colour-blind readers
    {"color": colour, "marker": shape, **filling}
    for colour, shape, filling in zip(
        COLOURS.values(),
        "os^DvPX<",
        [{}, {"markerfacecolor": "none"}] * 4,  # what lies beneath stays visible
        strict=True,
    )
)
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


def drawn(paint: Callable[..., None], key: str, alt: str, height: float = HEIGHT, panels: int = 1) -> str:
    """Paint on fresh axes in our style; the user's own matplotlib settings neither matter nor change."""
    file = io.StringIO()
    with matplotlib.style.context(["default", STYLE | {"svg.hashsalt": key}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page's own font has more letters
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
        paint(*figure.subplots(panels, 1, sharex=True, squeeze=False, subplot_kw={"facecolor": "none"})[:, 0])
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(file.getvalue(), alt)


def _inline(svg: str, alt: str) -> str:
    """The SVG without its own font, colours and width.

    Ids of groups are the same in every figure and are removed; those of marks and clips are hashes salted with the key.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*", " ", svg).strip()
    svg = re.sub(r' (width|height)="[^"]*pt"|(?<=<g) id="[^"]*"', "", svg)
    svg = re.sub(rf"'{FONT}'[^;\"]*", "var(--font, sans-serif)", svg)
    svg = re.sub(r' font-family: var\(--font, sans-serif\);?| transform="rotate\(-0 [^"]*"', "", svg)
    # two decimals are a hundredth of a pixel; words between the tags stay as they are
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    svg = _shared_styles(svg)
    for colour, themed in THEME.items():
        svg = svg.replace(colour, themed)
    font = 'style="font-family: var(--font, sans-serif)"'
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}" stroke-linejoin="round" {font}', 1)


def _shared_styles(svg: str) -> str:
    """Move the style that all uses of a mark share to the mark itself, where its own style still wins."""
    for mark in sorted(set(re.findall(r'<use xlink:href="#(\w+)"', svg))):
        use = rf'(<use xlink:href="#{mark}"[^>]*?) style="([^"]*)"'
        styles = {style for _, style in re.findall(use, svg)}
        if len(styles) == 1:
            svg = re.sub(use, r"\1", svg)
            svg = re.sub(rf'(<path id="{mark}"[^>]* style=")', rf"\1{styles.pop()}; ", svg)
    return svg


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation."""
    return statistics.fmean(values), statistics.pstdev(values)


def short(name: str, most: int = LONG_NAME) -> str:
    """A name that fits: one line, not too long; a leading underscore would hide it from a legend."""
    line = " ".join(name.split()).encode("utf-8", "replace").decode()  # a file name may hold bytes that are no text
    line = line if len(line) <= most else line[: most - 1] + "…"
    return f" {line}" if line.startswith("_") else line


def name_lines(axes: Any, handles: Sequence[Any], names: Sequence[str], where: str = BELOW) -> None:
    """A legend, where there is more than one line."""
    if len(names) > 1:
        form = {"ncols": _legend_columns(names), "handlelength": 2.8, "columnspacing": 1.4}
        axes.figure.legend(handles, [short(name) for name in names], loc=where, **form)


def _legend_columns(names: Sequence[str]) -> int:
    longest = max(map(len, names))
    return next((columns for columns, room in ((4, 8), (2, 20)) if longest <= room), 1)


def legend_height(names: Sequence[str]) -> float:
    """Inches that the legend needs."""
    return LEGEND_LINE * math.ceil(len(names) / _legend_columns(names)) if len(names) > 1 else 0.0


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Names instead of numbers at the left, from top to bottom."""
    axes.set_yticks(range(len(names)), [short(name, LONG_ROW) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.06)


def keep_calm(axes: Any, values: Iterable[float], least: float) -> None:
    """Show at least a span of `least`, so that noise does not look like a difference."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(finite) - min(finite) < least:
        middle = (max(finite) + min(finite)) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)

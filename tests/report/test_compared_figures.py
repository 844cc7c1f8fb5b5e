"""Figures with our curves beside the paper's: what can be told without looking at pixels."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from fewshift.report.compared_figures import (
    ComparedCurve,
    ComparedFigure,
    draw_compared,
    span_of_curves,
    spread_apart,
)

CURVES = [
    ComparedCurve("source", {0: [60.0, 62.0]}, {0: 70.0}, level=True),
    ComparedCurve("lccs", {1: [65.0, 67.0], 5: [75.0, 75.0]}, {1: 71.0, 5: 80.0}),
    ComparedCurve("auto", {1: [66.0], 5: [78.0]}, {}),
]
FIGURE = ComparedFigure(CURVES, "k", "accuracy in %", {1: "1", 5: "5"}, "a note")


def test_a_figure_is_a_picture_of_1600_pixels_and_the_same_each_time(tmp_path):
    first, second = (draw_compared(FIGURE, tmp_path / name) for name in ("a.png", "b.png"))
    with Image.open(first) as picture:
        assert picture.size == (1600, 920)
        assert picture.convert("L").getpixel((3, 3)) > 240  # light
    assert first.read_bytes() == second.read_bytes()


def test_the_span_has_every_line_and_band_and_calms_noise():
    low, high = span_of_curves(CURVES)
    assert low < 60.0
    assert 80.0 < high < 85.0
    low, high = span_of_curves([ComparedCurve("lccs", {1: [90.0], 5: [90.5]}, {})])
    assert high - low == pytest.approx(10.0)


def test_no_line_of_a_note_leaves_the_picture_whatever_the_networks_are_called(tmp_path, monkeypatch):
    note = f"PACS.\nNetworks: {' and '.join(f'timm:resnet{depth}, mixstyle, 224 px' for depth in range(18, 28))}."
    ends = []
    monkeypatch.setattr(Figure, "savefig", lambda canvas, *_, **__: ends.append(right_end(canvas)))
    draw_compared(FIGURE._replace(note=note), tmp_path / "a.png")
    assert 0.8 < ends[0] < 1


def right_end(canvas: Figure) -> float:
    """Where the widest text beneath the plot ends, as a share of the width."""
    drawing = FigureCanvasAgg(canvas)
    return max(text.get_window_extent(drawing.get_renderer()).x1 for text in canvas.texts) / canvas.bbox.width


def test_names_that_are_far_apart_stay_where_they_are():
    assert spread_apart([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])


@pytest.mark.parametrize("heights", [[0.5, 0.5], [0.5, 0.52, 0.49], [1.0, 0.99, 0.0, 0.01], [0.3, 0.36, 0.42, 0.48]])
def test_names_that_are_near_move_apart_around_their_middle_and_keep_their_order(heights):
    placed = spread_apart(heights, 0.1)
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    steps = [placed[above] - placed[below] for below, above in itertools.pairwise(order)]
    assert min(steps) >= 0.1 - 1e-9
    assert 0 <= min(placed) <= max(placed) <= 1
    if len(heights) < 4:
        assert sum(placed) == pytest.approx(sum(heights))

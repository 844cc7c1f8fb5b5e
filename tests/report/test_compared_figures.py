"""Figures with our curves beside the paper's: what can be told without looking at pixels."""

from __future__ import annotations

import itertools

import pytest
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

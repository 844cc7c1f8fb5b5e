"""Schedules: which share of its peak the rate has at a step. Pure functions, so there is nothing to resume."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi
from typing import NamedTuple

RISE, BEGIN, END = 0.3, 1 / 25, 1 / 25e4  # of one cycle: how long it rises, and where it begins and ends
POWER = 0.9
WARM, COLD = 100, 0.01  # steps of a warm-up, and where it begins


class Moment(NamedTuple):
    """Where a training is: both counts from 0, with their totals."""

    step: int
    steps: int
    epoch: int
    epochs: int


def constant(now: Moment) -> float:
    """Always the peak."""
    return 1.0


def cosine(now: Moment) -> float:
    """(1 + cos(pi e / E)) / 2 in epoch e of E."""
    return (1 + cos(pi * now.epoch / now.epochs)) / 2


def poly(now: Moment) -> float:
    """(1 - s / S)^0.9 at step s of S."""
    return float((1 - now.step / now.steps) ** POWER)


def warm_poly(now: Moment) -> float:
    """Poly, times 0.01 + 0.99 (s / 100)^2 in the first hundred steps."""
    return poly(now) * min(1.0, COLD + (1 - COLD) * (now.step / WARM) ** 2)


def one_cycle(now: Moment) -> float:
    """From 1/25 to the peak in three tenths of the steps, then to 1/250,000 in the rest, each half a cosine."""
    top, last = RISE * now.steps - 1, now.steps - 1
    if now.step <= top:
        return _half_cosine(BEGIN, 1.0, now.step / top)
    return _half_cosine(1.0, END, (now.step - top) / (last - top))


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + cos(pi * share)) / 2


SCHEDULES: dict[str, Callable[[Moment], float]] = {
    "constant": constant,
    "cosine": cosine,
    "poly": poly,
    "one-cycle": one_cycle,
    "warm-poly": warm_poly,
}

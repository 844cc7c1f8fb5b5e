"""How long work will go on: the share that is done, the time that is left, and both in words."""

from __future__ import annotations

import time
from collections.abc import Callable

ENOUGH_DONE = 0.01  # of the work, to say how long the rest takes


class Remaining:
    """How much of a command is done, and how long the rest takes if it goes on at the same pace."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._told = self._done = self._then = self._shown = 0.0

    def __call__(self, share: tuple[float, float]) -> None:
        """Hear how much is done, and how much will be after the step at hand."""
        self._told = self._clock()
        if self._began is None:
            self._began = self._told
        self._done, self._then = share

    @property
    def share(self) -> float:
        """The share that is done; within a step, what its pace so far makes likely, but no more than the step."""
        if self._began is None or self._told == self._began:
            return self._done
        pace = self._done / (self._told - self._began)
        return min(self._done + pace * (self._clock() - self._told), self._then)

    @property
    def seconds(self) -> float | None:
        """The time that is left; None while too little is done to tell."""
        share = self.share
        if self._began is None or share < ENOUGH_DONE:
            return None
        return (self._clock() - self._began) * (1 - share) / share

    def __str__(self) -> str:
        seconds = self.seconds
        self._shown = max(self._shown, self.share)  # a step that began slowly takes nothing back
        left = "time left not known yet" if seconds is None else f"about {time_left(seconds)} left"
        return f"{int(100 * self._shown)} %, {left}"


def time_left(seconds: float) -> str:
    """A time in the unit that suits it, rounded."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"

"""The whole of the work: nested steps share the span of their step, planned stages share the whole by their costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from fewshift.core import _progress as progress


def watched(work: Callable[[], None]) -> list[tuple[float, float]]:
    heard: list[tuple[float, float]] = []
    with progress.watched_by(lambda share: heard.append(tuple(share))):
        work()
    return heard


def done(work: Callable[[], None]) -> list[float]:
    """The different shares in the order in which they were heard."""
    return list(dict.fromkeys(round(share, 4) for share, _ in watched(work)))


def count(what: str, total: int) -> None:
    for _ in progress.track(range(total), what):
        pass


def test_a_planned_stage_is_done_in_equal_steps() -> None:
    def work() -> None:
        with progress.plan([("images", 1)]):
            count("images", 4)

    assert done(work) == [0, 0.25, 0.5, 0.75, 1]


def test_steps_within_a_step_divide_it_even_where_nobody_listens() -> None:
    def work() -> None:
        with progress.plan([("folds", 1)]):
            for _ in progress.track(range(2), "folds"):
                with progress.silent(), progress.plan([("epochs", 1)]):
                    count("epochs", 2)

    assert done(work) == [0, 0.25, 0.5, 0.75, 1]


def test_stages_have_the_share_that_they_cost() -> None:
    def work() -> None:
        with progress.plan([("statistics", 1), ("training", 3)]):
            count("statistics", 1)
            count("training", 2)

    assert done(work) == [0, 0.25, 0.625, 1]


def test_steps_have_the_share_that_they_cost() -> None:
    def work() -> None:
        with progress.plan([("methods", 1)]):
            for _ in progress.track("abc", "methods", [1, 2, 7]):
                pass

    assert done(work) == [0, 0.1, 0.3, 1]


def test_a_stage_that_does_not_come_is_passed_over_and_one_that_was_not_planned_takes_nothing() -> None:
    def work() -> None:
        with progress.plan([("a", 1), ("b", 1), ("c", 2)]):
            count("unknown", 5)
            count("c", 2)

    assert done(work) == [0, 0.5, 0.75, 1]


def test_the_same_stage_can_come_twice() -> None:
    def work() -> None:
        with progress.plan([("images", 1)] * 2):
            count("images", 2)
            count("images", 2)

    assert done(work) == [0, 0.25, 0.5, 0.75, 1]


def test_work_without_a_plan_never_goes_back_and_never_claims_to_be_done() -> None:
    shares = done(lambda: [count(name, 3) for name in "abc"] and None)
    assert shares == sorted(shares)
    assert shares[-1] < 1


def test_a_stage_that_failed_does_not_disturb_the_next() -> None:
    def work() -> None:
        with progress.plan([("a", 1), ("b", 1)]):
            kept = progress.track(range(9), "a")  # stays open, as a traceback keeps it
            next(kept)
            with suppress(ValueError), progress.stage("inner"):
                raise ValueError
            count("b", 2)

    first, *_, start, half, end = done(work)
    assert (first, start, half, end) == (0, 0.5, 0.75, 1)


def test_a_watcher_hears_where_the_step_at_hand_will_end() -> None:
    def work() -> None:
        with progress.plan([("images", 1)]):
            count("images", 2)

    assert watched(work)[:2] == [(0, 0.5), (0.5, 1)]

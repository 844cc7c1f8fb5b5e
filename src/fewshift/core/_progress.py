"""Progress of long work, reported to a listener. There is none by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from fewshift.core._bars import bars
from fewshift.errors import FewshiftError

Listener = Callable[[str, int, int], None]  # what, done, total
Progress = Listener | bool | None  # True for bars of our own, False or None for nothing
Item = TypeVar("Item")

_listener: ContextVar[Listener | None] = ContextVar("fewshift_progress", default=None)


@contextmanager
def told_to(progress: Progress) -> Iterator[Listener | None]:
    """Within the block, `track` reports to this listener; None keeps the listener of the surrounding block."""
    if progress is None or progress is False:
        yield None
    elif progress is True:
        with bars() as listener, told_to(listener):
            yield listener
    elif not callable(progress):
        raise FewshiftError(f"progress={progress!r} hears nothing: pass True, or a callable (what, done, total)")
    else:
        token = _listener.set(progress)
        try:
            yield progress
        finally:
            _listener.reset(token)


def silent() -> AbstractContextManager[Listener | None]:
    """Within the block nobody listens."""
    return told_to(lambda what, done, total: None)


def track(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Iterate over `items` and report after each how many are done."""
    listener = _listener.get()
    for done, item in enumerate(items):
        yield item
        if listener is not None:
            listener(what, done + 1, len(items))

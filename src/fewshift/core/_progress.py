"""Progress of long work, reported to a listener. There is none by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

Listener = Callable[[str, int, int], None]  # what, done, total
Item = TypeVar("Item")

_listener: ContextVar[Listener | None] = ContextVar("fewshift_progress", default=None)


@contextmanager
def told_to(listener: Listener | None) -> Iterator[None]:
    """Within the block, `track` reports to `listener`; None keeps the listener of the surrounding block."""
    if listener is None:
        yield
        return
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def silent() -> AbstractContextManager[None]:
    """Within the block nobody listens."""
    return told_to(lambda what, done, total: None)


def track(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Iterate over `items` and report after each how many are done."""
    listener = _listener.get()
    for done, item in enumerate(items):
        yield item
        if listener is not None:
            listener(what, done + 1, len(items))

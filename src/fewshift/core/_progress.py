"""Progress of long work. A listener hears the steps of each stage; a watcher hears how much of the whole is done.

Steps nest: what is tracked within a step divides that step. Stages that follow each other are announced by `plan`, with
what they cost relative to each other, so that the share that is done and the time that is left are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

from fewshift.core._bars import shown
from fewshift.errors import FewshiftError

Listener = Callable[[str, int, int], None]  # what, done, total
Progress = Listener | bool | None  # True for a bar of our own, False or None for nothing
Item = TypeVar("Item")
UNPLANNED = 0.95  # of what is left of a step goes to a stage that nobody announced

_listener: ContextVar[Listener | None] = ContextVar("fewshift_progress", default=None)
_whole: ContextVar[_Whole | None] = ContextVar("fewshift_whole", default=None)


class Stage(NamedTuple):
    """A part of the work, and what it costs relative to others."""

    what: str
    cost: float


class Share(NamedTuple):
    """How much of the whole is done, and how much will be when the step at hand is."""

    done: float
    then: float


Watcher = Callable[[Share], None]


@contextmanager
def told_to(progress: Progress, doing: str = "working") -> Iterator[Listener | None]:
    """Within the block, `track` reports to this listener; None keeps the listener of the surrounding block.

    True shows a bar that says what is being done.
    """
    if progress is None or progress is False:
        yield None
    elif progress is True:
        with shown(doing) as bar, watched_by(bar.watch), told_to(bar.hear):
            yield bar.hear
    elif not callable(progress):
        raise FewshiftError(f"progress={progress!r} hears nothing: pass True, or a callable (what, done, total)")
    else:
        token = _listener.set(progress)
        try:
            yield progress
        finally:
            _listener.reset(token)


@contextmanager
def counted(doing: str, line_pause: float) -> Iterator[Callable[..., None]]:
    """A bar for work that counts its steps itself: call it with what, done, total and a note; stages are not heard."""
    with shown(doing, line_pause=line_pause, staged_lines=True) as bar, silent():
        yield bar.count


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Within the block, `watcher` hears how much of it is done whenever that changes."""
    token = _whole.set(_Whole(watcher))
    try:
        yield
    finally:
        _whole.reset(token)


def silent() -> AbstractContextManager[Listener | None]:
    """Within the block no listener hears anything; the whole is watched on."""
    return told_to(lambda what, done, total: None)


def track(items: Sequence[Item], what: str, costs: Sequence[float] | None = None) -> Iterator[Item]:
    """Iterate over `items` and report after each how many are done; `costs` are relative, and equal by default."""
    listener, whole = _listener.get(), _whole.get()
    span = None if whole is None else whole.enter(what)
    ends = [0.0, *accumulate([1.0] * len(items) if costs is None else costs)]
    for done, item in enumerate(items):
        if whole is not None and span is not None:
            whole.step(span, ends[done] / ends[-1], ends[done + 1] / ends[-1])
        yield item
        if listener is not None:
            listener(what, done + 1, len(items))
    if whole is not None and span is not None:
        whole.leave(span)


@contextmanager
def plan(stages: Sequence[Stage | tuple[str, float]]) -> Iterator[None]:
    """Within the block come these stages, in this order; one that does not come is passed over."""
    whole = _whole.get()
    if whole is None or not stages:
        yield
        return
    span = whole.enter("")
    ends = [0.0, *accumulate(cost for _, cost in stages)]
    total = ends[-1] or 1.0
    span.parts = [
        (what, span.at(start / total), span.at(end / total))
        for (what, _), start, end in zip(stages, ends, ends[1:], strict=False)
    ]
    try:
        yield
    finally:
        whole.leave(span)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """The block is one stage of the plan around it."""
    whole = _whole.get()
    if whole is None:
        yield
        return
    span = whole.enter(what)
    whole.begin(span)
    try:
        yield
    finally:
        whole.leave(span)


@dataclass
class _Span:
    """A part of the whole, from `start` to `end`; `free` is what no stage within it has taken."""

    start: float
    end: float
    depth: int
    free: float
    parts: list[tuple[str, float, float]] = field(default_factory=list)  # stages to come: name, start, end

    def at(self, share: float) -> float:
        return self.start + share * (self.end - self.start)


class _Whole:
    """The spans that are open, the innermost last."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.spans = [_Span(0.0, 1.0, 0, 0.0)]
        self.done = 0.0

    def enter(self, what: str) -> _Span:
        """Open the span of a stage: as planned, or most of what is left of the innermost one."""
        for holder in reversed(self.spans):
            for number, (name, start, end) in enumerate(holder.parts):
                if name == what:
                    del holder.parts[: number + 1]
                    # a stage that was left by an exception may still be open
                    return self._open(holder, start, end)
        holder = self.spans[-1]
        if holder.parts:  # a stage that is not in the plan takes no share of it
            return self._open(holder, holder.free, holder.free)
        share = 1.0 if what == "" else UNPLANNED
        return self._open(holder, holder.free, holder.free + share * (holder.end - holder.free))

    def _open(self, holder: _Span, start: float, end: float) -> _Span:
        del self.spans[holder.depth + 1 :]
        span = _Span(start, end, holder.depth + 1, start)
        self.spans.append(span)
        return span

    def begin(self, span: _Span) -> None:
        """Begin a stage whose steps are not known yet."""
        self._tell(span.start, span.start)

    def step(self, span: _Span, start: float, end: float) -> None:
        """Begin a step, from one share of the span to another."""
        del self.spans[span.depth + 1 :]
        if len(self.spans) == span.depth:  # closed by a stage around it
            self.spans.append(span)
        self.spans.append(_Span(span.at(start), span.at(end), span.depth + 1, span.at(start)))
        self._tell(span.at(start), span.at(end))

    def leave(self, span: _Span) -> None:
        """Close a span: all of it is done."""
        del self.spans[span.depth :]
        holder = self.spans[-1]
        holder.free = max(holder.free, span.end)
        self._tell(span.end, span.end)  # what comes next is not known yet

    def _tell(self, done: float, then: float) -> None:
        self.done = max(self.done, done)
        self.watcher(Share(self.done, max(self.done, then)))

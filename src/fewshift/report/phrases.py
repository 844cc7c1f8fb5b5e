"""Phrases: numbers, sizes and names as people write them."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Sequence

from fewshift.core.delta import Delta


def sentence(phrase: str) -> str:
    """The phrase with a capital first letter, the others as they are."""
    return phrase[:1].upper() + phrase[1:]


def size(delta: Delta) -> str:
    """The changed tensors in bytes."""
    count = sum(tensor.nbytes for tensor in delta.bits.values())
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """In a unit that suits it."""
    for most, unit, name in ((100, 1, "seconds"), (6000, 60, "minutes")):
        if seconds < most:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 3600:.1f} hours"


def quoted(text: str) -> str:
    """As a string in Python."""
    return json.dumps(text, ensure_ascii=False)


def shell(text: str) -> str:
    """As one word on a command line."""
    return shlex.quote(text)


def counted(count: int, one: str, more: str | None = None) -> str:
    """A number and what is counted, singular or plural."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def over_draws(values: Sequence[float], sign: str = "") -> str:
    """Mean ± population standard deviation; a single draw has no spread."""
    spread = f" ± {statistics.pstdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.1f}{spread}"


def times_as_likely(nats: float) -> str:
    """A ratio of likelihoods: 2.3 times as likely, or 2.3 times less likely."""
    ratio = math.exp(min(abs(nats), 100))
    number = "over 1,000" if ratio > 1000 else f"{ratio:.1f}"
    return f"{number} times {'as' if nats >= 0 else 'less'} likely"

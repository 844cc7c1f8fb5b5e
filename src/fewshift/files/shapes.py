"""What a value that was read from a file has to be: small tests that are put together into larger ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any], bool]
LARGEST = 1e100  # whose square is a number still


def is_text(value: Any) -> bool:
    """A word, perhaps an empty one."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def is_count(value: Any) -> bool:
    """A whole number from 0 that fits into 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """A number that can be squared and is not infinite; it may be none (NaN)."""
    return type(value) in (int, float) and not abs(value) > LARGEST


def is_finite(value: Any) -> bool:
    """A number."""
    return is_number(value) and math.isfinite(value)


def is_loss(value: Any) -> bool:
    """Any float or whole number, infinite ones too."""
    return type(value) in (int, float)


def is_table(value: Any) -> bool:
    """Anything by its name."""
    return isinstance(value, dict)


def anything(_: Any) -> bool:
    """Every value."""
    return True


def or_none(shape: Shape) -> Shape:
    """The shape, or nothing."""
    return lambda value: value is None or shape(value)


def either(*shapes: Shape) -> Shape:
    """One of several shapes."""
    return lambda value: any(shape(value) for shape in shapes)


def one_of(*values: Any) -> Shape:
    """One of these values, of the same type."""
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def list_of(shape: Shape, *, least: int = 0, most: int | None = None) -> Shape:
    """A list of values of a shape."""
    return lambda value: (
        isinstance(value, list)
        and len(value) >= least
        and (most is None or len(value) <= most)
        and all(map(shape, value))
    )


def table_of(shape: Shape) -> Shape:
    """Values of a shape by their names."""
    return lambda value: isinstance(value, dict) and all(map(shape, value.values()))


def fields(needed: Mapping[str, Shape], more: Mapping[str, Shape] | None = None) -> Shape:
    """A table with all the needed fields; those that are not known here are left alone."""
    known = {**(more or {}), **needed}
    return lambda value: (
        isinstance(value, dict)
        and needed.keys() <= value.keys()
        and all(shape(value[name]) for name, shape in known.items() if name in value)
    )

"""Settings: frozen dataclasses whose fields are plain values, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import inf
from typing import Any, get_args, get_type_hints

from fewshift.errors import FewshiftError

WORDS = {
    int: "a whole number from 0",
    float: "a number from 0",
    str: "a word",
    bool: "true or false",
    type(None): "none",
}


@dataclass(frozen=True)
class Settings:
    """Methods, recipes and algorithms: each field has the type of its annotation, and no number is negative or NaN."""

    def __post_init__(self) -> None:
        for name, kinds in kinds_of(type(self)).items():
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = type(value) in kinds or (float in kinds and number)
            if not fits or (number and not 0 <= value < inf):
                words = " or ".join(WORDS[kind] for kind in kinds)
                raise FewshiftError(f"{name}={value!r} {self._misfit()}: give {words}")
        self.check()

    def check(self) -> None:
        """Check what only the class knows about its fields; raise a FewshiftError."""

    def at_least(self, **least: int) -> None:
        """Raise one sentence when a field is smaller than it can be."""
        for name, smallest in least.items():
            if (value := getattr(self, name)) is not None and value < smallest:
                raise FewshiftError(f"{name}={value} is too small: give at least {smallest}")

    def one_of(self, **allowed: Iterable[object]) -> None:
        """Raise one sentence when a field is none of the values it can have."""
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                choices = ", ".join(map(str, values))
                raise FewshiftError(f"{name}={getattr(self, name)!r} is unknown: choose one of {choices}")

    def settings(self) -> dict[str, Any]:
        """The fields, ready for JSON: `type(self)(**settings)` is the same value."""
        return asdict(self)

    def _misfit(self) -> str:
        return "cannot be"


def kinds_of(settings: Any) -> dict[str, tuple[type, ...]]:
    """The types that each field of a class may have."""
    return dict(_kinds(settings))


@cache  # a report builds thousands of methods to name its cells, and reading annotations is slow
def _kinds(settings: Any) -> dict[str, tuple[type, ...]]:
    hints = get_type_hints(settings)
    return {field.name: get_args(hints[field.name]) or (hints[field.name],) for field in fields(settings)}

"""Settings: frozen dataclasses whose fields are plain values, checked when they are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any, get_args, get_type_hints

from fewshift.core.method import WORDS
from fewshift.errors import FewshiftError


@dataclass(frozen=True)
class Settings:
    """Recipes and algorithms: every field has the kind of value its annotation says, and no number is negative."""

    def __post_init__(self) -> None:
        for name, kinds in kinds_of(type(self)).items():
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = type(value) in kinds or (float in kinds and number)
            if not fits or (number and not 0 <= value < inf):
                words = " or ".join(WORDS[kind] for kind in kinds)
                raise FewshiftError(f"{name}={value!r} cannot be: give {words}")
        self.check()

    def check(self) -> None:
        """Check what only the class knows about its fields; raise a FewshiftError."""

    def at_least(self, **least: int) -> None:
        """Raise one sentence when a field is smaller than it can be."""
        for name, value in least.items():
            if (own := getattr(self, name)) is not None and own < value:
                raise FewshiftError(f"{name}={own} is too small: give at least {value}")

    def one_of(self, **tables: Any) -> None:
        """Raise one sentence when a field is a word that its table does not have."""
        for name, table in tables.items():
            if getattr(self, name) not in table:
                raise FewshiftError(f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(table)}")

    def settings(self) -> dict[str, Any]:
        """The fields, ready for JSON: `type(self)(**settings)` is the same value."""
        return asdict(self)


def kinds_of(of: type[Settings]) -> dict[str, tuple[type, ...]]:
    """The types that each field may have."""
    hints = get_type_hints(of)
    return {field.name: get_args(hints[field.name]) or (hints[field.name],) for field in fields(of)}

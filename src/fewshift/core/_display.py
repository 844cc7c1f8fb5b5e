"""How results look in a terminal and in a notebook: a title and a few facts, never a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape

MOST_NAMES = 5


class Displayed(ABC):
    """Something that is shown by its facts. Dataclasses that inherit this need `repr=False`."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """A few facts by their names, for people."""

    def __repr__(self) -> str:
        return "\n".join([self.title, *aligned(self.facts)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{escape(name)}</th>'
            f'<td style="text-align:left;white-space:pre-line">{escape(value)}</td></tr>'
            for name, value in self.facts.items()
        )
        return f"<div><strong>{escape(self.title)}</strong><table>{rows}</table></div>"


def aligned(facts: Mapping[str, str]) -> list[str]:
    """One line for each fact, with the values below each other."""
    width = max(map(len, facts), default=0)
    return [f"  {name:{width}}  {value}" for name, value in facts.items()]


def few(names: tuple[str, ...]) -> str:
    """The first names, and how many there are."""
    return ", ".join(names[:MOST_NAMES]) + (f" ... ({len(names)})" if len(names) > MOST_NAMES else "")


def byte_size(count: int) -> str:
    """So many bytes in a unit that suits."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"

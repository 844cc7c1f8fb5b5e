"""Names of classes, as people write them and as a network has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any
from unicodedata import normalize

from fewshift.core._names import as_text
from fewshift.errors import FewshiftError


def plain_name(name: str) -> str:
    """A class name without case, spaces and punctuation, as names are compared."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def class_numbers(
    names: Iterable[str],
    classes: Sequence[str],
    whose: str,
    alike: Callable[[str], str] = str.casefold,
    remedy: str = "rename or remove it",
) -> dict[str, int]:
    """The position of each name in `classes`; a name may differ in case, or as `alike` has it, if that leaves no doubt.

    Any other name is an error that suggests the class it may be meant for. So are two names for one class.
    """
    numbers: dict[str, int] = {}
    for name in names:
        same = [number for number, known in enumerate(classes) if known == name]
        same = same or [number for number, known in enumerate(classes) if _composed(known) == _composed(name)]
        same = same or [number for number, known in enumerate(classes) if alike(known) == alike(name)]
        if len(same) != 1:
            guess = _guess(name, classes)
            raise FewshiftError(
                f"{whose} has a class {name!r} that the network does not know: "
                f"{f'did you mean {guess!r}? ' if guess else ''}{remedy}, the known classes are "
                f"{some(classes)}"
            )
        if other := next((other for other, number in numbers.items() if number == same[0]), None):
            raise FewshiftError(
                f"{whose} has {other!r} and {name!r}, and the network one class {classes[same[0]]!r}: put them together"
            )
        numbers[name] = same[0]
    return numbers


def _composed(name: str) -> str:
    """A name with each accent in its letter, where some file systems write it behind."""
    return normalize("NFC", name)


def _guess(name: str, classes: Sequence[str]) -> str | None:
    """The class that differs in case, spaces, punctuation or plural, or the one spelled most like it."""
    plain = {plain_name(known): known for known in reversed(classes)}
    wanted = plain_name(name)
    numbered = next((known for known in plain if wanted in _plurals(known) or known in _plurals(wanted)), None)
    alike = [numbered] if numbered is not None else get_close_matches(wanted, plain, n=1, cutoff=0.75)
    return plain[alike[0]] if alike else None


def _plurals(word: str) -> set[str]:
    """A word and what may be its plural."""
    return {word, f"{word}s", f"{word}es"} | ({f"{word[:-1]}ies"} if word.endswith("y") else set())


def some(things: Sequence[Any], most: int = 20) -> str:
    """The first few things, and how many more there are."""
    rest = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + rest


def refuse_repeated(names: Sequence[str]) -> None:
    """One sentence where two classes have one name: their answers could not be told apart."""
    known: set[str] = set()
    for name in names:
        if name in known:
            raise FewshiftError(f"the class name {as_text(name)} occurs twice: name every class once (classes=)")
        known.add(name)

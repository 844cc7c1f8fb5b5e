"""The one exception of the library, and the one of the system that it words."""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # how the system says that a disk is full
LONGEST = 2000  # letters of a sentence


class FewshiftError(ValueError):
    """A mistake the user can mend: one lower-case sentence that states the facts and ends in what to do.

    Facts may come from files that anybody made: what cannot be printed, a new line or a terminal's commands, is shown
    as Python writes it, and the middle of an endless one is left out.
    """

    def __init__(self, sentence: str = "") -> None:
        super().__init__(_shortened(printable(sentence)))


class DivergedError(FewshiftError):
    """Gradient steps went astray; other candidates may do."""


class NotFiniteError(FewshiftError):
    """A layer sees NaN or infinity; other statistics may do."""


def printable(text: str, kept: str = "") -> str:
    """The text with what cannot be printed as Python writes it, except for the letters `kept`."""
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _shortened(sentence: str) -> str:
    half = LONGEST // 2
    return sentence if len(sentence) <= LONGEST else f"{sentence[: half - 5]} ... {sentence[-half:]}"

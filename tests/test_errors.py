"""The one exception: a sentence is one line, whatever the facts in it are."""

from __future__ import annotations

import pickle

import pytest

from fewshift import FewshiftError
from fewshift.studio.labels_store import ConflictError, ImageMark


@pytest.mark.parametrize(
    ("fact", "shown"),
    [
        ("two\nlines", "two\\nlines"),
        ("\x1b[2Jcleared", "\\x1b[2Jcleared"),
        ("half \ud800", "half \\ud800"),
        ("naïve 猫 😀", "naïve 猫 😀"),
        ("C:\\new", "C:\\new"),
    ],
)
def test_what_cannot_be_printed_is_shown_as_python_writes_it(fact: str, shown: str) -> None:
    error = FewshiftError(f"there is no class '{fact}': add it")
    assert str(error) == f"there is no class '{shown}': add it"
    str(error).encode()
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_middle_of_an_endless_sentence_is_left_out() -> None:
    sentence = str(FewshiftError(f"the card has classes {'x' * 100_000}: mend it"))
    assert len(sentence) <= 2000
    assert sentence.startswith("the card has classes xxx")
    assert sentence.endswith("xxx: mend it")


def test_errors_with_more_to_say_are_one_line_too() -> None:
    assert str(ConflictError("a\nb.jpg", ImageMark())).startswith("the label of a\\nb.jpg was changed")

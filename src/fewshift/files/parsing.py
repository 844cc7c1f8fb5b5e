"""JSON and TOML in files that people give us: data of modest depth and size, or one sentence that names the file.

The standard library raises errors of several types for text that is broken or built to break it, and hands over values
that break whoever uses them next: a thousand lists inside each other, whole numbers that no float can hold, halves of
characters that cannot be printed.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fewshift.errors import FewshiftError

DEEPEST = 100  # lists and tables inside each other
LARGEST = 2**128  # above the identifiers that label tools write, far below what a float holds
DIGITS = 18  # of a whole number in a line of text
LONGEST_TOML = 2**18  # bytes; the parser takes quadratic time for some texts
KEY = r"""(?:[\w-]++|"[^"\n]*"|'[^'\n]*')"""
LONG_KEY = re.compile(rf"(?<![\w-]){KEY}(?:[ \t]*\.[ \t]*{KEY}){{{DEEPEST}}}")  # of TOML: tables inside each other too
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character that JSON writes as two


def parsed_json(text: str | bytes, what: object, cure: str) -> Any:
    """The value of a JSON text; `what` has it, and `cure` is what to do if it is none."""
    try:
        value = json.loads(text)
        _refuse_monsters(value)
        if HALF.search(text if isinstance(text, str) else text.decode("ascii", "replace")):
            # raises if a half stands alone; those that stand for a byte of a file's name do not count
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except (ValueError, RecursionError) as error:
        raise FewshiftError(f"{what} is not JSON ({_why(error)}): {cure}") from error
    return value


def read_json(path: str | Path, what: object, cure: str) -> Any:
    """The value in a JSON file; `what` names it in the sentence about a file that has none."""
    return parsed_json(_read(path, what, cure), what, cure)


def parsed_word(word: str) -> Any:
    """A value as a command has it: JSON where it is JSON, such as 5 or [1, 2], and the word itself otherwise."""
    try:
        return parsed_json(word, "the word", "write a value")
    except FewshiftError:
        return word


def whole_number(word: str) -> int | None:
    """The whole number from 0 that a word is, if it is one of a size that anything here may have."""
    return int(word) if word.isdecimal() and len(word) <= DIGITS else None


def read_toml(path: str | Path, what: object, cure: str) -> dict[str, Any]:
    """The content of a TOML file; `what` names it in the sentence about a file that is none."""
    content = _read(path, what, cure)
    try:
        if len(content) > LONGEST_TOML:
            raise ValueError(f"it has {len(content):,} bytes, more than {LONGEST_TOML:,}")  # noqa: TRY301
        text = content.decode("utf-8")
        if LONG_KEY.search(text):
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")  # noqa: TRY301
        value = tomllib.loads(text)
        _refuse_monsters(value)
    except (ValueError, RecursionError) as error:
        raise FewshiftError(f"{what} is no TOML file ({_why(error)}): {cure}") from error
    return value


def _read(path: str | Path, what: object, cure: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a path may have characters that no file has
        raise FewshiftError(f"{what} cannot be read ({_why(error)}): {cure}") from error


def _refuse_monsters(value: Any) -> None:
    """A ValueError for a value that is nested too deeply, or has a whole number that is too large."""
    level = [value]
    for _ in range(DEEPEST):
        if any(type(node) is int and not -LARGEST < node < LARGEST for node in level):
            raise ValueError("a whole number in it is too large")
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, list):
        yield from node


def _why(error: Exception) -> str:
    """The reason in a few words."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {DEEPEST} levels"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    if "int_max_str_digits" in str(error):
        return "a whole number in it is too large"
    return str(error).partition("\n")[0]

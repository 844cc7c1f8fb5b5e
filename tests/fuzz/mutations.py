"""Files that are nearly right: bytes, JSON and safetensors with something changed, all drawn from one generator."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS = (0, 1, -1, 2, 127, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
DEEP = "[" * 3000 + "]" * 3000
WORDS = (
    "",
    " ",
    "\0",
    "\n",
    "\ud800",
    "../../../etc/passwd",
    "%s%n",
    "{0.__class__}",
    "x" * 5000,
    "NaN",
    "é",
    "\x1b[2J",
)


def odd_value(draw: Random) -> Any:
    """A value that few readers expect."""
    return draw.choice(ODD)(draw)


def _deep(draw: Random) -> Any:
    value: Any = 1
    for _ in range(draw.choice((5, 99, 150))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


ODD: Sequence[Callable[[Random], Any]] = (
    lambda draw: draw.choice(NUMBERS),
    lambda draw: draw.choice((0.5, -0.0, 1e308, -1e308, 1e-320, float("inf"), float("-inf"), float("nan"))),
    lambda draw: draw.choice((None, True, False)),
    lambda draw: draw.choice(WORDS),
    lambda draw: [odd_value(draw) for _ in range(draw.randrange(4))],
    lambda draw: {draw.choice(("a", "key", "id", "", "format")): odd_value(draw) for _ in range(draw.randrange(4))},
    lambda draw: "".join(draw.choices(string.printable, k=draw.randrange(30))),
    _deep,
)


def changed_value(value: Any, draw: Random) -> Any:
    """The same JSON value with one to three places changed."""
    value = _copy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _changed_once(value, draw)
    return value


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _changed_once(value: Any, draw: Random) -> Any:
    places = list(_places(value))
    if not places or draw.random() < 0.02:
        return odd_value(draw)
    holder, key = draw.choice(places)
    what = draw.randrange(6)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, list):
        holder.insert(key, odd_value(draw))
    elif what == 1:
        holder[draw.choice(WORDS)] = holder[key]
    elif what == 2:
        other, its_key = draw.choice(places)
        holder[key] = _copy(other[its_key])
    elif what == 3 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        holder[key] = draw.choice((-holder[key], holder[key] + 1, holder[key] * 1000, str(holder[key])))
    else:
        holder[key] = odd_value(draw)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value, however deep it is."""
    places, left = [], [value]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        places += [(node, key) for key in keys]
        left += [node[key] for key in keys]
    return places


def json_text(value: Any, draw: Random) -> bytes:
    """The value as JSON, sometimes with a text that only a reader can make of it."""
    text = json.dumps(value)
    for old, new in (('"', DEEP), ("1", "9" * 5000), (":", ': {"a": 1},'), (",", ","), ("0", "1e999")):
        if draw.random() < 0.02:
            text = text.replace(old, new, 1)
    return text.encode()


def changed_json(content: bytes, draw: Random) -> bytes:
    """A JSON file with a few values changed, or some bytes."""
    if draw.random() < 0.25:
        return changed_bytes(content, draw)
    return json_text(changed_value(json.loads(content), draw), draw)


def changed_lines(content: bytes, draw: Random) -> bytes:
    """A file of JSON lines with one of them changed."""
    if draw.random() < 0.25:
        return changed_bytes(content, draw)
    lines = content.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json_text(changed_value(json.loads(lines[at]), draw), draw)
    return b"\n".join(lines) + b"\n"


def changed_text(content: bytes, draw: Random) -> bytes:
    """A text with words, numbers or signs changed, or some bytes."""
    if draw.random() < 0.3:
        return changed_bytes(content, draw)
    words = content.decode("utf-8", "replace").replace("\n", " \n ").replace(",", " , ").split(" ")
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(words))
        odd = [
            *WORDS,
            *map(str, NUMBERS),
            "[",
            "]",
            "{",
            "}",
            "=",
            '"',
            ",",
            "\n",
            "true",
            "1.5",
            "[[",
            "9" * 5000,
            DEEP,
        ]
        words[at] = draw.choice([*odd, *words])
    return " ".join(words).replace(" , ", ",").encode("utf-8", "surrogatepass")


def changed_bytes(content: bytes, draw: Random) -> bytes:
    """A file with some bytes changed, moved, doubled, cut off or put in."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5, 20))):
        if not data:
            return bytes(data)
        draw.choice(BYTE_CHANGES)(data, draw.randrange(len(data)), draw)
    return bytes(data)


def _flip(data: bytearray, at: int, draw: Random) -> None:
    data[at] ^= 1 << draw.randrange(8)


def _set(data: bytearray, at: int, draw: Random) -> None:
    data[at] = draw.choice((0, 255, 128, 127, draw.randrange(256)))


def _number(data: bytearray, at: int, draw: Random) -> None:
    size, order = draw.choice((1, 2, 4, 8)), draw.choice(("little", "big"))
    data[at : at + size] = (draw.choice(NUMBERS) % 256**size).to_bytes(size, order)


def _cut(data: bytearray, at: int, draw: Random) -> None:
    del data[at:]


def _remove(data: bytearray, at: int, draw: Random) -> None:
    del data[at : at + draw.randrange(1, 40)]


def _double(data: bytearray, at: int, draw: Random) -> None:
    data[at:at] = data[at : at + draw.randrange(1, 200)] * draw.choice((1, 2, 50))


def _put_in(data: bytearray, at: int, draw: Random) -> None:
    data[at:at] = draw.randbytes(draw.randrange(1, 40))


def _move(data: bytearray, at: int, draw: Random) -> None:
    size, other = draw.randrange(1, 64), draw.randrange(len(data))
    data[at : at + size] = data[other : other + size]


BYTE_CHANGES: Sequence[Callable[[bytearray, int, Random], None]] = (
    _flip, _flip, _set, _number, _cut, _remove, _double, _put_in, _move,
)  # fmt: skip


def garbage(draw: Random) -> bytes:
    """Anything at all."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.choice((0, 1, 7, 8, 9, 64, 1000)))
    if kind == 1:
        return json_text(odd_value(draw), draw)
    if kind == 2:
        signs = ["[", "]", "{", "}", '"', ":", ",", "=", "\n", "1", "a", " ", "null", "-", "e", "\\", "#", "."]
        return "".join(draw.choices(signs, k=draw.randrange(60))).encode()
    beginnings = (
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a",
        b"II*\0",
        b"PK\x03\x04",
        b"\x80\x02",
        b"RIFF",
        b"BM",
    )
    return draw.choice(beginnings) + draw.randbytes(draw.randrange(200))

"""Where the tensors of a network lie in an ONNX file: read from its bytes, without any package.

ONNX is protobuf: a message is a row of (number, kind, content). Only the few numbers that lead to the initializers and
to the metadata are known here; everything else is passed over. PyTorch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fewshift.errors import FewshiftError

VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5  # kinds of content
GRAPH, METADATA = 7, 14  # of a model
INITIALIZER = 5  # of a graph
DIMS, TYPE, NAME, RAW, EXTERNAL = 1, 2, 8, 9, 13  # of a tensor
KEY, VALUE = 1, 2  # of an entry of the metadata
LONGEST = 64  # bits of a number
TYPES = {  # as safetensors calls them
    1: "F32", 2: "U8", 3: "I8", 5: "I16", 6: "I32", 7: "I64", 9: "BOOL", 10: "F16", 11: "F64", 16: "BF16",
}  # fmt: skip


class TensorPlace(NamedTuple):
    """One tensor: its type, its shape, and from where to where its values lie in the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class OnnxLayout:
    """The named tensors of an ONNX file, and its metadata."""

    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, content: bytes, where: object) -> OnnxLayout:
        """Read the layout; what is no ONNX file, or not a whole one, is one sentence."""
        try:
            fields = list(_fields(content, 0, len(content)))
            graphs = [field for field in fields if field.number == GRAPH]
            tensors = [
                _tensor(content, field)
                for graph in graphs
                for field in _fields(content, graph.start, graph.stop)
                if field.number == INITIALIZER
            ]
            entries = [_entry(content, field) for field in fields if field.number == METADATA]
        except (ValueError, IndexError) as error:
            raise FewshiftError(f"{where} is not a whole ONNX file: export it again") from error
        if not graphs:
            raise FewshiftError(f"{where} is not an ONNX file: give one that `fewshift export` wrote")
        return cls({name: place for name, place in tensors if place is not None}, dict(entries))


class _Field(NamedTuple):
    number: int
    kind: int
    value: int  # of a number
    start: int  # of anything longer
    stop: int


def _fields(content: bytes, at: int, stop: int) -> Iterator[_Field]:
    while at < stop:
        tag, at = _varint(content, at)
        kind, value, start = tag & 7, 0, at
        if kind == VARINT:
            value, at = _varint(content, at)
        elif kind == LENGTH:
            length, start = _varint(content, at)
            at = start + length
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            at += 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError(kind)
        if at > stop:
            raise ValueError(at)
        yield _Field(tag >> 3, kind, value, start, at)


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, LONGEST, 7):
        byte = content[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a number without an end")


def _tensor(content: bytes, field: _Field) -> tuple[str, TensorPlace | None]:
    """A tensor's name and place; no place if its values are not raw bytes of this file."""
    name, kind, shape, raw = "", 0, [], None
    for part in _fields(content, field.start, field.stop):
        if part.number == NAME:
            name = content[part.start : part.stop].decode()
        elif part.number == TYPE:
            kind = part.value
        elif part.number == DIMS:
            shape += _dims(content, part)
        elif part.number == RAW:
            raw = part
        elif part.number == EXTERNAL:
            return name, None
    if raw is None or kind not in TYPES:
        return name, None
    return name, TensorPlace(TYPES[kind], tuple(shape), raw.start, raw.stop)


def _dims(content: bytes, part: _Field) -> list[int]:
    """One size, or several that were packed together."""
    if part.kind == VARINT:
        return [part.value]
    sizes, at = [], part.start
    while at < part.stop:
        size, at = _varint(content, at)
        sizes.append(size)
    return sizes


def _entry(content: bytes, field: _Field) -> tuple[str, str]:
    parts = {
        part.number: content[part.start : part.stop].decode() for part in _fields(content, field.start, field.stop)
    }
    return parts.get(KEY, ""), parts.get(VALUE, "")

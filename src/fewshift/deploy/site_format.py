"""Site files: the tensors of a base network that are different at one site, with all that is needed to use them safely.

A site file is a safetensors file, a length, a header in JSON and the values, whose header begins with a digest of all
its bytes. PyTorch is not imported, nor is any other package: a device reads it with this module alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fewshift.deploy.onnx_bytes import OnnxLayout
from fewshift.errors import FewshiftError
from fewshift.files.parsing import parsed_json
from fewshift.files.shapes import fields, is_count, is_finite, is_table, is_text, list_of, one_of, or_none, table_of

FORMAT = 1
BEGINNING = b'{"__metadata__": {"digest": "'  # of the header of every site file
BLANK = b"0" * 64  # where the digest goes
KEY = "fewshift-site"
LENGTH = 8  # bytes in which the size of the header is written
ALIGNED = 8
AGAIN = "make it again with `fewshift export --base`"
NUMBERS = list_of(is_finite, least=1)
STEPS = or_none(fields({"mean": NUMBERS, "std": NUMBERS}))  # as far as a device looks at them
CLASSES = or_none(list_of(is_text))
BASE = {  # what a base network says about itself, in its metadata
    "classes": CLASSES,
    "preprocess": STEPS,
    "input": fields(
        {
            "type": one_of("float32", "uint8"),
            "layout": one_of("NCHW", "NHWC"),
            "channels": is_count,
            "size": list_of(or_none(is_count), least=2, most=2),
        }
    ),
    "fewshift": fields({"weights": is_text}),
}
SITE = fields({"base": is_text, "network": is_text, "classes": CLASSES, "preprocess": STEPS, "about": is_table})
ENTRY = fields({"dtype": is_text, "shape": list_of(is_count), "data_offsets": list_of(is_count, least=2, most=2)})


class SiteTensor(NamedTuple):
    """The values of one tensor at the site, as they lie in the file of the base network."""

    type: str
    shape: tuple[int, ...]
    values: bytes


@dataclass(frozen=True)
class SiteFile:
    """What is different at one site: tensors by their names in the base network."""

    tensors: Mapping[str, SiteTensor]
    base: str  # digest of the file of the base network
    network: str  # fingerprint of the weights that are in it
    classes: tuple[str, ...] | None = None
    preprocess: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # method, versions: for people

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(len(tensor.values) for tensor in self.tensors.values())

    def to_bytes(self) -> bytes:
        """The whole file."""
        facts = {
            "format": FORMAT,
            "base": self.base,
            "network": self.network,
            "classes": self.classes,
            "preprocess": self.preprocess,
            "about": self.about,
        }
        header: dict[str, Any] = {"__metadata__": {"digest": BLANK.decode(), KEY: json.dumps(facts)}}
        at, parts = 0, []
        for name, tensor in sorted(self.tensors.items()):
            end = at + len(tensor.values)
            header[name] = {"dtype": tensor.type, "shape": list(tensor.shape), "data_offsets": [at, end]}
            parts.append(tensor.values)
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % ALIGNED)
        content = len(text).to_bytes(LENGTH, "little") + text + b"".join(parts)
        return content.replace(BLANK, _digest(content), 1)

    @classmethod
    def read(cls, path: str | Path) -> SiteFile:
        """Read a site file; a truncated, foreign or altered one is one clear sentence."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise FewshiftError(f"cannot read the site file {path}: {error.strerror}: check the path") from error
        begin = LENGTH + len(BEGINNING)
        if content[LENGTH:begin] != BEGINNING:
            raise FewshiftError(f"{path} is not a site file: {AGAIN}")
        if content[begin : begin + len(BLANK)] != _digest(content):
            raise FewshiftError(f"{path} was altered after it was written: {AGAIN}")
        facts, tensors = _parts(content, path)
        version = facts.pop("format", None)
        if type(version) is int and version > FORMAT:
            raise FewshiftError(f"{path} has a newer format than this library reads: update fewshift")
        if version != FORMAT or not SITE(facts) or facts.keys() - {"base", "network", "classes", "preprocess", "about"}:
            raise FewshiftError(f"{path} is not a whole site file: {AGAIN}")
        facts["classes"] = None if facts["classes"] is None else tuple(facts["classes"])
        return cls(tensors, **facts)


class BaseFile:
    """A base network in an ONNX file: its bytes, where its tensors lie in them, and what it says about itself."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.content = self.path.read_bytes()
        except OSError as error:
            raise FewshiftError(f"cannot read the network {path}: {error.strerror}: check the path") from error
        layout = OnnxLayout.of(self.content, path)
        self.tensors = layout.tensors
        cure = "export the network again"
        self.facts: dict[str, Any] = {
            key: parsed_json(layout.metadata[key], f"'{key}' in {path}", cure) for key in BASE if key in layout.metadata
        }
        if not fields(BASE)(self.facts):
            raise FewshiftError(f"{path} was not written by `fewshift export`: {cure}")

    @cached_property
    def digest(self) -> str:
        """Of all its bytes."""
        return hashlib.sha256(self.content).hexdigest()

    def at(self, site: SiteFile, path: str | Path) -> bytes:
        """The file with the site's values in the place of its own; the site of another base is refused."""
        if site.base != self.digest:
            if site.network == self.facts["fewshift"]["weights"]:
                raise FewshiftError(f"{path} was made for another export of the network in {self.path}: {AGAIN}")
            raise FewshiftError(
                f"{path} was made for another network than that in {self.path}: use a site of this base"
            )
        for name, tensor in site.tensors.items():
            own = self.tensors.get(name)
            if own is None or (own.type, own.shape, own.stop - own.start) != (*tensor[:2], len(tensor.values)):
                raise FewshiftError(
                    f"{path} has {name} as {tensor.type} of shape {tensor.shape}, which is no tensor of {self.path}: "
                    f"{AGAIN}"
                )
        parts: list[bytes | memoryview] = []
        at, whole = 0, memoryview(self.content)
        for name in sorted(site.tensors, key=lambda name: self.tensors[name].start):
            place = self.tensors[name]
            parts += [whole[at : place.start], site.tensors[name].values]
            at = place.stop
        return b"".join([*parts, whole[at:]])


def _parts(content: bytes, path: str | Path) -> tuple[dict[str, Any], dict[str, SiteTensor]]:
    """What the header says, and the tensors; each lies in the file."""
    values = LENGTH + int.from_bytes(content[:LENGTH], "little")
    header = parsed_json(content[LENGTH:values], f"the header of {path}", AGAIN)
    about: Any = header.pop("__metadata__", None) if is_table(header) else None
    size = len(content) - values
    if not fields({KEY: is_text})(about) or not table_of(ENTRY)(header):
        raise FewshiftError(f"{path} is not a whole site file: {AGAIN}")
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if not start <= stop <= size:
            raise FewshiftError(f"the values of {name} are not in {path}: {AGAIN}")
    facts = parsed_json(about[KEY], f"the header of {path}", AGAIN)
    tensors = {
        name: SiteTensor(
            entry["dtype"], tuple(entry["shape"]), content[slice(*(values + at for at in entry["data_offsets"]))]
        )
        for name, entry in header.items()
    }
    return facts if is_table(facts) else {}, tensors


def _digest(content: bytes) -> bytes:
    """SHA-256 of a file whose own digest counts as zeros."""
    begin = LENGTH + len(BEGINNING)
    hashed = hashlib.sha256(content[:begin])
    hashed.update(BLANK)
    hashed.update(memoryview(content)[begin + len(BLANK) :])
    return hashed.hexdigest().encode()

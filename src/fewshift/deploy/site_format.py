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

FORMAT = 1
BEGINNING = b'{"__metadata__": {"digest": "'  # of the header of every site file
BLANK = b"0" * 64  # where the digest goes
KEY = "fewshift-site"
LENGTH = 8  # bytes in which the size of the header is written
ALIGNED = 8
AGAIN = "make it again with `fewshift export --base`"
FACTS = ("classes", "preprocess", "input", "fewshift")  # what a base network says about itself, in its metadata


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
        values = LENGTH + int.from_bytes(content[:LENGTH], "little")
        header = json.loads(content[LENGTH:values])
        facts = json.loads(header.pop("__metadata__")[KEY])
        if facts.pop("format") != FORMAT:
            raise FewshiftError(f"{path} has a newer format than this library reads: update fewshift")
        tensors = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            tensors[name] = SiteTensor(entry["dtype"], tuple(entry["shape"]), content[values + start : values + stop])
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
        try:
            self.facts: dict[str, Any] = {key: json.loads(layout.metadata[key]) for key in FACTS}
        except (KeyError, ValueError) as error:
            raise FewshiftError(f"{path} was not written by `fewshift export`: export the network again") from error

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
        parts: list[bytes | memoryview] = []
        at, whole = 0, memoryview(self.content)
        for name in sorted(site.tensors, key=lambda name: self.tensors[name].start):
            place = self.tensors[name]
            parts += [whole[at : place.start], site.tensors[name].values]
            at = place.stop
        return b"".join([*parts, whole[at:]])


def _digest(content: bytes) -> bytes:
    """SHA-256 of a file whose own digest counts as zeros."""
    begin = LENGTH + len(BEGINNING)
    hashed = hashlib.sha256(content[:begin])
    hashed.update(BLANK)
    hashed.update(memoryview(content)[begin + len(BLANK) :])
    return hashed.hexdigest().encode()

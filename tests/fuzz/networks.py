"""Deltas, weights and site files: what a network becomes has to be what a file says, and no file runs anything."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fewshift import Delta
from fewshift.deploy.site_format import BEGINNING, BLANK, LENGTH, BaseFile, SiteFile, _digest
from fewshift.models.checkpoints import read_file
from fewshift.models.weights import load_all, named_like
from tests.deploy.test_edge import base, site
from tests.fuzz.fuzzing import GoodFile
from tests.fuzz.mutations import changed_bytes, changed_value, json_text
from tests.helpers.networks import make_tiny

IMAGES = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
CANARY = Path(tempfile.gettempdir()) / f"fewshift-fuzz-canary-{os.getpid()}"  # a file that no reader may make


# --- deltas


def honest_delta() -> Delta:
    gain = {"point": 1.0, "low": 0.5, "high": 2.0, "level": 0.9, "before": 50.0, "after": 51.0, "images": 9}
    outcome = {"accepted": True, "rule": "gain", "chosen": "blend", "gain": gain, "labelled": 9, "unlabelled": 0}
    steps = {"resize": 8, "crop": 8, "mean": [0.5] * 3, "std": [0.2] * 3}
    return Delta.between(
        make_tiny(), make_tiny(seed=3), method="lccs", settings={"epochs": 5}, classes=("a", "b", "c"),
        preprocess=steps, seed=0, shots=3, version="1.0", outcome=outcome,
    )  # fmt: skip


def deltas(folder: Path) -> list[GoodFile]:
    content = honest_delta().save(folder / "first.safetensors").read_bytes()
    return [GoodFile("d.safetensors", content, change) for change in (changed_bytes, forged_header, forged_tensors)]


def forged_header(content: bytes, draw: Random) -> bytes:
    """Other facts, with a digest that is right."""
    header, tensors = _parts(content)
    return _signed(changed_value(header, draw), tensors, draw)


def forged_tensors(content: bytes, draw: Random) -> bytes:
    """Other tensors, with a digest that is right."""
    header, tensors = _parts(content)
    name = draw.choice(sorted(tensors))
    bits = tensors[name]
    what = draw.randrange(7)
    if what == 0:
        del tensors[name]
    elif what == 1:
        tensors[draw.choice(("x", "bn9.weight", "", name + ".more"))] = bits.clone()
    elif what == 2:
        tensors[name] = bits.to(draw.choice((torch.uint8, torch.int16, torch.int64, torch.float32, torch.bool)))
    elif what == 3:
        tensors[name] = bits.flatten()[: draw.randrange(3)].clone()
    elif what == 4:
        tensors[name] = bits[None].clone()
    elif what == 5:
        tensors[name] = torch.full_like(bits, draw.choice((0, 1, -1, 0x7FC00000, 0x7F800000)))
    else:
        flat = bits.flatten().clone()
        flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(31)
        tensors[name] = flat.reshape(bits.shape)
    return _signed(header, tensors, draw)


def _parts(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size])["__metadata__"]["fewshift"]
    return json.loads(about), safetensors.torch.load(content)


def _signed(header: Any, tensors: dict[str, Tensor], draw: Random) -> bytes:
    if not isinstance(header, dict):
        return safetensors.torch.save(tensors, {"fewshift": json.dumps(header)})
    header.pop("digest", None)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    text = json_text(header | {"digest": digest.hexdigest()}, draw).decode()
    return safetensors.torch.save(tensors, {"fewshift": text})


def read_delta(path: Path) -> None:
    """Whatever is accepted makes the network that it says, counted here once more, with the logits of that network."""
    delta = Delta.load(path)
    assert repr(delta)
    json.dumps(delta.to_json())
    source = make_tiny()
    adapted = delta.apply(source, delta.classes)
    hashed = hashlib.sha256()
    for _, tensor in sorted(adapted.state_dict().items()):
        hashed.update(tensor.numpy().tobytes())
    assert hashed.hexdigest() == delta.adapted.weights
    expected = {True: make_tiny(), False: make_tiny(seed=3)}[delta.adapted == delta.source]
    assert torch.equal(adapted(IMAGES), expected(IMAGES))
    reverted = delta.revert(adapted)
    assert torch.equal(reverted(IMAGES), source(IMAGES))


# --- weights


class Payload:
    """Makes the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(CANARY),)


def weights(_: Path) -> list[GoodFile]:
    table = make_tiny().state_dict()
    checkpoint = {
        "state_dict": table,
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1),
        "where": Path("x"),
        "best": np.float64(1),
    }
    return [
        GoodFile("w.safetensors", safetensors.torch.save(table, {"format": "pt"}), changed_bytes),
        GoodFile("w.pt", _saved(checkpoint), changed_archive),
        GoodFile("w.pth", _saved(checkpoint, False), changed_bytes),
        GoodFile("payload.pt", _saved(checkpoint | {"x": Payload()}), changed_archive, refused=True),
        GoodFile("payload.pth", _saved(checkpoint | {"x": Payload()}, False), changed_bytes, refused=True),
    ]


def _saved(value: Any, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def changed_archive(content: bytes, draw: Random) -> bytes:
    """A zip archive whose parts are changed, with sums that are right; or some of its bytes."""
    if draw.random() < 0.4:
        return changed_bytes(content, draw)
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        chosen = "pickle" if draw.random() < 0.7 else draw.choice(old.namelist())
        for name in old.namelist():
            hit = name == chosen or (chosen == "pickle" and name.endswith("data.pkl"))
            new.writestr(name, changed_bytes(old.read(name), draw) if hit else old.read(name))
    return buffer.getvalue()


def read_weights(path: Path) -> None:
    """Nothing is run, and what is read is a table of tensors that are numbers."""
    try:
        file = read_file(path)
        model = make_tiny()
        load_all(model, named_like(file.tensors, model.state_dict()).tensors, "the weights do not fit")
        assert not any(tensor.isnan().any() for tensor in model.state_dict().values())
    finally:
        assert not CANARY.exists(), "a payload was run"


# --- sites


def site_files(folder: Path) -> list[GoodFile]:
    network = base(folder / "network.onnx")
    content = site(folder / "first.site", network).read_bytes()
    return [
        *(GoodFile("s.site", content, change) for change in (changed_bytes, forged_site)),
        GoodFile("base.onnx", network.read_bytes(), changed_bytes),
    ]


def forged_site(content: bytes, draw: Random) -> bytes:
    """Another header, or other values, with a digest that is right."""
    values = LENGTH + int.from_bytes(content[:LENGTH], "little")
    header = json.loads(content[LENGTH:values])
    header["__metadata__"]["fewshift-site"] = json.loads(header["__metadata__"]["fewshift-site"])
    header = changed_value(header, draw)
    about = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(about, dict) and draw.random() < 0.95:
        about["digest"] = BLANK.decode()
        if "fewshift-site" in about:
            about["fewshift-site"] = json_text(about["fewshift-site"], draw).decode()
        header = {"__metadata__": {"digest": about.pop("digest"), **about}} | {
            name: entry for name, entry in header.items() if name != "__metadata__"
        }
    text = json_text(header, draw)
    tensors = content[values:] if draw.random() < 0.7 else changed_bytes(content[values:], draw)
    forged = len(text).to_bytes(LENGTH, "little") + text + tensors
    return forged.replace(BLANK, _digest(forged), 1) if text.startswith(BEGINNING) else forged


def read_site(path: Path) -> None:
    """A site that is accepted changes the values of the base's own tensors and nothing else."""
    if path.suffix == ".onnx":
        BaseFile(path)
        return
    network = BaseFile(path.with_name("network.onnx"))
    changed = SiteFile.read(path)
    content = network.at(changed, path)
    assert len(content) == len(network.content)
    outside = bytearray(content)
    for name in changed.tensors:
        own = network.tensors[name]
        outside[own.start : own.stop] = network.content[own.start : own.stop]
    assert bytes(outside) == network.content

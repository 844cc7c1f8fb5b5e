"""Files to tables of tensors, as trainers write them. Nothing in a file is ever run.

Checkpoints hold more than tensors: options, paths, scores. Harmless types are read as stand-ins that do nothing, by an
allow-list of names; a file that names any other type is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fewshift.errors import FewshiftError

AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")  # where trainers keep averaged weights
NESTS = ("state_dict", "model_state_dict", "model")  # where they keep the weights as the last step left them
TIMM = ("arch", "args", "version")  # what a checkpoint of timm's training script says beside its weights
ONNX_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}  # of ModelProto: wire types
ONNX_GRAPH = 7
FOREIGN = {
    "TorchScript": "is a TorchScript archive, in which code hides the layers: pass the state_dict of the network that "
    "it was made from",
    "torch.export": "is a program that torch.export wrote, a fixed graph without layers: pass the state_dict of the "
    "network that it was made from",
    "ONNX": "is an ONNX graph, in which BatchNorm is often merged into convolutions: pass the PyTorch weights that it "
    "was exported from",
}


@dataclass(frozen=True)
class WeightsFile:
    """The weights in a file, and what the file says about them."""

    tensors: dict[str, Tensor]
    table: str = ""  # where in the checkpoint they were, such as "state_dict_ema"; nothing if they are all of it
    arch: str | None = None  # the network that timm's training script trained


def read_file(path: str | Path, *, ema: bool = True) -> WeightsFile:
    """The weights in a file; of a checkpoint with averaged weights (EMA) those, or with `ema=False` the others."""
    path = Path(path)
    if not path.is_file():
        raise FewshiftError(f"no weights at {path}: check the path")
    with path.open("rb") as file:
        kind = _kind(file)
    if kind in FOREIGN:
        raise FewshiftError(f"{path} {FOREIGN[kind]}")
    is_safetensors = kind == "safetensors" or path.suffix == ".safetensors"
    return _checked(_safetensors(path) if is_safetensors else _torch(path, path), path, ema)


def read_bytes(content: bytes, path: str | Path) -> WeightsFile:
    """The weights in the content of a file that torch wrote; errors name `path`."""
    return _checked(_torch(io.BytesIO(content), path), path, ema=True)


class Unread:
    """Stands for an object in a checkpoint that is not a tensor: it takes everything and does nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class UnreadDict:
    """Stands for a kind of dict; torch fills plain ones only."""

    def __new__(cls, *_: Any) -> Any:
        """An empty dict."""
        return {}


class UnreadList:
    """Stands for a kind of list; torch fills plain ones only."""

    def __new__(cls, *_: Any) -> Any:
        """An empty list."""
        return []


HARMLESS: dict[type, tuple[str, ...]] = {
    Unread: (
        "argparse.Namespace",
        *(f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "object", "str", "tuple")),
        *(f"datetime.{name}" for name in ("date", "datetime", "timedelta")),
        *(
            f"pathlib{module}.{name}"
            for module in ("", "._local")
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
        ),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        "numpy.dtype",
        "numpy.ndarray",
        *(f"omegaconf.base.{name}" for name in ("ContainerMetadata", "Metadata")),
        *(f"omegaconf.{name}" for name in ("dictconfig.DictConfig", "listconfig.ListConfig")),
        *(f"omegaconf.nodes.{name}Node" for name in ("Any", "Boolean", "Float", "Integer", "Path", "String")),
        "typing.Any",
    ),
    UnreadDict: (
        "collections.defaultdict",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
        "pytorch_lightning.utilities.parsing.AttributeDict",
    ),
    UnreadList: ("collections.deque",),
}
STAND_INS: list[Any] = [(stand_in, name) for stand_in, names in HARMLESS.items() for name in names]


def _checked(content: Any, path: str | Path, ema: bool) -> WeightsFile:
    """The weights in a file's content, if every value in them is a number."""
    says_arch = isinstance(content, Mapping) and all(key in content for key in TIMM)
    arch = str(content["arch"]) if says_arch else None
    content, table = _innermost(content, ema)
    if not _is_table(content):
        raise FewshiftError(f"{path} holds no table of tensors: save the network's state_dict")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise FewshiftError(
                f"{path} holds {type(value).__name__} {name!r} among its weights: save the network's state_dict alone"
            )
        if value.is_meta or value.layout is not torch.strided:
            what = "has no values" if value.is_meta else "is sparse"
            raise FewshiftError(f"{name} in {path} {what}: save the weights as dense tensors, with their values")
        if value.is_floating_point() and value.isnan().any():
            raise FewshiftError(f"{name} in {path} is not a number in places: use weights from before training broke")
    return WeightsFile(dict(content), table, arch)


def _innermost(content: Any, ema: bool) -> tuple[Any, str]:
    """The table that a checkpoint holds among other things, and where."""
    place: list[str] = []
    while isinstance(content, Mapping):
        averaged = [key for key in AVERAGED if ema and _has_tensors(content.get(key))]
        inner = averaged + [key for key in NESTS if _is_table(content.get(key))]
        if not inner:
            break
        key = inner[0]
        content = content[key]
        place.append(key)
    return content, ".".join(place)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(key, str) for key in value)


def _has_tensors(value: Any) -> bool:
    return _is_table(value) and any(isinstance(each, Tensor) for each in value.values())


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise FewshiftError(f"{path} is truncated or not a safetensors file ({error}): copy it again") from error


def _torch(file: Path | io.BytesIO, path: str | Path) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(STAND_INS):
            warnings.simplefilter("ignore")  # torch's advice on files we are about to refuse
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" (the first is {named[1]})" if named else ""
        raise FewshiftError(
            f"{path} holds more than tensors{what} and would have to be unpickled, which can run any code and is never "
            "done: where you trust it, save its state_dict as .safetensors"
        ) from error
    except Exception as error:  # readers of old formats raise whatever a broken file leads them to
        raise FewshiftError(
            f"{path} is truncated or not a table of weights ({type(error).__name__}): "
            "copy it again or save the state_dict as .safetensors"
        ) from error


def _kind(file: BinaryIO) -> str:
    """What the content of a file is: a key of FOREIGN, "safetensors", or nothing that is known here."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    beginning = file.read(9)
    try:
        inside = _names_inside(file)
    except Exception:  # of several types, for an archive that is broken: torch will say so
        return ""
    if inside is not None:
        if "constants.pkl" in inside and any(name.startswith("code/") for name in inside):
            return "TorchScript"
        return "torch.export" if inside & {"archive_format", "serialized_exported_program.json"} else ""
    if beginning[8:] == b"{" and 8 + int.from_bytes(beginning[:8], "little") <= size:
        return "safetensors"
    return "ONNX" if _is_onnx(file, size) else ""


def _names_inside(file: BinaryIO) -> set[str] | None:
    """The names in an archive; None for a file that is none."""
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        return {name.partition("/")[2] or name for name in archive.namelist()}


def _is_onnx(file: BinaryIO, size: int) -> bool:
    """Whether the file is a protobuf message with the fields of an ONNX model, a graph among them."""
    file.seek(0)
    fields: set[int] = set()
    while file.tell() < size:
        key = _varint(file)
        if key is None or ONNX_FIELDS.get(key >> 3) != key & 7:
            return False
        value = _varint(file)  # a number, or the length of what follows
        if value is None:
            return False
        if key & 7 == 2:
            if value > size - file.tell():  # before the jump: no system jumps 2**63 bytes
                return False
            file.seek(value, io.SEEK_CUR)
        fields.add(key >> 3)
    return ONNX_GRAPH in fields


def _varint(file: BinaryIO) -> int | None:
    """The next number in protobuf's notation: seven bits a byte, the lowest first; None where there is none."""
    value = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
    return None

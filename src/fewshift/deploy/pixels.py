"""A folder of label maps: a class for every pixel of many images."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from fewshift.core._display import Displayed
from fewshift.core._files import make_folder, read_ordinary, refuse_long_name
from fewshift.core._progress import track
from fewshift.deploy.decoding import Unreadable
from fewshift.deploy.fingerprints import fingerprint
from fewshift.deploy.listing import FileList, Files, plain
from fewshift.errors import FewshiftError
from fewshift.images.class_names import refuse_repeated
from fewshift.images.folders import open_image
from fewshift.images.label_files import (
    PALETTE_FILE,
    Palette,
    origin_of,
    palette_of,
    read_labels,
    resized_labels,
    write_labels,
    write_overlay,
    write_palette,
)
from fewshift.images.preprocess import Preprocess
from fewshift.images.sliding_window import Size, evaluating, label_map


class PixelPrediction(NamedTuple):
    """The files written for an image, and the mean probability of the predicted classes."""

    file: Path
    labels: Path
    overlay: Path
    confidence: float


@dataclass(frozen=True, repr=False)
class PixelPredictions(Displayed):
    """A label map for each image that could be read."""

    folder: Path
    images: tuple[PixelPrediction, ...]
    pixels: dict[str, int]  # predicted pixels of each class
    broken: tuple[Unreadable, ...]
    crop: int | None  # the crop that was left out: every pixel gets a label

    @property
    def title(self) -> str:
        """What it is."""
        return f"Label maps of {len(self.images):,} images"

    @property
    def facts(self) -> dict[str, str]:
        """Where they are, and how many images could not be read."""
        return {"folder": str(self.folder), "not read": f"{len(self.broken):,}"}

    @property
    def asked(self) -> int:
        """The number of images that were to be labelled."""
        return len(self.images) + len(self.broken)

    def to_json(self) -> dict[str, Any]:
        """Files, confidences, pixels of each class, and what could not be read."""
        images = [
            {"file": str(row.file), "labels": str(row.labels), "overlay": str(row.overlay)}
            | {"confidence": round(row.confidence, 6)}
            for row in self.images
        ]
        broken = [{"file": str(row.file), "error": row.error} for row in self.broken]
        return {"images": images, "pixels": self.pixels, "broken": broken}


def label_files(
    network: nn.Module,
    images: Files,
    listing: FileList,
    preprocess: Preprocess,
    names: Sequence[str],
    out: str | Path | TextIO | None,
    *,
    window: Size | None,
    stride: Size | None,
    resume: bool,
    overwrite: bool,
    strict: bool,
) -> PixelPredictions:
    """Write a label map and an overlay for each image into the folder `out`."""
    refuse_repeated(names)
    folder = _checked_folder(out, images if isinstance(images, (str, Path)) else listing.root, listing.root)
    run = _PixelRun(network, replace(preprocess, crop=None), names, palette_of(names), window, stride, strict)
    written = run.label(listing.files, _targets(listing, folder), folder, resume, overwrite)
    return replace(written, crop=preprocess.crop)


def _checked_folder(out: str | Path | TextIO | None, images: str | Path, root: Path) -> Path:
    """The folder to write into, or an error if it cannot be used."""
    if not isinstance(out, (str, Path)):
        raise FewshiftError("this network labels every pixel: pass --out FOLDER (out=) for its label maps and overlays")
    folder, images = Path(out), Path(images)
    if folder.exists() and not folder.is_dir():
        raise FewshiftError(f"{folder} is not a folder: choose another for the label maps")
    if images.is_dir() and folder.resolve().is_relative_to(images.resolve()):
        raise FewshiftError(f"{folder} lies among the images: choose a folder that is not inside {images}")
    if (folder / "labels").is_dir() and root.resolve().is_relative_to((folder / "images").resolve()):
        raise FewshiftError(f"{folder / 'labels'} has the labels of these images: choose another folder")
    return folder


@dataclass(frozen=True)
class _PixelRun:
    """One network on one image after the other. Each label file names its run, so that a later run can resume."""

    network: nn.Module
    preprocess: Preprocess
    names: Sequence[str]
    palette: Palette
    window: Size | None
    stride: Size | None
    strict: bool

    def label(
        self, files: Sequence[Path], targets: Sequence[Mapping[str, Path]], folder: Path, resume: bool, overwrite: bool
    ) -> PixelPredictions:
        """Write a label map and an overlay for each image; images that cannot be read are listed."""
        run = self.fingerprint()
        if not overwrite:
            _check_targets(folder, targets, run, resume)
        _make_folders(targets)
        write_palette(folder / PALETTE_FILE, self.names, self.palette)  # first, so that all that follows can be read
        pixels = torch.zeros(len(self.names), dtype=torch.long)
        written, broken = [], []
        network = evaluating(self.network)
        for file, target in zip(track(files, "images"), targets, strict=True):
            try:
                labels, confidence = self.one(network, file, target, f"{run} {_content(file)}", resume)
            except _UnreadableError as error:
                if self.strict:
                    raise
                broken.append(Unreadable(file, str(error)))
                continue
            pixels += labels.flatten().long().bincount(minlength=len(self.names))
            written.append(PixelPrediction(file, target["labels"], target["overlay"], confidence))
        counts = dict(zip(self.names, pixels.tolist(), strict=True))
        return PixelPredictions(folder, tuple(written), counts, tuple(broken), None)

    def one(
        self, network: nn.Module, file: Path, target: Mapping[str, Path], origin: str, resume: bool
    ) -> tuple[Tensor, float]:
        """The labels of an image, written, and their confidence."""
        known = origin_of(target["labels"]) if resume and target["overlay"].is_file() else None
        if known is not None and known[0] == origin:
            return read_labels(target["labels"]), known[1]
        try:
            image = open_image(file, self.preprocess.mode)
            tensor = self.preprocess(image)
        except FewshiftError as error:
            raise _UnreadableError(str(error) if str(file) in str(error) else f"{file}: {error}") from error
        answer = label_map(network, tensor, window=self.window, stride=self.stride)
        labels, confidence = resized_labels(answer.labels, image.size), float(answer.confidence.mean())
        write_overlay(target["overlay"], image, labels, self.palette)
        # the label file comes last: it shows that the image is done
        write_labels(target["labels"], labels, self.palette, origin=(origin, confidence))
        return labels, confidence

    def fingerprint(self) -> str:
        """A word for everything that a label map depends on, except the image."""
        return fingerprint([self.network], (self.preprocess, tuple(self.names), self.window, self.stride))


class _UnreadableError(FewshiftError):
    """An image that cannot be read."""


def _content(file: Path) -> str:
    """A word that changes when an image does."""
    try:
        return hashlib.sha256(read_ordinary(file)).hexdigest()[:16]
    except OSError as error:
        raise _UnreadableError(f"{file} cannot be read ({error.strerror}): replace or remove it") from error


def _check_targets(folder: Path, targets: Sequence[Mapping[str, Path]], run: str, resume: bool) -> None:
    """Raise an error if files would be replaced that must stay."""
    taken = [path for target in targets for path in target.values() if path.exists()]
    if not resume and (taken or (folder / PALETTE_FILE).exists()):
        raise FewshiftError(
            f"{(*taken, folder / PALETTE_FILE)[0]} exists already: pass --resume (resume=True) to go on, --overwrite "
            "(overwrite=True) to replace it, or choose another folder"
        )
    for file in (target["labels"] for target in targets if target["labels"].exists()):
        if (origin_of(file) or ("",))[0].partition(" ")[0] != run:
            raise FewshiftError(
                f"{file} is not by this network, classes and options: pass --overwrite (overwrite=True) to replace it, "
                "or choose another folder"
            )


def _targets(listing: FileList, folder: Path) -> list[dict[str, Path]]:
    """A label map and an overlay for each image, by its path below the common folder."""
    root = plain(listing.root)
    files = [plain(file) for file in listing.files]
    _refuse_two_meanings(listing.files, files)
    paths = [Path(file.name) if file == root else file.relative_to(root) for file in files]
    names = _target_names(set(paths))
    targets = [
        {"labels": folder / "labels" / f"{names[path]}.png", "overlay": folder / "overlays" / f"{names[path]}.jpg"}
        for path in paths
    ]
    _refuse_impossible(targets)
    for path in {plain(path) for target in targets for path in target.values()} & set(files):
        raise FewshiftError(f"{path} would be written over, and is an image that is read: choose another folder")
    return targets


def _refuse_two_meanings(files: Sequence[Path], paths: Sequence[Path]) -> None:
    """One sentence where two images have one path without "..": behind a link, ".." leads elsewhere."""
    if not any(".." in file.parts for file in files):
        return
    meant: dict[Path, Path] = {}
    for file, path in zip(files, paths, strict=True):
        resolved = file.resolve()
        if meant.setdefault(path, resolved) != resolved:
            raise FewshiftError(f"{file} leads through a link to another image than {path}: give it without '..'")


def _target_names(paths: Set[Path]) -> dict[Path, Path]:
    """A name of its own for each image: its path without the suffix, or with it where two would share one."""
    names = {path: path.with_suffix("") for path in paths}
    while True:
        counts = Counter(names.values())
        # a.jpg beside a.png keep their suffixes; then a.jpg.png, which has become a.jpg, keeps its own too
        shared = [path for path, name in names.items() if counts[name] > 1 and name != path]
        if not shared:
            return names
        names |= {path: path for path in shared}


def _refuse_impossible(targets: Sequence[Mapping[str, Path]]) -> None:
    """One sentence when a target has too long a name, or would be a folder as well."""
    places = {folder for target in targets for path in target.values() for folder in path.parents}
    for path in (path for target in targets for path in target.values()):
        refuse_long_name(path)
        if path in places:
            raise FewshiftError(f"{path} would be a file and a folder: rename the image or the folder of that name")


def _make_folders(targets: Sequence[Mapping[str, Path]]) -> None:
    for place in {path.parent for target in targets for path in target.values()}:
        make_folder(place)

"""Predicting many image files: a table of classes, or a folder of label maps."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fewshift.core._files import whole
from fewshift.core._progress import track
from fewshift.errors import FewshiftError
from fewshift.images.folders import image_files, open_image
from fewshift.images.inputs import images_below, output_for, output_names
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
from fewshift.trust.evaluation import class_probabilities, refuse_window

Files = str | Path | Sequence[str | Path]
"""A folder of images, one image file, or several."""


class ImagePrediction(NamedTuple):
    """The most probable class of an image."""

    file: Path
    name: str
    probability: float


@dataclass(frozen=True)
class ImagePredictions:
    """A class for each image."""

    rows: tuple[ImagePrediction, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """File, class and probability of each image."""
        return [
            {"file": str(row.file), "class": row.name, "probability": round(row.probability, 6)} for row in self.rows
        ]

    def to_csv(self) -> str:
        """The same as a table with a header."""
        table = io.StringIO()
        writer = csv.DictWriter(table, ["file", "class", "probability"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.to_json())
        return table.getvalue()

    def save_json(self, path: str | Path) -> Path:
        """Write the same as JSON."""
        with whole(path) as draft:
            draft.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return Path(path)


class PixelPrediction(NamedTuple):
    """The files written for an image, and the mean probability of the predicted classes."""

    file: Path
    labels: Path
    overlay: Path
    confidence: float


class Unreadable(NamedTuple):
    """An image that could not be read, and why."""

    file: Path
    error: str


@dataclass(frozen=True)
class PixelPredictions:
    """A label map for each image that could be read."""

    folder: Path
    images: tuple[PixelPrediction, ...]
    pixels: dict[str, int]  # predicted pixels of each class
    broken: tuple[Unreadable, ...]
    crop: int | None  # the crop that was left out: every pixel gets a label

    def to_json(self) -> dict[str, Any]:
        """Files, confidences, pixels of each class, and what could not be read."""
        images = [
            {"file": str(row.file), "labels": str(row.labels), "overlay": str(row.overlay)}
            | {"confidence": round(row.confidence, 6)}
            for row in self.images
        ]
        broken = [{"file": str(row.file), "error": row.error} for row in self.broken]
        return {"images": images, "pixels": self.pixels, "broken": broken}


def predict_files(
    network: nn.Module,
    images: Files,
    preprocess: Preprocess,
    classes: Sequence[str] | None = None,
    *,
    out: str | Path | None = None,
    window: Size | None = None,
    stride: Size | None = None,
    resume: bool = False,
    overwrite: bool = False,
    batch_size: int = 32,
) -> ImagePredictions | PixelPredictions:
    """Predict every image: a class and its probability, or a class for every pixel.

    A network with one output per image gives a table, which is written to `out` as CSV if there is one. A network that
    labels pixels writes into the folder `out`: labels/ (index PNGs in the size of each image), overlays/ to look at,
    and palette.txt. Existing files are kept: `resume` skips images that the same network has labelled there with the
    same options, `overwrite` replaces them. Images that cannot be read are listed in the result.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise FewshiftError(f"batch_size={batch_size!r} is no number of images: give 1, 2, ...")
    root, files = _listed(images)
    shape = output_for(network, files, preprocess, window, stride)
    names = output_names(classes, shape[0])
    if len(shape) == 1:
        refuse_window(window, stride)
        if overwrite or resume:
            raise FewshiftError(
                "this network has one output per image, and a table is always written anew: leave out --overwrite and "
                "--resume (overwrite=, resume=)"
            )
        return _classified(network, files, preprocess, names, out, batch_size)
    folder = _checked_folder(out, images if isinstance(images, (str, Path)) else root, root)
    run = _PixelRun(network, replace(preprocess, crop=None), names, palette_of(names), window, stride)
    written = run.label(files, _targets(root, files, folder), folder, resume, overwrite)
    return replace(written, crop=preprocess.crop)


def _listed(images: Files) -> tuple[Path, list[Path]]:
    """The folder below which results keep their relative paths, and the image files."""
    if isinstance(images, (str, Path)):
        root = images_below(images)
        return root, image_files(root)
    if not isinstance(images, Sequence):
        raise FewshiftError(
            f"{type(images).__name__} is no image file: give a folder, a file or a list of files, and call the network "
            "itself on tensors"
        )
    files = [file for path in images for file in image_files(path)]
    if not files:
        raise FewshiftError("there are no images: give some")
    return Path(os.path.commonpath([file.absolute().parent for file in files])), [file.absolute() for file in files]


# --- one output per image


def _classified(
    network: nn.Module,
    files: Sequence[Path],
    preprocess: Preprocess,
    names: Sequence[str],
    out: str | Path | None,
    batch_size: int,
) -> ImagePredictions:
    tensors = (preprocess(open_image(file, preprocess.mode)) for file in track(files, "images"))
    with nullcontext() if out is None else whole(out) as draft:  # what cannot be written is known before the work
        scores = class_probabilities(network, tensors, batch_size)
        rows = [
            ImagePrediction(file, names[int(probabilities.argmax())], float(probabilities.max()))
            for file, probabilities in zip(files, scores, strict=True)
        ]
        predictions = ImagePredictions(tuple(rows))
        if draft is not None:
            draft.write_text(predictions.to_csv(), encoding="utf-8")
    return predictions


# --- one output per pixel


def _checked_folder(out: str | Path | None, images: str | Path, root: Path) -> Path:
    """The folder to write into, or an error if it cannot be used."""
    if out is None:
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
        options = (type(self.network).__name__, self.preprocess, tuple(self.names), self.window, self.stride)
        facts = hashlib.sha256(repr(options).encode())
        for name, tensor in self.network.state_dict().items():
            facts.update(name.encode())
            if isinstance(tensor, Tensor):
                facts.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return facts.hexdigest()[:16]


class _UnreadableError(FewshiftError):
    """An image that cannot be read."""


def _content(file: Path) -> str:
    """A word that changes when an image does."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
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


def _targets(root: Path, files: Sequence[Path], folder: Path) -> list[dict[str, Path]]:
    """A label map and an overlay for each image, by its path below `root`."""
    paths = [Path(file.name) if file == root else file.relative_to(root) for file in files]
    counts = Counter(path.with_suffix("") for path in paths)
    # a.jpg beside a.png: both keep their suffix
    names = [path if counts[path.with_suffix("")] > 1 else path.with_suffix("") for path in paths]
    return [
        {"labels": folder / "labels" / f"{name}.png", "overlay": folder / "overlays" / f"{name}.jpg"} for name in names
    ]


def _make_folders(targets: Sequence[Mapping[str, Path]]) -> None:
    for place in {path.parent for target in targets for path in target.values()}:
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FewshiftError(f"cannot write into {place}: {error.strerror}: choose another folder") from error

"""Predicting many image files: a table of classes, or a folder of label maps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO, TypedDict

import torch
from torch import nn

from fewshift.deploy.class_table import ClassRun, Columns, ImagePredictions
from fewshift.deploy.listing import FileList, Files, listed
from fewshift.deploy.parts import PART_SIZE, PartPredictions, Parts, part_folder, predict_parts
from fewshift.deploy.pixels import PixelPredictions, label_files
from fewshift.errors import FewshiftError
from fewshift.images.inputs import output_for, output_names
from fewshift.images.preprocess import Preprocess
from fewshift.images.sliding_window import Size, evaluating
from fewshift.jobs.sweep import check_engine
from fewshift.trust.evaluation import refuse_window

Predictions = ImagePredictions | PixelPredictions | PartPredictions


class PredictOptions(TypedDict, total=False):
    """How many files are predicted. None of these changes a prediction, except `window` and `stride`."""

    resume: bool  # leave out images that the same run has predicted there
    overwrite: bool  # replace what an earlier run has written
    strict: bool  # stop at the first image that cannot be read
    batch_size: int
    workers: int  # processes that read images ahead
    device: torch.device | str | None
    top: int  # so many classes for each image
    all_probabilities: bool
    with_source: bool  # what the source network says too: twice the work
    as_json: bool  # the table is JSON, written whole at the end
    engine: str  # "local", or "ray" for a folder of Parquet parts by a Ray cluster
    address: str | None  # of the cluster; a local one is started by default
    part_size: int  # images in each Parquet part
    window: Size | None
    stride: Size | None


def predict_files(
    networks: Mapping[str, nn.Module],
    images: Files,
    preprocess: Preprocess,
    classes: Sequence[str] | None = None,
    *,
    out: str | Path | TextIO | None = None,
    resume: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    batch_size: int = 32,
    workers: int = 0,
    device: torch.device | str | None = None,
    top: int = 1,
    all_probabilities: bool = False,
    with_source: bool = False,
    as_json: bool = False,
    engine: str = "local",
    address: str | None = None,
    part_size: int = PART_SIZE,
    window: Size | None = None,
    stride: Size | None = None,
) -> Predictions:
    """Predict every image by the last network: a class and its probability, or a class for every pixel.

    A network with one output per image gives a table, written to `out` as CSV, row by row, if there is one; a file
    beside it names the run. If `out` is a folder, or a new name without a suffix, the same rows become Parquet parts
    there, and nothing but names of files is kept in memory. A network that labels pixels writes into the folder `out`:
    labels/ (index PNGs in the size of each image), overlays/ to look at, and palette.txt.
    """
    for name, number, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("part_size", part_size, 1)):
        _check_number(name, number, least)
    check_engine(engine, address)
    if with_source and len(networks) < 2:
        raise FewshiftError(
            "--with-source (with_source=True) shows the source network beside the adapted one: pass a delta"
        )
    listing = listed(images)
    chosen = list(networks.values()) if with_source else list(networks.values())[-1:]
    chosen = [evaluating(_on_device(network, device)) for network in chosen]
    shape = output_for(chosen[-1], listing.files, preprocess, window, stride)
    names = output_names(classes, shape[0])
    if len(shape) == 1:
        refuse_window(window, stride)
        columns = Columns(names, top, with_source, all_probabilities)
        run = ClassRun(chosen, preprocess, columns, batch_size, workers, strict)
        if engine == "ray" or _is_folder(out):
            return _in_parts(run, listing, out, part_size, engine, address, resume=resume, overwrite=overwrite)
        if as_json:
            return run.predict_json(listing.files, out, resume=resume, overwrite=overwrite)
        return run.predict(listing.files, out, resume=resume, overwrite=overwrite)
    if top != 1 or all_probabilities or with_source or workers or engine != "local":
        raise FewshiftError(
            "this network labels every pixel: leave out --top, --all-probabilities, --with-source, --workers and "
            "--engine"
        )
    return label_files(
        chosen[-1], images, listing, preprocess, names, out,
        window=window, stride=stride, resume=resume, overwrite=overwrite, strict=strict,
    )  # fmt: skip


def _is_folder(out: str | Path | TextIO | None) -> bool:
    """Whether an output is a folder, or is to be one."""
    if not isinstance(out, (str, Path)):
        return False
    return Path(out).is_dir() or (not Path(out).exists() and not Path(out).suffix)


def _in_parts(
    run: ClassRun,
    listing: FileList,
    out: str | Path | TextIO | None,
    size: int,
    engine: str,
    address: str | None,
    *,
    resume: bool,
    overwrite: bool,
) -> PartPredictions:
    """Parquet parts in the folder `out`, by this process or by Ray."""
    if not isinstance(out, (str, Path)):
        raise FewshiftError("the engine ray writes Parquet parts: pass --out FOLDER (out=)")
    with part_folder(out) as folder:
        parts = Parts(folder, run, listing.files, size, resume=resume, overwrite=overwrite)
        if engine == "local":
            return predict_parts(run, parts)
        from fewshift.deploy.parts_on_ray import predict_parts_on_ray

        return predict_parts_on_ray(run, parts, workers=run.workers, address=address)


def _check_number(name: str, number: int, least: int) -> None:
    if not isinstance(number, int) or number < least:
        unit = "processes" if name == "workers" else "images"
        raise FewshiftError(f"{name}={number!r} is no number of {unit}: give {least}, {least + 1}, ...")


def _on_device(network: nn.Module, device: torch.device | str | None) -> nn.Module:
    """The network itself, or a copy on another device."""
    if device is None:
        return network
    try:
        return copy.deepcopy(network).to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise FewshiftError(f"device {device} cannot be used ({str(error).splitlines()[0]}): choose another") from error

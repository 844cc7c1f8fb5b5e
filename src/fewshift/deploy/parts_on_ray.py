"""Parts by Ray Data: tasks on any node read images, actors with the network predict them, the driver writes the rows.

Ray runs a task again whose worker or actor died. A batch is named by its part and its place there, and a part is
written when all of its batches are there: none is lost and none counts twice.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewshift.core._progress import track
from fewshift.deploy.class_table import ClassRun, ImagePrediction
from fewshift.deploy.decoding import ReadBatch, Unreadable, advance, batches_of, decode
from fewshift.deploy.parts import Part, PartPredictions, Parts
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import FileSteps
from fewshift.jobs.on_ray import connected

STORE = 2**30  # bytes of a local object store: decoded images wait there for the network
TRIES = 3  # times that Ray runs a task again whose worker died
Answer = tuple[list[ImagePrediction], list[Unreadable]]


def predict_parts_on_ray(run: ClassRun, parts: Parts, *, workers: int, address: str | None) -> PartPredictions:
    """Predict the missing parts on the Ray cluster at `address`, or on a local one with `workers` processors.

    Every node needs fewshift, and the images at the paths that they have here.
    """
    if not parts.missing:
        return parts.end()
    with connected(max(workers or os.cpu_count() or 2, 2), address, STORE) as ray, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, about its own settings
        _check_size(ray)
        plan = {
            (part.number, place): batch
            for part in parts.missing
            for place, batch in enumerate(batches_of(part.files, run.batch_size))
        }
        waiting = {part.number: _Waiting(part) for part in parts.missing}
        answers = _answers(ray, run, plan)
        progress = track(range(sum(map(len, plan.values()))), "images")
        for part, place, answer in answers:
            advance(progress, len(plan[part, place]))
            if run.strict and answer[1]:
                raise FewshiftError(answer[1][0].error)
            if waiting[part].add(place, answer):
                done = waiting.pop(part)
                parts.add(done.part, *done.joined())
        advance(progress, 1)
    if waiting:
        raise FewshiftError(f"Ray left out {len(waiting)} parts: --resume (resume=True) goes on with them")
    return parts.end()


class _Waiting:
    """A part, and the answers to those of its batches that are done."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.answers: dict[int, Answer] = {}

    def add(self, place: int, answer: Answer) -> bool:
        """Keep the answer to a batch; True if it was the last one."""
        self.answers[place] = answer  # by its place: the same batch counts once
        return sum(len(rows) + len(broken) for rows, broken in self.answers.values()) == len(self.part.files)

    def joined(self) -> Answer:
        """Rows and images that cannot be read, in the order of the files."""
        ordered = [answer for _, answer in sorted(self.answers.items())]
        return [row for rows, _ in ordered for row in rows], [image for _, broken in ordered for image in broken]


def _check_size(ray: Any) -> None:
    processors = ray.cluster_resources().get("CPU", 0)
    if processors < 2:
        raise FewshiftError(
            f"the Ray cluster has {processors:.0f} processor: give it two, one to read images and one to predict them"
        )


def _answers(ray: Any, run: ClassRun, plan: dict[tuple[int, int], Sequence[Path]]) -> Any:
    """The answer to each batch as it comes, with its part and its place there."""
    from ray import data

    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    processors = int(ray.cluster_resources()["CPU"])
    on_gpu = any(tensor.is_cuda for tensor in run.networks[-1].parameters())
    items = [
        {"part": part, "place": place, "files": [os.fsencode(file) for file in batch]}
        for (part, place), batch in plan.items()
    ]
    read = data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Reading(run.preprocess), batch_size=1, num_cpus=1, ray_remote_args_fn=_retrying_task
    )
    predicted = read.map_batches(
        _Predicting,
        fn_constructor_args=(run,),
        batch_size=1,
        num_cpus=1,
        num_gpus=int(on_gpu),
        concurrency=(1, max(1, processors // 2)),
        ray_remote_args_fn=_retrying_actor,
    )
    try:
        for batch in predicted.iter_batches(batch_size=1, prefetch_batches=0):
            yield int(batch["part"][0]), int(batch["place"][0]), batch["answer"][0]
    except ray.exceptions.RayError as error:
        cause = _cause(error)
        if isinstance(cause, FewshiftError):
            raise cause from None
        why = str(cause).strip().partition("\n")[0]
        raise FewshiftError(
            f"a Ray worker failed ({type(cause).__name__}: {why}): give it more memory, or install fewshift on every "
            "node; then --resume (resume=True) goes on"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong in a worker, below what Ray has wrapped around it."""
    inner = getattr(error, "cause", None) or error.__cause__
    return _cause(inner) if isinstance(inner, BaseException) else error


class _Reading:
    """Reads the files of a batch; a task of Ray."""

    def __init__(self, preprocess: FileSteps) -> None:
        self.preprocess = preprocess

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(1)
        read = decode([Path(os.fsdecode(file)) for file in batch["files"][0]], self.preprocess)
        return {"part": batch["part"], "place": batch["place"], "decoded": _boxed(read)}


class _Predicting:
    """Has the network and predicts batches; an actor of Ray."""

    def __init__(self, run: ClassRun) -> None:
        torch.set_num_threads(1)
        self.run = run

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        read: ReadBatch = batch["decoded"][0]
        return {"part": batch["part"], "place": batch["place"], "answer": _boxed(self.run.answers(read))}


def _retrying_task() -> dict[str, int]:
    return {"max_retries": TRIES}


def _retrying_actor() -> dict[str, int]:
    return {"max_task_retries": TRIES}


def _boxed(value: Any) -> Any:
    """An array with one object in it, which numpy does not take apart."""
    box = np.empty(1, dtype=object)
    box[0] = value
    return box

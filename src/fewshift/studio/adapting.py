"""Adapting, and what to decide afterwards: the jobs that the page starts, follows and stops."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fewshift.errors import FewshiftError
from fewshift.studio import decisions
from fewshift.studio.adapt_task import AdaptTask
from fewshift.studio.decisions import AdaptationFolder
from fewshift.studio.errand import DONE, RUNNING, Errand
from fewshift.studio.opening_studio import labelled_scenes
from fewshift.studio.tasks import EXPORT, CurveTask, ExportTask, LabelledImages, LookTask
from fewshift.studio.workbench import Workbench

HELPING = 256  # images without labels that help to adapt
LOOKED_AT = 2000  # images without labels that both networks are asked about
LEAST = 2  # labels
LOG = "crashes.log"
JOBS = {
    "adapt": "adapting",
    "look": "looking at the other images",
    "curve": "the learning curve",
    "export": "the export",
}

Array = np.ndarray[Any, Any]


class Adaptations:
    """The adaptation at hand. Each kind of job has one process at a time."""

    def __init__(
        self,
        bench: Workbench,
        *,
        options: Mapping[str, Any] | None = None,
        origin: Mapping[str, str] | None = None,
        exporter: str = EXPORT,
    ) -> None:
        self.bench, self._options, self._origin, self._exporter = (
            bench,
            dict(options or {}),
            dict(origin or {}),
            exporter,
        )
        self._jobs: dict[str, Errand] = {}
        self._lock = threading.RLock()
        self._after: dict[int, Array] = {}
        self._folder: Path | None = None  # of the adaptation that runs
        self.version_adapted = 0  # of the labels
        self.outcome: AdaptationFolder | None = decisions.last_outcome(bench.out)
        if self.outcome is not None and self.outcome.decision is None:
            self._look()

    def close(self) -> None:
        """Stop all jobs."""
        for job in self._jobs.values():
            job.stop()

    def job(self, kind: str) -> Errand | None:
        """The last job of a kind."""
        return self._jobs.get(kind)

    # --- jobs

    def adapt(self, name: str, *, unlabelled: bool = False) -> None:
        """Begin to adapt to the labels that there are."""
        with self._lock:
            self._stop("look", "curve", "export")
            self._folder = decisions.new_folder(self.bench.out, name or self.bench.gallery.folder.name)
            others = [] if self.bench.scenes is None else self.bench.without_label()
            task = AdaptTask(
                self.bench.parcel,
                self._labelled(),
                others=tuple((image.number, image.file) for image in others if not self._has_scene(image.number)),
                unlabelled=self.bench.some_without_label(HELPING) if unlabelled else (),
                folder=self._folder,
                options=tuple(self._options.items()),
                origin=tuple(self._origin.items()),
            )
            self.version_adapted = self.bench.store.version
            self._begin("adapt", task, self._hear_adapted)

    def measure_curve(self) -> None:
        """Begin to measure how many more labels would help."""
        options = {key: value for key, value in self._options.items() if key in ("method", "seed")}
        self._begin("curve", CurveTask(self.bench.parcel, self._labelled(), tuple(options.items())))

    def export(self) -> None:
        """Begin to write the adapted network as ONNX."""
        outcome = self.need_outcome()
        self._begin("export", ExportTask(self.bench.parcel, outcome.delta, outcome.onnx, self._exporter))

    def stop(self, kind: str) -> None:
        """End a job."""
        if kind not in JOBS:
            raise FewshiftError(f"{kind!r} is no job: choose one of {', '.join(JOBS)}")
        self._stop(kind)
        decisions.clear_drafts(self.bench.out)

    def _stop(self, *kinds: str) -> None:
        for kind in kinds:
            job = self._jobs.get(kind)
            if job is not None and job.state == RUNNING:
                job.stop()

    def _begin(self, kind: str, task: Any, hear: Any = None) -> None:
        with self._lock:
            job = self._jobs.get(kind)
            if job is not None and job.state == RUNNING:
                raise FewshiftError(f"{JOBS[kind]} is under way: wait, or stop it")
            self._jobs[kind] = Errand(JOBS[kind], task, hear, self.bench.out / LOG)

    def _labelled(self) -> LabelledImages:
        gallery = self.bench.gallery
        if gallery.scenes is not None:
            return LabelledImages(scenes=gallery.folder, wanted=labelled_scenes(gallery))
        rows = tuple(self.bench.labelled_files().items())
        if len(rows) < LEAST:
            raise FewshiftError(f"there {'is 1 label' if rows else 'are no labels'}: label five images of each class")
        return LabelledImages(rows)

    def _has_scene(self, number: int) -> bool:
        return self.bench.gallery.label_file(number) is not None

    def _hear_adapted(self, message: tuple[Any, ...]) -> None:
        if message[0] == "result" and self._folder is not None:
            with self._lock:
                if self.outcome is not None and self.outcome.decision is None:
                    decisions.throw_away(self.outcome, self.bench.out, decisions.REPLACED)
                self.outcome, self._after = decisions.opened_outcome(self._folder), {}
                self._jobs.pop("curve", None)
                self._jobs.pop("export", None)
                self._look()

    def _look(self) -> None:
        """Ask the adapted network about images without labels."""
        if self.bench.scenes is None and self.outcome is not None:
            images = self.bench.without_label()
            chosen = images[:: -(-len(images) // LOOKED_AT) or 1]
            numbered = tuple((image.number, image.file) for image in chosen)
            self._begin("look", LookTask(self.bench.parcel, self.outcome.delta, numbered), self._hear_looked)

    def _hear_looked(self, message: tuple[Any, ...]) -> None:
        if message[0] == "after":
            self._after.update(zip(message[1], message[2], strict=True))

    # --- deciding

    def need_outcome(self) -> AdaptationFolder:
        """The adaptation to decide about, or one sentence."""
        if self.outcome is None:
            raise FewshiftError("there is no adaptation to decide about: adapt first")
        return self.outcome

    def keep(self) -> dict[str, Any]:
        """Keep the delta."""
        return decisions.keep(self.need_outcome(), self.bench.out)

    def throw_away(self) -> dict[str, Any]:
        """Remove what the adaptation wrote."""
        self._stop("look", "export")
        decision = decisions.throw_away(self.need_outcome(), self.bench.out)
        self.outcome, self._after = None, {}
        return decision

    def save_report(self) -> Path:
        """A copy of the report that stays."""
        return decisions.save_report(self.need_outcome(), self.bench.out)

    def flips(self, start: int, count: int) -> dict[str, Any]:
        """Images without labels before and after: those with another answer first."""
        before = {number: answer for number in list(self._after) if (answer := self.bench.answers.about(number))}
        after = {number: self._after[number] for number in before}
        order = changed_first(before, after)
        names = self.bench.classes
        rows = []
        for number in order[start : start + count]:
            label = int(after[number].argmax())
            rows.append(
                {
                    "number": number,
                    "name": self.bench.gallery[number].name,
                    "before": {"label": names[before[number][0]], "confidence": round(before[number][1], 4)},
                    "after": {"label": names[label], "confidence": round(float(after[number][label]), 4)},
                }
            )
        changed = sum(before[number][0] != int(after[number].argmax()) for number in order)
        return {"looked_at": len(order), "changed": changed, "rows": rows}

    def result(self) -> dict[str, Any] | None:
        """The facts of the adaptation at hand, with the numbers of its suspects; None if there is none."""
        outcome = self.outcome
        if outcome is None:
            return None
        suspects = [
            suspect | {"number": self.bench.gallery.number_of(suspect["file"] or "")}
            for suspect in outcome.facts.get("suspects", ())
        ]
        return outcome.facts | {
            "suspects": [suspect for suspect in suspects if suspect["number"] is not None],
            "name": outcome.folder.name,
            "folder": str(outcome.folder),
            "delta": str(outcome.delta),
            "onnx": str(outcome.onnx) if outcome.onnx.exists() else None,
            "decision": outcome.decision,
            "scenes": outcome.scenes,
            "newer_labels": self.version_adapted and self.bench.store.version > self.version_adapted,
        }

    def to_json(self) -> dict[str, Any]:
        """How far each job is."""
        jobs = {kind: job.to_json() for kind, job in self._jobs.items()}
        curve = self._jobs.get("curve")
        return {
            "jobs": jobs,
            "curve": curve.result if curve is not None and curve.state == DONE else None,
            "outcome": None if self.outcome is None else self.outcome.folder.name,
            "undecided": self.outcome is not None and self.outcome.decision is None,
            "looked_at": len(self._after),
        }


def changed_first(before: Mapping[int, tuple[int, float]], after: Mapping[int, Array]) -> list[int]:
    """The images that both networks were asked about: those with another answer first, the surest of those first."""

    def rank(number: int) -> tuple[bool, float, int]:
        (label, share), probabilities = before[number], after[number]
        if label != int(probabilities.argmax()):
            return False, -float(probabilities.max()), number
        return True, -abs(float(probabilities[label]) - share), number

    return sorted(after, key=rank)

"""Adapting in a process of its own: the delta, the report, and the facts that the page shows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import fewshift
from fewshift.core._display import byte_size
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes
from fewshift.report import cautions, prose, suspects
from fewshift.report.results import Adaptation
from fewshift.studio.label_exchange import TABLE, write_table
from fewshift.studio.parcel import Parcel
from fewshift.studio.scene_pictures import SHOWN, seen_by
from fewshift.studio.tasks import LabelledImages, Numbered, Send, telling

RESULT, REPORT, SCENES = "result.json", "report.html", "scenes.json"


@dataclass(frozen=True)
class AdaptTask:
    """Fit the network to the labels, write what came of it into a new folder."""

    parcel: Parcel
    labelled: LabelledImages
    others: Numbered  # images without labels
    unlabelled: tuple[Path, ...]  # those that help to adapt
    folder: Path  # gets this name when all is in it
    options: tuple[tuple[str, Any], ...] = ()  # for `adapt`
    origin: tuple[tuple[str, str], ...] = ()  # for the report

    def work(self, send: Send) -> None:
        """Send ("share", done, then), ("stage", words) and ("result", facts)."""
        model, steps = self.parcel.unpacked()
        labelled = self.labelled.opened(steps, self.parcel.classes)
        with telling(send):
            result = fewshift.adapt(
                model,
                labelled,
                unlabelled=list(self.unlabelled) or None,
                preprocess=steps,
                classes=self.parcel.classes,
                **dict(self.options),
            )
        send(("stage", "writing the delta and the report"))
        facts = facts_of(result)
        draft = draft_of(self.folder)
        draft.mkdir(parents=True)
        self._write(result, facts, draft)
        if isinstance(labelled, Scenes):
            _draw(model, result, labelled, self.others, draft)
        draft.rename(self.folder)
        send(("result", facts))

    def _write(self, result: Adaptation, facts: dict[str, Any], draft: Path) -> None:
        delta = f"{self.folder.name}.safetensors"
        result.candidate_delta.save(draft / delta)
        result.report(draft / REPORT, self.folder / delta, origin=dict(self.origin))
        if self.labelled.rows:
            write_table(dict(self.labelled.rows), draft / TABLE)  # beside its folder: the paths stay right
        (draft / RESULT).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def draft_of(folder: Path) -> Path:
    """Where a folder is while it is being filled."""
    return folder.with_name(f".{folder.name}.part")


def facts_of(result: Adaptation) -> dict[str, Any]:
    """What the page shows of an adaptation."""
    said = result.recommendation
    return result.to_json() | {
        "headline": prose.sentence(f"{said.advice.value}: {said.changed}"),
        "sure": prose.sentence(said.sure),
        "next": prose.sentence(said.next),
        "cautions": [prose.sentence(cautions.sentence(caution)) for caution in result.warnings if caution.serious],
        "suspects_words": suspects.gain_without(result.suspects),
        "size": byte_size(result.candidate_delta.nbytes),
        "labels": 0 if result.support is None else len(result.support),
        "classes": list(result.classes or ()),
    }


def _draw(model: nn.Module, result: Adaptation, labelled: Scenes, others: Numbered, draft: Path) -> None:
    """A few scenes as both networks see them: those without labels, if there are any."""
    files = [file for _, file in others] or list(labelled.files)
    chosen = files[:: max(1, len(files) // SHOWN)][:SHOWN]
    steps = result.preprocess
    assert isinstance(steps, Preprocess)  # labels of pixels need one
    for name, network in (("before", model), ("after", result.candidate)):
        for number, file in enumerate(chosen):
            seen_by(network, file, steps, labelled.palette).save(draft / f"{name}-{number}.jpg", quality=85)
    (draft / SCENES).write_text(json.dumps([file.name for file in chosen]) + "\n", encoding="utf-8")

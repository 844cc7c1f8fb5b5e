"""Adaptations on disk, each in a folder of its own, and what was decided about them, written beside the delta."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fewshift.core._files import remove_drafts, whole
from fewshift.errors import FewshiftError
from fewshift.files.parsing import read_json
from fewshift.files.shapes import anything, fields, is_count, is_flag, is_loss, is_table, is_text, list_of, or_none
from fewshift.studio.adapt_task import REPORT, RESULT, SCENES, draft_of

DECISION, DECISIONS = "decision.json", "decisions.jsonl"
KEPT, THROWN_AWAY, REPLACED = "kept", "thrown away", "replaced by a newer one"
LONGEST = 60  # letters of a name
REMOVE = "restore its folder from a copy, or remove it"
GAIN = fields({"point": is_loss, "low": is_loss, "high": is_loss, "images": is_count})
FACTS = fields(  # of an adaptation, as far as decisions and the page look at them
    {"accepted": is_flag, "gain": or_none(GAIN)}
    | dict.fromkeys(("advice", "recommendation", "labels", "classes"), anything),
    {"suspects": list_of(fields({"file": or_none(is_text)}))},
)


@dataclass(frozen=True)
class AdaptationFolder:
    """The folder of an adaptation that came to its end."""

    folder: Path
    facts: dict[str, Any]

    @property
    def delta(self) -> Path:
        """The file of the delta."""
        return self.folder / f"{self.folder.name}.safetensors"

    @property
    def report(self) -> Path:
        """The page for colleagues."""
        return self.folder / REPORT

    @property
    def onnx(self) -> Path:
        """Where the exported network belongs."""
        return self.folder / f"{self.folder.name}.onnx"

    @property
    def decision(self) -> dict[str, Any] | None:
        """What was decided; None before that."""
        try:
            decision = _read(self.folder / DECISION)
        except FewshiftError:
            return None
        return decision if is_table(decision) else None

    @property
    def scenes(self) -> list[str]:
        """The names of the scenes that are shown before and after."""
        try:
            names = _read(self.folder / SCENES)
        except FewshiftError:
            return []
        return names if list_of(is_text)(names) else []


def new_folder(out: Path, name: str) -> Path:
    """A folder that does not exist yet, named as a person wants it as far as a file can be named so."""
    plain = re.sub(r"[^\w.-]+", "-", name.strip()).strip("-.")[:LONGEST].strip("-.") or "adaptation"
    place, number = out / plain, 1
    while place.exists() or draft_of(place).exists():
        number += 1
        place = out / f"{plain}-{number}"
    return place


def clear_drafts(out: Path) -> None:
    """Remove what a kill left of adaptations that did not come to their end."""
    for folder in (out, *(file.parent for file in out.glob(f"*/{RESULT}"))):
        remove_drafts(folder)
    for draft in out.glob(".*.part"):
        shutil.rmtree(draft, ignore_errors=True)


def last_outcome(out: Path) -> AdaptationFolder | None:
    """The newest adaptation in a folder."""
    results = sorted(out.glob(f"*/{RESULT}"), key=lambda file: file.stat().st_mtime_ns)
    return opened_outcome(results[-1].parent) if results else None


def opened_outcome(folder: Path) -> AdaptationFolder:
    """An adaptation that came to its end."""
    facts = _read(folder / RESULT)
    if not FACTS(facts):
        raise FewshiftError(f"{folder / RESULT} is not what an adaptation wrote: {REMOVE}")
    return AdaptationFolder(folder, facts)


def keep(outcome: AdaptationFolder, out: Path) -> dict[str, Any]:
    """Write down that the delta is kept, and on what grounds."""
    decision = _record(outcome, KEPT)
    with whole(outcome.folder / DECISION) as draft:
        draft.write_text(json.dumps(decision, indent=1) + "\n", encoding="utf-8")
    _append(out, decision)
    return decision


def throw_away(outcome: AdaptationFolder, out: Path, why: str = THROWN_AWAY) -> dict[str, Any]:
    """Remove the adaptation, and write down that it was."""
    if outcome.decision is not None:
        raise FewshiftError(f"{outcome.folder.name} was kept: remove {outcome.folder} by hand if it is not wanted")
    decision = _record(outcome, why)
    _append(out, decision)
    draft = draft_of(outcome.folder)
    outcome.folder.rename(draft)  # a kill leaves no folder that lacks some of its files
    shutil.rmtree(draft)
    return decision


def save_report(outcome: AdaptationFolder, out: Path) -> Path:
    """A copy of the report that stays, whatever is decided."""
    target = out / f"{outcome.folder.name}-report.html"
    with whole(target) as draft:
        shutil.copyfile(outcome.report, draft)
    return target


def _record(outcome: AdaptationFolder, decision: str) -> dict[str, Any]:
    facts = outcome.facts
    return {
        "decision": decision,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": outcome.folder.name,
        "delta": outcome.delta.name,
        "advice": facts["advice"],
        "recommendation": facts["recommendation"],
        "against_advice": (decision == KEPT) != facts["accepted"],
        "gain": facts["gain"] and {key: facts["gain"][key] for key in ("point", "low", "high", "images")},
        "labels": facts["labels"],
        "classes": facts["classes"],
    }


def settle(out: Path) -> None:
    """Note decisions that a kill kept from the list of all: a delta is kept before it is noted."""
    noted = _noted(out)
    for result in sorted(out.glob(f"*/{RESULT}")):
        decision = opened_outcome(result.parent).decision
        if decision is not None and json.dumps(decision) not in noted:
            _append(out, decision)


def _append(out: Path, decision: dict[str, Any]) -> None:
    text = "".join(f"{line}\n" for line in (*_noted(out), json.dumps(decision)))
    with whole(out / DECISIONS) as draft:
        draft.write_text(text, encoding="utf-8")


def _noted(out: Path) -> list[str]:
    """The lines of the list; one that was torn is left out."""
    file = out / DECISIONS
    return file.read_text("utf-8").split("\n")[:-1] if file.exists() else []


def _read(path: Path) -> Any:
    return read_json(path, path, REMOVE)

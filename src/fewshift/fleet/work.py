"""What a worker of a fleet does: it has the network, adapts to one place after the other, and writes their deltas."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fewshift import __version__
from fewshift.api import adapt
from fewshift.core._files import writing
from fewshift.core._progress import silent
from fewshift.errors import FewshiftError
from fewshift.files.shapes import fields, is_count, is_flag, is_loss, is_text, list_of, one_of, or_none
from fewshift.fleet.places import Place
from fewshift.report import cautions
from fewshift.report.cautions import CautionWarning
from fewshift.report.recommendation import Advice
from fewshift.report.results import Adaptation
from fewshift.trust.leaks import LeakWarning

GAIN = fields(dict.fromkeys(("point", "low", "high"), is_loss))
RESULT = fields(
    {
        "accepted": is_flag,
        "advice": one_of(*(advice.value for advice in Advice)),
        "delta": or_none(is_count),
        "gain": or_none(GAIN),
        "images": is_count,
        "recommendation": list_of(is_text, least=3, most=3),
        "shift": or_none(fields({"score": is_loss, "shifted": is_flag})),
        "suspects": is_count,
        "warnings": list_of(is_text),
    }
)
PLACE_RECORD = fields({"place": fields({"name": is_text})}, {"result": RESULT})


@dataclass(frozen=True)
class Work:
    """The network, the options of `adapt`, and the folder of deltas."""

    model: nn.Module
    options: dict[str, Any]
    out: Path


@dataclass(frozen=True)
class Crate:
    """Work on its way to processes of our own: packed once here, unpacked once in each of them."""

    key: str
    content: bytes = field(compare=False, repr=False)

    @classmethod
    def of(cls, work: Work, key: str) -> Crate:
        """Pack, or say in one sentence why that is not possible."""
        try:
            return cls(key, pickle.dumps(work))
        except Exception as error:  # whatever a network has in it
            raise FewshiftError(
                f"the {type(work.model).__name__} cannot be sent to other processes ({error}): use one worker, or "
                "build it from a class in a module, without functions defined on the spot"
            ) from error


def unpack(crate: Crate) -> Work:
    """The work of a crate. Its bytes come from the process that started this one, never from a file."""
    try:
        work: Work = pickle.loads(crate.content)
    except Exception as error:
        raise FewshiftError(
            f"a worker cannot build the network ({error}): use one worker, or define its class in a module that can be "
            "imported"
        ) from error
    return work


def at_hand(work: Work) -> Work:
    """Work that need not travel."""
    return work


def adapt_place(place: Place, work: Work) -> dict[str, Any]:
    """Adapt as `fewshift.adapt` does; the delta is in the folder if, and only if, the adaptation was accepted."""
    with warnings.catch_warnings(record=True) as noted, silent():
        warnings.simplefilter("always")
        result = adapt(work.model, place.path, **work.options)
    file = delta_file(work.out, place.name)
    with writing(file, "free some space or make it writable, then run it again"):
        if result.accepted:
            result.delta.save(file)
        else:
            file.unlink(missing_ok=True)  # an earlier one was fitted to other images, or by other options
    ours = [str(note.message) for note in noted if issubclass(note.category, (CautionWarning, LeakWarning))]
    return _summary(result, ours) | {"delta": file.stat().st_size if result.accepted else None}


def is_place_record(record: dict[str, Any]) -> bool:
    """Whether a line of the ledger is what `adapt_place` writes, as far as tables look at it."""
    return PLACE_RECORD(record)


def delta_file(out: Path, name: str) -> Path:
    """Where the delta of a place is."""
    return out / f"{name}.safetensors"


def _summary(result: Adaptation, warned: list[str]) -> dict[str, Any]:
    """Plain numbers and words, ready for JSON."""
    gain, shift = result.gain, result.shift
    serious = [cautions.sentence(caution) for caution in result.warnings if caution.serious]
    return {
        "accepted": result.accepted,
        "advice": result.recommendation.advice.value,
        "recommendation": list(result.recommendation.lines),
        "reason": result.reason,
        "images": 0 if result.support is None else len(result.support),
        "gain": None
        if gain is None
        else {name: round(float(getattr(gain, name)), 2) for name in ("point", "low", "high", "before", "after")},
        "shift": None
        if shift is None
        else {"score": round(shift.score, 2), "threshold": round(shift.threshold, 2), "shifted": shift.shifted},
        "suspects": len(result.suspects),
        "warnings": [*serious, *warned],
        "chosen": None if result.choice is None else result.choice.chosen,
        "seconds": round(result.seconds, 2),
        "version": __version__,
    }

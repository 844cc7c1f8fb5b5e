"""Words: the facts of a result as sentences, captions and cells of tables."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewshift.core.delta import Delta
from fewshift.core.support import Support
from fewshift.trust.gain import HeldOut

if TYPE_CHECKING:
    from fewshift.api import Adaptation, LayerReport

ETA, RHO = "\N{GREEK SMALL LETTER ETA}", "\N{GREEK SMALL LETTER RHO}"
NAMED = 4  # tensors
HEADS = {"source": "the source's", "finetuned": "the finetuned one", "ncc": "nearest centroids"}
CLASSIFIERS = {
    "source": "kept the classifier",
    "finetuned": "trained the classifier further",
    "ncc": "put nearest centroids in the classifier's place",
}


def title(result: Adaptation) -> str:
    """What the page is about."""
    network, method = type(result.source).__name__, type(result.method).__name__
    if not result.accepted:
        return f"{network}, left as it is: {method} was rejected"
    return f"{network}, adapted by {method}" if result.delta.bits else f"{network}, left as it is"


def summary(result: Adaptation) -> str:
    """The whole story in one sentence."""
    network, method = type(result.source).__name__, type(result.method).__name__
    if not changes(result).bits:
        return f"{method} was given {given(result)} and left this {network} as it is, bit for bit."
    if not result.accepted:
        return (
            f"{method} fitted this {network} to {given(result)} in {duration(result.seconds)}. The adapted network was "
            "rejected, and the source network came back, bit for bit."
        )
    deeds = []
    if learned := result.notes.get("parameters"):
        count = sum(layer.skipped is None for layer in result.layers)
        each = f" (on average {learned / count:.0f} in each of {counted(count, 'layer')})"
        deeds.append(f"learned {learned:,} numbers{each if any(it.details for it in result.layers) else ''}")
    if deed := CLASSIFIERS.get(result.notes.get("classifier", "")):
        deeds.append(deed)
    done = f"it {' and '.join(deeds)}, so that " if deeds else ""
    return f"{method} fitted this {network} to {given(result)} in {duration(result.seconds)}: {done}{changed(result)}."


def facts(result: Adaptation) -> list[str]:
    """What else is known about the adapted network, beside what the decision tells."""
    told = [it for it in result.evidence.facts if it not in result.reason]
    return [it for it in told if not (result.gain and result.gain.weak and it == result.evidence.words)]


def changes(result: Adaptation) -> Delta:
    """What adaptation changed, or would have, had it been accepted."""
    told = result.accepted or not result.method.plain  # of what is no plain network there is no difference to tell
    return result.delta if told else result.candidate_delta


def choice(result: Adaptation) -> str:
    """Which classifier held-out images chose, where there was a choice; otherwise nothing."""
    held = result.evidence.held
    if not isinstance(held, HeldOut) or result.method.settings().get("classifier") != "evidence":
        return ""
    if len(held.candidates) < 2:
        return ""
    return f"Of {len(held.candidates)} classifiers, held-out images chose {HEADS[result.notes['classifier']]}."


def where(result: Adaptation) -> str:
    """Which tensors differ: those of BatchNorm layers as a number, a few others by name."""
    names = list(changes(result).bits)
    layers = {layer.name for layer in result.layers if layer.skipped is None}
    inside = [name for name in names if name.rpartition(".")[0] in layers]
    others = [name for name in names if name not in inside]
    told = []
    if inside:
        count = len({name.rpartition(".")[0] for name in inside})
        told.append(f"{counted(len(inside), 'tensor')} of {counted(count, 'BatchNorm layer')}")
    if others:
        rest = len(others) - NAMED
        told.append(", ".join(others[:NAMED]) + (f" and {counted(rest, 'other')}" if rest > 0 else ""))
    return ", and ".join(told)


def sentence(phrase: str) -> str:
    """The phrase with a capital first letter, the others as they are."""
    return phrase[:1].upper() + phrase[1:]


def given(result: Adaptation) -> str:
    """What the method could look at."""
    images = [] if result.support is None else [support(result.support)]
    if result.unlabelled is not None:
        images.append(counted(len(result.unlabelled), "unlabelled image"))
    return " and ".join(images)


def support(given: Support) -> str:
    """How many images of how many classes."""
    counts = given.counts.values()
    least, most = min(counts), max(counts)
    each = f"k = {least} of each" if least == most else f"{least} to {most} of each, k = {least}"
    of = f" ({each})" if given.kind.centroids else ""  # of pixels there is no such count
    return f"{counted(len(given), 'labelled image')} of {counted(len(counts), 'class', 'classes')}{of}"


def changed(result: Adaptation) -> str:
    """How much of the network differs now."""
    total = len(result.source.state_dict())
    return f"{len(result.delta.bits)} of its {total} tensors differ now, {size(result.delta)} in all"


def size(delta: Delta) -> str:
    """The changed tensors in bytes."""
    count = sum(tensor.nbytes for tensor in delta.bits.values())
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """In a unit that suits it."""
    for most, unit, name in ((100, 1, "seconds"), (6000, 60, "minutes")):
        if seconds < most:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 3600:.1f} hours"


def class_counts(given: Support) -> list[tuple[str, int]]:
    """Name and count of every class that occurs."""
    return [(_class_name(given, label), count) for label, count in given.counts.items()]


def absent_classes(given: Support) -> list[str]:
    """Known classes without an image in the support."""
    present = given.counts
    return [name for label, name in enumerate(given.classes or ()) if label not in present]


def quoted(text: str) -> str:
    """As a string in Python."""
    return json.dumps(text, ensure_ascii=False)


def shell(text: str) -> str:
    """As one word on a command line."""
    return shlex.quote(text)


def counted(count: int, one: str, more: str | None = None) -> str:
    """A number and what is counted, singular or plural."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def over_draws(values: Sequence[float], sign: str = "") -> str:
    """Mean ± population standard deviation; a single draw has no spread to tell."""
    spread = f" ± {statistics.pstdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.1f}{spread}"


@dataclass(frozen=True)
class Column:
    """A column of the table of layers; an empty cell is a fact the method did not note."""

    heading: str
    meaning: str
    cell: Callable[[LayerReport], str]


def columns(result: Adaptation) -> list[Column]:
    """What the method noted about its layers; columns without any entry are left out."""
    start = result.notes.get("v")
    own_start = start if isinstance(start, Mapping) else {}  # a common one stands in the caption
    possible = [
        Column("v", "the blend it started from", lambda it: _number(own_start.get(it.name))),
        Column("n", "support vectors, for mean and deviation", lambda it: _n(_detail(it, "n"))),
        Column(f"{ETA} source", "weight of the source's mean", lambda it: _weight(it, "eta", 0)),
        Column(f"{ETA} support", "of the support's mean", lambda it: _weight(it, "eta", 1)),
        Column(f"{RHO} source", "of the source's standard deviation", lambda it: _weight(it, "rho", 0)),
        Column(f"{RHO} support", "of the support's", lambda it: _weight(it, "rho", 1)),
    ]
    return [column for column in possible if any(column.cell(layer) for layer in result.layers)]


def _detail(layer: LayerReport, key: str) -> Any:
    return (layer.details or {}).get(key)


def _weight(layer: LayerReport, key: str, place: int) -> str:
    weights = _detail(layer, key)
    return _number(weights[place] if weights else None)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _n(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return ""
    mean, std = pair
    return f"{mean}" if mean == std else f"{mean}, {std}"


def _class_name(given: Support, label: int) -> str:
    return given.classes[label] if given.classes and 0 <= label < len(given.classes) else str(label)

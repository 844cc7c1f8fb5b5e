"""Prose: the facts of a result as sentences. Nothing reads them but people."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewshift.core._display import byte_size
from fewshift.core.delta import Delta
from fewshift.core.support import Support
from fewshift.trust.calibration import Calibration, NotApplied
from fewshift.trust.evidence import Evidence, Fact, Missing, Weakness
from fewshift.trust.gain import LEVEL, Gain
from fewshift.trust.guard import Rule, Verdict
from fewshift.trust.shift import Shift

if TYPE_CHECKING:
    from fewshift.report.results import Adaptation

NAMED = 4  # tensors
ENOUGH_TO_TELL = 20  # images: from here on most corruptions are noticed, see docs/trust.md
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
        return f"{method} was given {looked_at(result)} and left this {network} as it is, bit for bit."
    if not result.accepted:
        return (
            f"{method} fitted this {network} to {looked_at(result)} in {duration(result.seconds)}. "
            "The adapted network was rejected, and the source network came back, bit for bit."
        )
    deeds = []
    if learned := result.notes.get("parameters"):
        count = sum(layer.skipped is None for layer in result.layers)
        each = f" (on average {learned / count:.0f} in each of {counted(count, 'layer')})"
        deeds.append(f"learned {learned:,} numbers{each if any(layer.details for layer in result.layers) else ''}")
    if deed := CLASSIFIERS.get(result.notes.get("classifier", "")):
        deeds.append(deed)
    done = f"it {' and '.join(deeds)}, so that " if deeds else ""
    return (
        f"{method} fitted this {network} to {looked_at(result)} in {duration(result.seconds)}: {done}{changed(result)}."
    )


def changes(result: Adaptation) -> Delta:
    """What adaptation changed, or would have, had it been accepted."""
    known = result.accepted or not result.method.plain  # what is no plain network has no delta
    return result.delta if known else result.candidate_delta


def where(result: Adaptation) -> str:
    """Which tensors differ: those of BatchNorm layers as a number, a few others by name."""
    names = list(changes(result).bits)
    layers = {layer.name for layer in result.layers if layer.skipped is None}
    inside = [name for name in names if name.rpartition(".")[0] in layers]
    others = [name for name in names if name not in inside]
    parts = []
    if inside:
        count = len({name.rpartition(".")[0] for name in inside})
        parts.append(f"{counted(len(inside), 'tensor')} of {counted(count, 'BatchNorm layer')}")
    if others:
        rest = len(others) - NAMED
        parts.append(", ".join(others[:NAMED]) + (f" and {counted(rest, 'other')}" if rest > 0 else ""))
    return ", and ".join(parts)


def looked_at(result: Adaptation) -> str:
    """What the method could look at."""
    images = [] if result.support is None else [support(result.support)]
    if result.unlabelled is not None:
        images.append(counted(len(result.unlabelled), "unlabelled image"))
    return " and ".join(images)


def support(support: Support) -> str:
    """How many images of how many classes."""
    counts = support.counts.values()
    least, most = min(counts), max(counts)
    each = f"k = {least} of each" if least == most else f"{least} to {most} of each, k = {least}"
    of = f" ({each})" if support.kind.stratified else ""  # images are not counted by class
    return f"{counted(len(support), 'labelled image')} of {counted(len(counts), 'class', 'classes')}{of}"


def changed(result: Adaptation) -> str:
    """How much of the network differs now."""
    total = len(result.source.state_dict())
    return f"{len(result.delta.bits)} of its {total} tensors differ now, {size(result.delta)} in all"


def class_counts(support: Support) -> list[tuple[str, int]]:
    """Name and count of every class that occurs."""
    return [(_class_name(support, label), count) for label, count in support.counts.items()]


def absent_classes(support: Support) -> list[str]:
    """Known classes without an image in the support."""
    present = support.counts
    return [name for label, name in enumerate(support.classes or ()) if label not in present]


def _class_name(support: Support, label: int) -> str:
    return support.classes[label] if support.classes and 0 <= label < len(support.classes) else str(label)


# evidence


def gain(gain: Gain) -> str:
    """What held-out images say."""
    what = "images" if gain.predictions == gain.images else f"predictions for {gain.images} images"
    return (
        f"of {gain.predictions} held-out {what}, {gain.wins} became right and {gain.losses} became wrong: "
        f"{gain.point:+.1f} points, {interval(gain)}"
    )


def interval(gain: Gain) -> str:
    """How sure a gain is."""
    return f"{100 * LEVEL:.0f} % interval {gain.low:+.1f} to {gain.high:+.1f}"


WEAK = {
    Weakness.ONE_SHOT: "each class has a single image, so it cannot be both adapted to and held out",
    Weakness.FEW_CLASSES: "fewer than half of the classes have images",
}
MISSING = {
    Missing.NOT_ASKED: "no evidence was gathered, as asked (validate=None)",
    Missing.NO_LABELS: "there are no labels to judge by",
    Missing.ONE_IMAGE: "a single image leaves nothing to hold out",
}


def weakness(evidence: Evidence) -> str:
    """What is weak about the evidence; empty if nothing is."""
    return "" if evidence.weakness is None else WEAK[evidence.weakness]


def missing(evidence: Evidence) -> str:
    """Why there is no evidence; empty if there is."""
    if evidence.missing is None:
        return evidence.error
    if evidence.missing is Missing.NEEDS_ALL:
        return f"{evidence.method} cannot do without the images that were held out ({evidence.error})"
    return MISSING[evidence.missing]


def _agreement(evidence: Evidence) -> str:
    share = 100 * (evidence.agreement or 0.0)
    return (
        f"{share:.0f} % of the predictions for unlabelled images stay the same, so accuracy there changes by at most "
        f"{100 - share:.0f} points"
    )


def _shift(evidence: Evidence) -> str:
    shift = evidence.shift
    if shift is None:
        return ""
    return f"the images are {'' if shift.shifted else 'not '}clearly unlike those of training"


def _unseen(evidence: Evidence) -> str:
    kept = "their classifier was changed unseen" if evidence.new_classifier else "the source's classifier was kept"
    return f"the support has no image of {', '.join(evidence.unseen)}: {kept}"


def fact(evidence: Evidence, fact: Fact) -> str:
    """One fact as a phrase."""
    phrases = {
        Fact.GAIN: lambda: "" if evidence.gain is None else gain(evidence.gain),
        Fact.MISSING: lambda: missing(evidence),
        Fact.WEAKNESS: lambda: f"weak evidence: {weakness(evidence)}",
        Fact.SHIFT: lambda: _shift(evidence),
        Fact.AGREEMENT: lambda: _agreement(evidence),
        Fact.UNSEEN: lambda: _unseen(evidence),
        Fact.FORGOTTEN: lambda: f"{', '.join(evidence.forgotten)} may be forgotten",
    }
    return phrases[fact]()


def facts(evidence: Evidence) -> list[str]:
    """All that is known, each fact as a phrase."""
    return [fact(evidence, each) for each in evidence.facts]


def other_facts(result: Adaptation) -> list[str]:
    """What is known beside what the reason for the verdict already says."""
    return [fact(result.evidence, each) for each in result.evidence.facts if each not in result.verdict.grounds]


def reason(verdict: Verdict, evidence: Evidence) -> str:
    """Why an adapted network is handed over, or is not."""
    word = "accepted" if verdict.accepted else "rejected"
    if evidence.gain is None or verdict.rule not in (Rule.THRESHOLD, Rule.POINT, Rule.STRENGTH):
        without = "without" if verdict.accepted else "for want of"
        return {
            Rule.ALWAYS: "accepted without a condition, as asked (accept='always')",
            Rule.CALLABLE: f"{word} by your own condition",
            Rule.UNSEEN_CLASSES: f"{word}: the classifier was changed and the support has no image of "
            + ", ".join(evidence.unseen),
            Rule.FORGOTTEN_CLASSES: f"{word}: {', '.join(evidence.forgotten)} may be forgotten, as unlabelled images "
            "show, and the other classes do not gain as much as that may cost",
            Rule.NO_EVIDENCE: f"{word} {without} evidence: {missing(evidence)}",
        }[verdict.rule]
    if verdict.rule is not Rule.STRENGTH:
        limit = (
            "" if verdict.threshold is None else f",{'' if verdict.accepted else ' not'} above {verdict.threshold:g}"
        )
        return f"{word}: {gain(evidence.gain)}{limit}"
    parts = [gain(evidence.gain), f"their labels are {times_as_likely(evidence.gain.nats)}"]
    if verdict.strength is not None and verdict.strength.shift is not None:
        parts.append(_shift(evidence))
    why = "the evidence is against the adapted network" if verdict.against else "nothing clearly favours it"
    return f"{word}: {'; '.join(parts)}" + ("" if verdict.accepted else f": {why}")


NOT_APPLIED = {
    NotApplied.NO_HEAD: "the last linear layer is not known",
    NotApplied.SOURCE_HEAD: "the classifier is the source's",
    NotApplied.WEAK: "the evidence is weak",
    NotApplied.TOO_FEW: "there are too few held-out predictions",
    NotApplied.NO_SIGNAL: "its answers do not tell the classes apart",
    NotApplied.SURE_ENOUGH: "it is not overconfident",
    NotApplied.NO_FALL: "it would not clearly lower the cross-entropy on other images",
    NotApplied.NOT_LAST: "something comes after the last linear layer",
}


def calibration(calibration: Calibration) -> str:
    """Whether probabilities can be believed, in points: confidence and accuracy in percent."""
    before, plain, after, chance = (
        f"{100 * error:.0f}"
        for error in (calibration.before, calibration.uncalibrated, calibration.after, calibration.chance)
    )
    apart = (
        f"confidence and accuracy are {before} points apart for the source network and {plain} for the adapted one, "
        f"over {calibration.predictions:,} held-out predictions (chance alone makes about {chance})"
    )
    if calibration.refused is None:
        return f"{apart}; dividing its classifier by a temperature of {calibration.temperature:.2f} makes it {after}"
    return f"{apart}; no temperature was applied: {NOT_APPLIED[calibration.refused]}"


def shift(shift: Shift) -> str:
    """Whether images differ from those of training."""
    strongest = shift.ranked[0]
    images = "image" if shift.total == 1 else f"{shift.total:,} images"
    if shift.images < shift.total:
        images += f" ({shift.images} looked at)"
    scores = f"score {shift.score:.1f}, alarm above {shift.threshold:.1f}"
    if shift.shifted:
        differ = "differs" if shift.total == 1 else "differ"
        source = f"the {shift.source_images} of the source" if shift.source_images else "the network's training images"
        return (
            f"the {images} {differ} from {source}: {scores}, "
            f"strongest in layer '{strongest.name}' (means off by {strongest.mean_shift:.2f} deviations, "
            f"deviations {strongest.std_ratio:.2f} times the source's)"
        )
    if shift.images >= ENOUGH_TO_TELL:
        return f"no sign of a shift in the {images}: {scores}"
    few = "one image is" if shift.images == 1 else f"{shift.images} images are"
    other = "" if shift.source_images else ", or images of the source to compare with (--source, source=)"
    return f"no alarm for the {images}: {scores}; {few} too few to tell: give {ENOUGH_TO_TELL} or more{other}"


def shift_meaning(shift: Shift) -> str:
    """What an alarm, or its absence, says about predictions, and what would say more."""
    if shift.shifted:
        meaning = (
            "the alarm says that the images as a whole look unlike those they are compared with, not that predictions "
            "are wrong; nor does a higher score mean more mistakes: photographs of a training domain scored 5.4 with "
            "91 % right, cartoons that failed 3.5"
        )
    else:
        meaning = "no alarm says that the layers see nothing unusual, not that predictions are right"
    return f"{meaning}; a few labelled images and `fewshift evaluate` tell"


# numbers, sizes and names


def sentence(phrase: str) -> str:
    """The phrase with a capital first letter, the others as they are."""
    return phrase[:1].upper() + phrase[1:]


def size(delta: Delta) -> str:
    """The changed tensors in bytes."""
    return byte_size(delta.nbytes)


def duration(seconds: float) -> str:
    """In a unit that suits it."""
    for most, unit, name in ((100, 1, "seconds"), (6000, 60, "minutes")):
        if seconds < most:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 3600:.1f} hours"


def quoted(text: str) -> str:
    """As a string in Python."""
    return json.dumps(text, ensure_ascii=False)


shell = shlex.quote  # as one word on a command line


def counted(count: int, one: str, more: str | None = None) -> str:
    """A number and what is counted, singular or plural."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def over_draws(values: Sequence[float], sign: str = "") -> str:
    """Mean ± population standard deviation; a single draw has no spread."""
    spread = f" ± {statistics.pstdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.1f}{spread}"


def times_as_likely(nats: float) -> str:
    """A ratio of likelihoods: 2.3 times as likely, or 2.3 times less likely."""
    ratio = math.exp(min(abs(nats), 100))
    number = "over 1,000" if ratio > 1000 else f"{ratio:.1f}"
    return f"{number} times {'as' if nats >= 0 else 'less'} likely"

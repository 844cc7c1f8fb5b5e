"""The recommendation: what changed, how sure that is, and what to do; three lines for the person who decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fewshift.report.prose import counted
from fewshift.trust.gain import Gain
from fewshift.trust.guard import SURE, Rule, decide
from fewshift.trust.held_out import ImageAnswers

if TYPE_CHECKING:
    from fewshift.report.results import Adaptation

FEW, VERY_FEW = 50, 15  # images
SMALL = 0.5  # points: no change
WATCHED = 3  # classes that a line names
MORE = 5  # images to label
FALL = 20.0  # points that a class may lose
MANY_SUSPECTS = 0.1  # of the labels: as many look wrong where none is


class Advice(Enum):
    """What to do with an adapted network, in two words."""

    RECOMMENDED = "recommended"
    CAUTION = "with caution"
    AGAINST = "not recommended"


@dataclass(frozen=True)
class Recommendation:
    """Three lines, and what they come to."""

    advice: Advice
    changed: str
    sure: str
    next: str

    def __str__(self) -> str:
        return f"{self.advice.value}: {'; '.join(self.lines)}"

    @property
    def lines(self) -> tuple[str, str, str]:
        """What changed, how sure that is, what to do."""
        return self.changed, self.sure, self.next


def recommendation(result: Adaptation) -> Recommendation:
    """The recommendation of an adaptation."""
    return Recommendation(advice(result), _changed(result), _sure(result), _next(result))


def advice(result: Adaptation) -> Advice:
    """Recommended only where the evidence carries it and nothing looks wrong."""
    if not result.accepted:
        return Advice.AGAINST
    gain = result.gain
    proven = gain is not None and gain.point > 0 and decide("not-worse", result.evidence).accepted
    warned = any(caution.serious for caution in result.warnings)
    clean = not warned and not result.evidence.unseen and not _falls(gain) and not _many_suspects(result)
    return Advice.RECOMMENDED if proven and clean else Advice.CAUTION


def _falls(gain: Gain | None) -> bool:
    """Whether a class loses so much that it is no accident of a single image."""
    classes = {} if gain is None else gain.per_class
    return any(before - after >= FALL and images * (before - after) > 100 for images, before, after in classes.values())


def _many_suspects(result: Adaptation) -> bool:
    return result.support is not None and len(result.suspects) > MANY_SUSPECTS * len(result.support)


def losing(result: Adaptation) -> list[str]:
    """The classes with fewer held-out images right than before, the greatest loss first."""
    gain = result.gain
    if gain is None:
        return []
    changes = {label: after - before for label, (_, before, after) in gain.per_class.items()}
    return [_name(result, label) for label in sorted(changes, key=changes.__getitem__) if changes[label] < 0]


def _changed(result: Adaptation) -> str:
    gain, held = result.gain, result.evidence.held
    if gain is None:
        return "nothing was held out, so nothing is known about the gain"
    if isinstance(held, ImageAnswers) and gain.predictions == gain.images:
        before, after = (int((rows.argmax(1) == held.labels).sum()) for rows in (held.source, held.adapted))
        line = f"{before} of {counted(gain.images, 'held-out image')} right before, {after} after"
    else:
        what = "pixels" if not isinstance(held, ImageAnswers) else "answers"
        line = (
            f"{gain.before:.0f} % of the {what} to {counted(gain.images, 'held-out image')} right before, "
            f"{gain.after:.0f} % after"
        )
    if abs(gain.point - gain.over_images) > SMALL:
        line += f"; {gain.point:+.1f} points on average over classes, {gain.over_images:+.1f} over images"
    return line


def _sure(result: Adaptation) -> str:
    gain = result.gain
    if gain is None:
        return "label some images and let them judge"
    few = f"{counted(gain.images, 'image')} {'is' if gain.images == 1 else 'are'}"
    amount = f"; {few} very few" if gain.images < VERY_FEW else f"; {few} few" if gain.images < FEW else ""
    line = f"the true change is probably between {_points(gain.low)} and {_points(gain.high)} points{amount}"
    strength = result.verdict.strength
    if result.accepted and strength is not None and strength.labels < SURE and (strength.shift or 0) > SURE:
        line += "; what decides is that the images clearly differ from those of training"
    return line


def _points(value: float) -> str:
    return "0" if abs(value) < SMALL else f"{value:+.0f}"


def _next(result: Adaptation) -> str:
    if not result.accepted:
        return _kept(result)
    steps = ["deploy"] if not any(caution.serious for caution in result.warnings) else ["read the warnings first"]
    if _many_suspects(result):
        check = f"check {counted(len(result.suspects), 'label')} that look{'s' * (len(result.suspects) == 1)} wrong"
        steps = [check] if steps == ["deploy"] else [*steps, check]
    if result.evidence.unseen:
        steps.append(f"nothing is known about {_listed(result.evidence.unseen)}: label some")
    if falling := losing(result):
        steps.append(f"watch {_listed(falling)}")
    if result.gain is None or result.verdict.rule in (Rule.ALWAYS, Rule.CALLABLE):
        steps.append("judge it by other labelled images (fewshift evaluate)")
    return ", and ".join((steps[0], "; ".join(steps[1:]))) if len(steps) > 1 else steps[0]


def _kept(result: Adaptation) -> str:
    keep = "keep the old network"
    gain, unseen = result.gain, result.evidence.unseen
    if unseen:
        return f"{keep}; nothing is known about {_listed(unseen)}: label some"
    if gain is None or not gain.per_class or result.verdict.against:
        return keep
    shift = result.evidence.shift
    if shift is not None and not shift.shifted and gain.before > gain.after - SMALL:
        return f"{keep}: the images are like those of training, and there is little to gain"
    return f"{keep}, or label {MORE} more images of each class, above all of {_worst(result, gain)}"


def _worst(result: Adaptation, gain: Gain) -> str:
    """The class with the fewest held-out images right."""
    label = min(gain.per_class, key=lambda each: gain.per_class[each][2])
    return _name(result, label)


def _name(result: Adaptation, label: int) -> str:
    names = result.classes or (result.support.classes if result.support is not None else None)
    return names[label] if names and label < len(names) else f"class {label}"


def _listed(names: tuple[str, ...] | list[str]) -> str:
    rest = len(names) - WATCHED
    return ", ".join(names[:WATCHED]) + (f" and {rest} more" if rest > 0 else "")

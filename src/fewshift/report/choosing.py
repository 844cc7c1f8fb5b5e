"""What `auto` chose and why, and what it did with unlabelled images, as sentences and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fewshift.report.prose import counted, sentence
from fewshift.trust.choice import Choice, choose

if TYPE_CHECKING:
    from fewshift.report.results import Adaptation


def chosen(result: Adaptation) -> str:
    """Which candidate held-out images chose, where there was a choice; otherwise nothing."""
    choice = result.choice
    if choice is None:
        return ""
    if len(choice.answers) < 2:
        unseen = result.evidence.unseen
        why = f": the support has no image of {unseen[0]}" if unseen else ": no last layer could be replaced"
        return f"{sentence(choice.chosen)} was the only candidate{why}."
    right = {name: f"{held.gain().after:.1f} %" for name, held in choice.answers.items()}
    rest = ", ".join(f"{name} {right[name]}" for name in choice.allowed if name != choice.chosen)
    if not choice.decisive:
        said = f"{sentence(choice.chosen)} was taken: with one image of a class, held-out images cannot choose."
    elif choice.doubtful:
        said = f"{sentence(choice.chosen)} was taken: too many labels look wrong to learn more from them ({rest})."
    elif rest and choice.near and choice.chosen == choice.allowed[-1]:
        said = (
            f"{sentence(choice.chosen)} was taken: {right[choice.chosen]} of held-out images right ({rest}). "
            "The place is near the source, where more is taken only if it is clearly better."
        )
    elif rest:
        said = f"{sentence(choice.chosen)} was taken: {right[choice.chosen]} of held-out images right ({rest})."
    else:
        said = f"{sentence(choice.chosen)}: {right[choice.chosen]} of held-out images right."
    return f"{said}{_other_size(choice, right)}"


def _other_size(choice: Choice, right: Mapping[str, str]) -> str:
    """What the other choice of `size` would be worth, where there is another."""
    refused = [name for name in choice.large if name not in choice.allowed]
    if refused:
        return f" A large delta ({refused[0]}) would have {right[refused[0]]}."
    small = [name for name in choice.allowed if name not in choice.large]
    if choice.chosen not in choice.large or not small:
        return ""
    best = choose({name: choice.answers[name] for name in small})
    return f" With size='small', {best} would have {right[best]}."


def unlabelled(result: Adaptation) -> str:
    """What unlabelled images were used for, where `auto` had some; otherwise nothing."""
    used = result.notes.get("unlabelled")
    if not used:
        return ""
    if used["used"]:
        new = result.choice is not None and result.choice.chosen != "blend"
        also = " and in the new classifier" if new and result.support and result.support.kind.centroids else ""
        return f"{counted(used['images'], 'unlabelled image')} shared in the statistics{also}."
    if not used["images"]:
        return "The unlabelled images differ in size from the support and were left out."
    shown = f"{100 * used['classes_shown']:.0f} %"
    return f"The unlabelled images were left out: in effect they show {shown} of the support's classes."


def candidates(choice: Choice) -> list[dict[str, Any]]:
    """Every candidate with what held-out images say of it: the share that is right, in percent, and the loss."""
    return [
        {
            "name": name,
            "right": held.gain().after,
            "gain": held.gain().point,
            "loss": float(held.losses.mean()),
            "images": held.gain().images,
            "large": name in choice.large,
            "chosen": name == choice.chosen,
        }
        for name, held in choice.answers.items()
    ]

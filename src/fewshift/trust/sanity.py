"""What looks wrong before a network is adapted: labels, classes, preprocessing, outputs.

A check looks at what is known and returns cautions: values, no sentences (those are in `report/cautions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn

from fewshift.core.adaptable import refuse_unadaptable
from fewshift.core.network import Network, like, logits_of
from fewshift.core.reading import read_support, tied
from fewshift.core.support import MINIBATCH, Support, Target
from fewshift.errors import FewshiftError
from fewshift.images.formats import unreadable
from fewshift.images.preprocess import Preprocess
from fewshift.models.cards import Card
from fewshift.trust.at_home import LOOKED_AT, Homes, find_homes
from fewshift.trust.evidence import Evidence
from fewshift.trust.held_out import predictions
from fewshift.trust.permuted import HALF_WAY, Moves, find_moves

UNEVEN = 3  # times as many images as the rarest class
FEW = 5  # images: a class with more is not rare, however many others have
NAMED = 10  # classes that an error names
ASKED = 256  # unlabelled images that both networks predict, at most
OFTEN = 3  # predictions of a class, from which on half as many is a loss and not chance


class CautionKind(Enum):
    """What looks wrong."""

    PERMUTED = "permuted"
    SWAPPED = "swapped"
    UNEVEN = "uneven"
    UNSEEN = "unseen"
    PREPROCESSING = "preprocessing"
    BORDERS = "borders"
    CONTRADICTED = "contradicted"
    PROBABILITIES = "probabilities"
    CARD_KEY = "card key"
    LEFT_OUT = "left out"
    ASSUMED_ORDER = "assumed order"


@dataclass(frozen=True)
class Caution:
    """Something that looks wrong, as facts. Which fields are filled depends on the kind."""

    kind: CautionKind
    classes: tuple[str, ...] = ()  # that it is about
    counts: tuple[int, ...] = ()  # of images, one for each of these classes
    pairs: tuple[tuple[str, str], ...] = ()  # a class and what it looks like; a key of the card and what it may mean
    images: int = 0  # that were looked at
    before: tuple[int, ...] = ()  # predictions of these classes by the source network (permuted: right as labelled)
    after: tuple[int, ...] = ()  # by the adapted network (permuted: right as they look)
    homes: Homes | None = None  # preprocessings that suit the network
    sizes: tuple[int, int] | None = None  # pixels: of the resized image, of the crop
    files: tuple[str, ...] = ()  # images that cannot be read here
    half_way: bool = False  # the network was asked half-way to the statistics of the place

    @property
    def serious(self) -> bool:
        """Whether it is a reason to hesitate; what was merely assumed is not."""
        return self.kind is not CautionKind.ASSUMED_ORDER

    @property
    def lost(self) -> dict[str, float]:
        """Classes without images that the adapted network predicts less than half as often: the share that is gone."""
        if self.kind is not CautionKind.UNSEEN or not self.after:
            return {}
        rows = zip(self.classes, self.before, self.after, strict=True)
        return {name: 1 - after / before for name, before, after in rows if before >= OFTEN and 2 * after < before}

    @property
    def forgotten(self) -> tuple[str, ...]:
        """The classes that may be forgotten."""
        return tuple(self.lost)


@dataclass(frozen=True)
class Known:
    """What is known before adaptation."""

    network: Network
    target: Target
    card: Card
    preprocess: Preprocess | None
    named: bool  # something says in which order the outputs are
    logits: Tensor | None  # the source network's answers to the support; None without image labels
    half_way: Tensor | None = None  # its answers half-way to the statistics of the place; None where it has none

    @property
    def labelled(self) -> tuple[Support, Tensor] | None:
        """The support and the source network's answers; None without image labels."""
        support = self.target.support
        return None if support is None or self.logits is None else (support, self.logits)


def source_answers(network: Network, target: Target) -> Tensor | None:
    """The source network's logits for the support; None without image labels."""
    support = target.support
    if support is None or not support.kind.stratified or len(network.output) != 1:
        return None
    return predictions(network.model, support.checked(network.output)).double().cpu()


def half_way_answers(network: Network, target: Target) -> Tensor | None:
    """The logits for the support half-way to its own statistics, each image left out of those that it meets.

    None without image labels, for a single image, and for networks without statistics to blend.
    """
    support = target.support
    if support is None or not support.kind.stratified or len(network.output) != 1 or len(support) < 2:
        return None
    try:
        refuse_unadaptable(network)
        prepared = support.checked(network.output).prepared(lambda images: like(network.model, images))
        reading = read_support(network, prepared, tied(network, HALF_WAY), leave_out=True)
    except FewshiftError:
        return None
    logits = torch.cat(reading.logits).double().cpu()
    return logits if bool(torch.isfinite(logits).all()) else None


def look_before(known: Known, *, refuse: bool = True) -> tuple[Caution, ...]:
    """All cautions; labels in another order than the outputs are an error, unless `refuse` is false."""
    cautions = tuple(caution for check in CHECKS for caution in check(known))
    if refuse:
        for caution in cautions:
            if caution.kind is CautionKind.PERMUTED and 2 * caution.after[0] >= caution.images:
                raise FewshiftError(_refusal(caution, known))
    return cautions


def _cycles(known: Known) -> Iterable[Caution]:
    """Labels in another order than the network's outputs: two classes, or more."""
    if known.labelled is None:
        return
    support, logits = known.labelled
    labels = support.targets.cpu()
    if not torch.isfinite(logits).all():
        return
    moves = find_moves(logits, known.half_way, labels)
    for cycle in (cycle for cycle in moves.cycles if len(cycle.classes) == 2):
        alone = Moves([cycle], cycle.as_labelled, moves.half_way)
        yield _moved(CautionKind.SWAPPED, alone, support, cycle.images)
    # a class without images proves nothing about where it belongs
    longer = [cycle for cycle in moves.cycles if len(cycle.classes) > 2 and set(cycle.classes) <= set(support.counts)]
    if longer:
        yield _moved(CautionKind.PERMUTED, replace(moves, cycles=longer), support, len(labels))


def _moved(kind: CautionKind, moves: Moves, support: Support, images: int) -> Caution:
    rows = [move for cycle in moves.cycles for move in cycle.moves if move[0] in support.counts]
    pairs = tuple((_name(support, label), _name(support, like)) for label, like in rows)
    names, after = tuple(name for name, _ in pairs), moves.right + moves.gained
    return Caution(
        kind, names, pairs=pairs, images=images, before=(moves.right,), after=(after,), half_way=moves.half_way
    )


def _uneven(known: Known) -> Iterable[Caution]:
    """Some classes have many times the images of others."""
    support = known.target.support
    if support is None or not support.kind.stratified:
        return
    least, most = min(support.counts.values()), max(support.counts.values())
    if most > UNEVEN * least and least <= FEW:
        rows = sorted(support.counts.items(), key=lambda row: -row[1])
        names = tuple(_name(support, label) for label, _ in rows)
        yield Caution(CautionKind.UNEVEN, names, tuple(count for _, count in rows), images=len(support))


def _unseen(known: Known) -> Iterable[Caution]:
    """Classes without an image."""
    support, classes = known.target.support, known.network.classes
    if support is None or classes is None:
        return
    names = tuple(_name(support, label) for label in range(classes) if label not in support.counts)
    if names:
        yield Caution(CautionKind.UNSEEN, names)


def _preprocessing(known: Known) -> Iterable[Caution]:
    """The first layer sees what it never saw, and another preprocessing would put that right."""
    support, unlabelled, labels = known.target.support, known.target.unlabelled, None
    if support is not None:
        chosen = torch.linspace(0, len(support) - 1, min(LOOKED_AT, len(support))).round().long()
        images = [support.images[at] for at in chosen.tolist()]
        labels = support.targets[chosen] if known.logits is not None else None
        from_files = support.files is not None
    elif unlabelled is not None:
        images, from_files = list(unlabelled.batch(torch.arange(min(LOOKED_AT, len(unlabelled))))), False
    else:
        return
    if images[0].ndim != 3:
        return
    raw = not from_files and all(image.min() >= 0 for image in images)  # tensors that nobody has normalised
    homes = find_homes(known.network, images, None if raw else known.preprocess, known.card.preprocess, labels)
    if homes is not None:
        yield Caution(CautionKind.PREPROCESSING, images=len(images), homes=homes)


def _left_out(known: Known) -> Iterable[Caution]:
    """Images of a kind that cannot be read here."""
    lists = [images.left_out for images in (known.target.support, known.target.unlabelled) if images is not None]
    files = [file for left in lists if left is not None for file in unreadable(left.files)]
    if files:
        yield Caution(CautionKind.LEFT_OUT, images=len(files), files=tuple(map(str, files)))


def step_cautions(steps: Preprocess | None, stored: Preprocess | None = None) -> Iterable[Caution]:
    """A crop larger than the resized image; steps that differ from those `stored` with a delta."""
    if steps is None:
        return
    if steps.resize is not None and steps.crop is not None and steps.resize < steps.crop:
        yield Caution(CautionKind.BORDERS, sizes=(steps.resize, steps.crop))
    if stored is not None and steps != stored:
        now, then = steps.to_json(), stored.to_json()
        pairs = tuple((f"{name} {now[name]}", str(then[name])) for name in now if now[name] != then[name])
        yield Caution(CautionKind.CONTRADICTED, pairs=pairs)


def _probabilities(known: Known) -> Iterable[Caution]:
    """The outputs are probabilities where logits are wanted."""
    logits = known.logits
    if logits is None or logits.shape[1] < 2:
        return
    if bool((logits >= 0).all()) and bool(((logits.sum(1) - 1).abs() < 1e-3).all()):
        yield Caution(CautionKind.PROBABILITIES, images=len(logits))


def card_cautions(card: Card) -> Iterable[Caution]:
    """Keys of the card that look like misspelt ones."""
    if card.misspelt:
        yield Caution(CautionKind.CARD_KEY, pairs=card.misspelt)


def _assumed(known: Known) -> Iterable[Caution]:
    """Nothing says in which order the outputs are, and folders were taken in alphabetical order."""
    support = known.target.support
    if support is None or support.files is None or known.named:
        return
    if (caution := assumed_order(support.classes)) is not None:
        yield caution


def assumed_order(classes: tuple[str, ...] | None) -> Caution | None:
    """That names were taken in alphabetical order; numbers are in their own."""
    if classes is None or classes == tuple(map(str, range(len(classes)))):
        return None
    return Caution(CautionKind.ASSUMED_ORDER, classes)


CHECKS: tuple[Callable[[Known], Iterable[Caution]], ...] = (
    _cycles,
    _uneven,
    _unseen,
    _preprocessing,
    lambda known: step_cautions(known.preprocess),
    _probabilities,
    lambda known: card_cautions(known.card),
    _left_out,
    _assumed,
)


def _name(support: Support, label: int) -> str:
    return support.classes[label] if support.classes and label < len(support.classes) else str(label)


def _refusal(caution: Caution, known: Known) -> str:
    names = None if known.target.support is None else known.target.support.classes
    what = "output" if names is None else "the network's"
    pairs = [f"'{label}' looks like {what} '{like}'" for label, like in caution.pairs[:NAMED]]
    rest = len(caution.pairs) - NAMED
    asked = "With these images' statistics it" if caution.half_way else "It"
    looks = ", ".join(pairs) + (f" and {rest} more" if rest > 0 else "")
    return (
        f"the labels do not fit the network's outputs: {looks}. {asked} has "
        f"{caution.before[0]} of {caution.images} images right as they are labelled, and {caution.after[0]} as they "
        "look: "
        f"{_remedy(caution, names, known.named)}, or pass --no-check (check=False) if the labels are right"
    )


def _remedy(caution: Caution, names: tuple[str, ...] | None, named: bool) -> str:
    if names is None:
        return "correct the labels"
    if named:
        return "rename the folders"
    order = {like: label for label, like in caution.pairs}
    if set(order) != set(order.values()):  # a class without images looks like nothing
        return "name the classes in the order of the outputs (--classes, classes=)"
    return (
        f"name the classes in the order of the outputs, --classes {','.join(order.get(name, name) for name in names)}"
    )


def believed(evidence: Evidence, cautions: Sequence[Caution]) -> Evidence:
    """The evidence in the light of what looks wrong.

    A preprocessing that looks wrong makes a shift of its own, which is left out. A class without an image that the
    adapted network predicts far less often than the source may lose as large a part of what the source has right.
    """
    wrong = any(caution.kind is CautionKind.PREPROCESSING for caution in cautions)
    lost = {name: share for caution in cautions for name, share in caution.lost.items()}
    right = 0.0 if evidence.gain is None else evidence.gain.before
    shift = None if wrong else evidence.shift
    return replace(evidence, shift=shift, forgotten=tuple(lost), forgone=right * sum(lost.values()))


@torch.no_grad()
def look_after(
    cautions: tuple[Caution, ...], network: Network, adapted: nn.Module, target: Target
) -> tuple[Caution, ...]:
    """The cautions, with how often both networks predict the classes without an image among unlabelled ones.

    The support cannot show it: there every such prediction is a mistake, and fewer of them are no loss.
    """
    support, unlabelled = target.support, target.unlabelled
    if support is None or unlabelled is None or len(network.output) != 1:
        return cautions
    if all(caution.kind is not CautionKind.UNSEEN for caution in cautions):
        return cautions
    places = torch.linspace(0, len(unlabelled) - 1, min(ASKED, len(unlabelled))).round().long()
    batches = [unlabelled.batch(part) for part in places.split(MINIBATCH)]
    labels = [label for label in range(network.output[0]) if label not in support.counts]
    before, after = (_tally(model, batches, labels) for model in (network.model, adapted))
    return tuple(
        replace(caution, images=len(places), before=before, after=after)
        if caution.kind is CautionKind.UNSEEN
        else caution
        for caution in cautions
    )


def _tally(model: nn.Module, batches: Iterable[Tensor], labels: Sequence[int]) -> tuple[int, ...]:
    """How often a network predicts each of these labels."""
    predicted = torch.cat([logits_of(model(like(model, images))).argmax(1).cpu() for images in batches])
    return tuple(int((predicted == label).sum()) for label in labels)

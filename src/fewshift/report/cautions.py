"""Cautions: what looked wrong before adaptation, as sentences, and as JSON knows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fewshift.images.formats import remedy
from fewshift.images.preprocess import Preprocess
from fewshift.models.cards import Card
from fewshift.report import prose
from fewshift.trust.at_home import Home
from fewshift.trust.sanity import Caution, CautionKind, assumed_order, card_cautions, step_cautions

NAMED = 6  # classes that a sentence names


class CautionWarning(UserWarning):
    """Something looks wrong about how a network is used."""


def plain(caution: Caution) -> dict[str, Any]:
    """Numbers and words, the sentence too; fields that say nothing are left out."""
    filled = {name: value for name, value in asdict(caution).items() if value}
    return filled | {"kind": caution.kind.value, "forgotten": list(caution.forgotten), "sentence": sentence(caution)}


def sentence(caution: Caution) -> str:
    """What looks wrong, and what to do, as a phrase."""
    return SENTENCES[caution.kind](caution)


def warn_about(card: Card, steps: Preprocess | None, stored: Preprocess | None) -> None:
    """A Python warning for what looks wrong about a card and about the steps, those `stored` with a delta included."""
    for caution in (*card_cautions(card), *step_cautions(steps, stored)):
        warnings.warn(sentence(caution), CautionWarning, stacklevel=4)


def order_taken(classes: tuple[str, ...]) -> str | None:
    """In which order names were taken for outputs that nothing names; None for numbers."""
    caution = assumed_order(classes)
    return None if caution is None else sentence(caution)


def _permuted(caution: Caution) -> str:
    looks = _listed([f"{label} looks like the network's {like}" for label, like in caution.pairs])
    right = f"{_right(caution)} as they look{_asked(caution)}"
    return f"the labels do not fit the network's outputs: {looks} ({right}): check the order of the classes"


def _swapped(caution: Caution) -> str:
    right = f"{_right(caution)} the other way{_asked(caution)}"
    if len(caution.pairs) == 2:
        return f"{caution.classes[0]} and {caution.classes[1]} look swapped ({right}): check their labels"
    label, like = caution.pairs[0]
    return f"the images of {label} look like the network's {like} ({right}): check their labels"


def _right(caution: Caution) -> str:
    return f"{caution.before[0]} of {caution.images} images are right as labelled, {caution.after[0]}"


def _asked(caution: Caution) -> str:
    return ", asked with these images' statistics" if caution.half_way else ""


def _uneven(caution: Caution) -> str:
    counts = _listed([f"{count} of {name}" for name, count in zip(caution.classes, caution.counts, strict=True)])
    return f"classes are unevenly labelled: {counts}: label more images of {caution.classes[-1]}"


def _unseen(caution: Caution) -> str:
    known = f"nothing is known about {_listed(caution.classes)}: the support has no image of {_it(caution.classes)}"
    if not caution.after:
        return f"{known}: label some, or give unlabelled images to see what becomes of {_it(caution.classes)}"
    rows = sorted(zip(caution.classes, caution.before, caution.after, strict=True), key=lambda row: row[2] - row[1])
    counts = _listed([f"{name} ({before} before, {after} after)" for name, before, after in rows])
    lost = f"; {_listed(caution.forgotten)} may be forgotten" if caution.forgotten else ""
    images = prose.counted(caution.images, "unlabelled image")
    return f"{known}; predictions among {images}: {counts}{lost}: label some"


def _preprocessing(caution: Caution) -> str:
    homes = caution.homes
    assert homes is not None  # this kind has some
    best = homes.better[0]
    others = f" (or {' or '.join(map(_named, homes.better[1:]))})" if homes.better[1:] else ""
    return (
        f"the preprocessing looks wrong: the network's first layer is {homes.distance:.1f} deviations from what it was "
        f"trained on, and {best.distance:.1f} with {_named(best)}{others}: pass {_scale(best)}"
    )


def _named(home: Home) -> str:
    return f"{home.name} preprocessing" if home.name.endswith("'s") else home.name


def _scale(home: Home) -> str:
    mean, std = (",".join(f"{value:.4g}" for value in values) for values in (home.mean, home.std))
    return f"--mean {mean} --std {std}" + (", channels from blue to red" if home.backwards else "")


def _borders(caution: Caution) -> str:
    assert caution.sizes is not None  # this kind has some
    resize, crop = caution.sizes
    return (
        f"images are resized to {resize} pixels and cropped to {crop}, so they get black borders: "
        f"pass a resize of at least {crop}"
    )


def _contradicted(caution: Caution) -> str:
    pairs = _listed([f"{step} (the delta was made with {stored})" for step, stored in caution.pairs])
    return f"the preprocessing is not the delta's: {pairs}: leave these options out"


def _card_key(caution: Caution) -> str:
    pairs = [f"'{key}' is not known, did you mean '{known}'?" for key, known in caution.pairs]
    return f"the network's card has keys that are ignored: {' '.join(pairs)}"


def _left_out(caution: Caution) -> str:
    files = [Path(file) for file in caution.files]
    were = "image was" if len(files) == 1 else "images were"
    return f"{len(files)} {were} left out: {_listed([file.name for file in files])}: {remedy(files)}"


SENTENCES: Mapping[CautionKind, Callable[[Caution], str]] = {
    CautionKind.PERMUTED: _permuted,
    CautionKind.SWAPPED: _swapped,
    CautionKind.UNEVEN: _uneven,
    CautionKind.UNSEEN: _unseen,
    CautionKind.PREPROCESSING: _preprocessing,
    CautionKind.BORDERS: _borders,
    CautionKind.CONTRADICTED: _contradicted,
    CautionKind.PROBABILITIES: lambda _: (
        "the network's outputs are probabilities and are taken for logits: leave out its last softmax"
    ),
    CautionKind.CARD_KEY: _card_key,
    CautionKind.LEFT_OUT: _left_out,
    CautionKind.ASSUMED_ORDER: lambda caution: (
        f"no card says in which order the network's outputs are: took the order {_listed(caution.classes)}"
    ),
}


def _it(classes: Sequence[str]) -> str:
    return "it" if len(classes) == 1 else "them"


def _listed(phrases: Sequence[str]) -> str:
    rest = len(phrases) - NAMED
    return ", ".join(phrases[:NAMED]) + (f" and {rest} more" if rest > 0 else "")

"""Flaws: what goes wrong with a support in practice. Supports are spoilt on purpose, to see whether anybody notices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fewshift.errors import FewshiftError

WRONG = 0.4  # of the labels
FIRST_SEED = 1000  # so that the flaw has nothing to do with the draw it spoils

Drawn = tuple[Tensor, Tensor]  # positions of images in their domain, and the labels they are given


def spoilt(drawn: Tensor, labels: Tensor, flaw: str, classes: int, seed: int) -> Drawn:
    """The images of a drawn support that are left, and the labels they are given; the same for the same seed."""
    if flaw not in FLAWS:
        raise FewshiftError(f"flaw={flaw!r} is unknown: choose one of {', '.join(FLAWS)}")
    return FLAWS[flaw](drawn, labels, classes, torch.Generator().manual_seed(FIRST_SEED + seed))


def _wrong_labels(drawn: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> Drawn:
    """Two images of five, at least one, get the label of another class."""
    count = max(1, round(WRONG * len(labels)))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    given = labels.clone()
    given[chosen] = (given[chosen] + torch.randint(1, classes, (count,), generator=generator)) % classes
    return drawn, given


def _class_missing(drawn: Tensor, labels: Tensor, _: int, generator: torch.Generator) -> Drawn:
    """One class has no image."""
    there = labels.unique()
    kept = labels != there[torch.randint(0, len(there), (1,), generator=generator)]
    return drawn[kept], labels[kept]


def _two_classes(drawn: Tensor, labels: Tensor, _: int, generator: torch.Generator) -> Drawn:
    """All classes but two have no image."""
    there = labels.unique()
    kept = torch.isin(labels, there[torch.randperm(len(there), generator=generator)[:2]])
    return drawn[kept], labels[kept]


FLAWS: dict[str, Callable[[Tensor, Tensor, int, torch.Generator], Drawn]] = {
    "wrong labels": _wrong_labels,
    "class missing": _class_missing,
    "two classes": _two_classes,
}

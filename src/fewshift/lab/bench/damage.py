"""Damage: mistakes that people make with a support, made on purpose to see whether the guard notices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fewshift.errors import FewshiftError

WRONG = 0.4  # of the labels
FIRST_SEED = 1000  # keeps the damage independent of the draw

Drawn = tuple[Tensor, Tensor]  # positions of images in their domain, and their labels


def damaged(drawn: Tensor, labels: Tensor, damage: str, classes: int, seed: int) -> Drawn:
    """The images and labels that are left of a support; the same for the same seed."""
    if damage not in DAMAGES:
        raise FewshiftError(f"damage={damage!r} is unknown: choose one of {', '.join(DAMAGES)}")
    return DAMAGES[damage](drawn, labels, classes, torch.Generator().manual_seed(FIRST_SEED + seed))


def _wrong_labels(drawn: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> Drawn:
    """Two images in five, at least one, get the label of another class."""
    count = max(1, round(WRONG * len(labels)))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[chosen] = (changed[chosen] + torch.randint(1, classes, (count,), generator=generator)) % classes
    return drawn, changed


def _class_missing(drawn: Tensor, labels: Tensor, _: int, generator: torch.Generator) -> Drawn:
    """One class loses its images."""
    present = labels.unique()
    kept = labels != present[torch.randint(0, len(present), (1,), generator=generator)]
    return drawn[kept], labels[kept]


def _two_classes(drawn: Tensor, labels: Tensor, _: int, generator: torch.Generator) -> Drawn:
    """All classes but two lose their images."""
    present = labels.unique()
    kept = torch.isin(labels, present[torch.randperm(len(present), generator=generator)[:2]])
    return drawn[kept], labels[kept]


DAMAGES: dict[str, Callable[[Tensor, Tensor, int, torch.Generator], Drawn]] = {
    "wrong labels": _wrong_labels,
    "class missing": _class_missing,
    "two classes": _two_classes,
}

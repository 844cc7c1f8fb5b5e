"""Which support images are held out together."""

from __future__ import annotations

import torch
from torch import Tensor

from fewshift.core.labels import random_folds
from fewshift.core.support import Support
from fewshift.errors import FewshiftError

FOLDS = 5  # few, for the number: each adapts with most of the images
REPEATED = 5  # adaptations with the whole support that a cross-validation may cost, about
SINGLE_FOLDS = 6  # where classes have a single image
INSIDE = ("cv", "loo")  # ways to hold out images of the support itself


def folds_of(support: Support, kind: str, seed: int) -> list[Tensor]:
    """The positions that are held out together, one tensor for each adaptation; none where a single image is all.

    "cv" is stratified and repeated, with up to five folds. Where a class has a single image no class can be both
    adapted to and held out, and the folds are any images. "loo" leaves out one image at a time.
    """
    total = len(support)
    if kind == "loo":
        return list(torch.arange(total).split(1)) if total > 1 else []
    if kind != "cv":
        raise FewshiftError(f"validate={kind!r} is unknown: choose 'cv', 'loo', None, or give labelled images")
    generator = torch.Generator().manual_seed(seed)
    if total < 2:
        return []
    if support.shots < 2:
        return random_folds(total, min(total, SINGLE_FOLDS), generator)
    parts = min(support.shots, FOLDS)
    repeats = max(1, REPEATED // (parts - 1)) if support.kind.stratified else 1
    return [fold for _ in range(repeats) for fold in support.kind.folds(support.labels, parts, generator)]

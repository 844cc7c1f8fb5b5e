"""Which labelled images make a support, drawn with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fewshift.core.randomness import checked_seed
from fewshift.errors import FewshiftError


def draw_support(
    labels: Sequence[int] | Tensor,
    k: int,
    seed: int,
    classes: Sequence[str] | None = None,
    *,
    skip_rare: bool = False,
) -> Tensor:
    """Indices of k images per class, uniformly without replacement.

    Each class has its own seeded order, and the first k are drawn. So the draw for k is part of the draw for k + 1, and
    does not depend on the other classes. A class with fewer images is an error, or is left out with `skip_rare`.
    """
    labels, seed = _class_numbers(labels), checked_seed(seed)
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise FewshiftError(f"k={k!r} is no number of images: give 1 or more")
    chosen = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        if len(members) < k:
            if skip_rare:
                continue
            name = f"'{classes[label]}'" if classes else str(label)
            raise FewshiftError(
                f"class {name} has {len(members)} images, {k} shots asked: "
                f"add {k - len(members)} or ask for {len(members)}"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + label)
        chosen.append(members[torch.randperm(len(members), generator=generator)[:k]])
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.long)


def _class_numbers(labels: Any) -> Tensor:
    """Class numbers (N,), from integers of any type."""
    try:
        numbers = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FewshiftError("labels are not integers: give class indices from 0") from error
    if numbers.ndim != 1:
        raise FewshiftError(f"labels have shape {tuple(numbers.shape)}: give one class index for each image")
    if numbers.is_floating_point() or numbers.is_complex():
        raise FewshiftError("labels are not integers: give class indices from 0")
    return numbers.long()


def others(indices: Tensor, total: int) -> Tensor:
    """The indices below `total` that are not in `indices`: those left for evaluation."""
    keep = torch.ones(total, dtype=torch.bool)
    keep[indices] = False
    return keep.nonzero().flatten()

"""The batches of an epoch: which images, in which order, augmented; and how many steps there are.

Everything follows from the seed and the number of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fewshift.core.layout import channels_last
from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Batch
from fewshift.lab.training.augment import Augment
from fewshift.lab.training.recipes import Recipe

if TYPE_CHECKING:
    from fewshift.lab.training.gather import Sources

BY_EPOCH = ("constant", "cosine")  # schedules that do not ask how many steps there are


@dataclass(frozen=True)
class Batches:
    """The batches of one epoch: read, augmented, normalised."""

    sources: Sources
    order: Sequence[Tensor]
    augment: Augment
    views: int = 1

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        steps = self.sources.preprocess
        for indices, (pixels, labels) in zip(self.order, self.sources.train.batches(self.order), strict=True):
            pairs = [self.augment(pixels, labels) for _ in range(self.views)]
            yield Batch(
                views=tuple(channels_last(steps.normalise(images)) for images, _ in pairs),
                labels=pairs[0][1].long(),
                domains=self.sources.domains[indices],
            )


def stage(seed: int, number: int, part: int = 0) -> int:
    """The seed of one stage of a training: 0 before the first epoch, then one for each; part 1 is for its order."""
    return int(np.random.SeedSequence([seed, number, part]).generate_state(1)[0])


def order(sources: Sources, recipe: Recipe, seed: int, epoch: int) -> list[Tensor]:
    """The batches of an epoch, as indices of training images."""
    generator = torch.Generator().manual_seed(stage(seed, epoch + 1, 1))
    if recipe.domains_per_batch is None:
        return shuffled(len(sources.train), recipe.batch_size, generator)
    return by_domain(sources.domains, recipe.batch_size, recipe.domains_per_batch, generator)


def count_steps(sources: Sources, recipe: Recipe, seed: int, epochs: int) -> int:
    """How many batches the first so many epochs have; only those by domain have to be made to be counted."""
    if recipe.domains_per_batch is None:
        return epochs * (len(sources.train) // recipe.batch_size)
    return sum(len(order(sources, recipe, seed, epoch)) for epoch in range(epochs))


def planned_steps(sources: Sources, recipe: Recipe, seed: int) -> int | None:
    """How many steps all epochs have; None where they would have to be made to be counted and no schedule asks."""
    if recipe.domains_per_batch is not None and recipe.schedule in BY_EPOCH:
        return None
    return count_steps(sources, recipe, seed, recipe.epochs)


def shuffled(total: int, size: int, generator: torch.Generator) -> list[Tensor]:
    """All images in random order; what does not fill a batch is left out."""
    order = torch.randperm(total, generator=generator)
    return list(order[: total // size * size].split(size))


def by_domain(domains: Tensor, size: int, together: int, generator: torch.Generator) -> list[Tensor]:
    """Batches of `together` random domains in equal parts, one domain after the other.

    The epoch ends when one of the domains just used has too few unused images left: a partial pass.
    """
    each = size // together
    left = [
        members[torch.randperm(len(members), generator=generator)]
        for members in ((domains == domain).nonzero().flatten() for domain in domains.unique())
    ]
    batches: list[Tensor] = []
    while True:
        chosen = torch.randperm(len(left), generator=generator)[:together].tolist()
        batches.append(torch.cat([left[domain][:each] for domain in chosen]))
        for domain in chosen:
            left[domain] = left[domain][each:]
        if any(len(left[domain]) < each for domain in chosen):
            return batches


def check_batches(domains: Tensor, size: int, together: int | None) -> None:
    """Raise one sentence when there is no such batch."""
    if len(domains) < size:
        raise FewshiftError(f"{len(domains)} training images make no batch of {size}: lower batch_size")
    if together is None:
        return
    counts = domains.unique(return_counts=True)[1].tolist()
    if len(counts) < together:
        raise FewshiftError(
            f"batches of {together} domains need as many sources, {len(counts)} given: "
            "add a source, or shuffle with domains_per_batch=none"
        )
    if size % together:
        raise FewshiftError(
            f"a batch of {size} cannot be shared equally by {together} domains: change batch_size or domains_per_batch"
        )
    if min(counts) < size // together:
        raise FewshiftError(
            f"a batch takes {size // together} images of a domain and one has {min(counts)}: lower batch_size"
        )

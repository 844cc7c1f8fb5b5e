"""The batches of an epoch: which images, in which order, augmented; and how many steps there are.

Everything follows from the seed and the number of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fewshift.core.network import channels_last
from fewshift.lab.training.algorithm import Batch
from fewshift.lab.training.augment import Augment
from fewshift.lab.training.batches import by_domain, shuffled
from fewshift.lab.training.gather import Sources
from fewshift.lab.training.recipes import Recipe

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

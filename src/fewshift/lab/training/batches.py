"""Which images a step sees: one epoch as a list of indices, decided by a generator alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fewshift.errors import FewshiftError


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

"""Randomness is an argument: seeds, random orders, and private random states."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fewshift.errors import FewshiftError


def minibatches(
    total: int, size: int, generator: torch.Generator, *, drop_last: bool = False, at_least: int = 1
) -> list[Tensor]:
    """One epoch: the positions below `total` in random order, cut into minibatches.

    `drop_last` drops an incomplete last minibatch, unless it is the only one. A last minibatch smaller than `at_least`
    joins the one before it: the batch statistics of a single image mean nothing.
    """
    order = torch.randperm(total, generator=generator)
    batches = list(order.split(size))
    if drop_last and len(batches) > 1 and len(batches[-1]) < size:
        batches.pop()
    if len(batches) > 1 and len(batches[-1]) < at_least:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def checked_seed(seed: int) -> int:
    """`seed`, or an error if it is not one."""
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise FewshiftError(f"seed={seed!r} is no seed: give a whole number from 0 to {2**32 - 1}")
    return seed


@contextmanager
def watched_randomness() -> Iterator[Callable[[], bool]]:
    """Restore the global random states of the CPU after the block; the value says whether they changed within it.

    States that nobody drew from are left alone: another thread may be using them.
    """
    tensor, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)

    def drawn() -> bool:
        now = np.random.get_state(legacy=False)
        same = numpy["state"]["pos"] == now["state"]["pos"] and np.array_equal(
            numpy["state"]["key"], now["state"]["key"]
        )
        return not (same and random.getstate() == python and torch.equal(torch.get_rng_state(), tensor))

    try:
        yield drawn
    finally:
        if drawn():
            torch.set_rng_state(tensor)
            random.setstate(python)
            np.random.set_state(numpy)


def draw() -> None:
    """Draw one number from each global random state."""
    torch.rand(1)
    random.random()
    np.random.random_sample()


_alone = threading.RLock()  # the global random states are one per process


@contextmanager
def private_randomness(seed: int) -> Iterator[torch.Generator]:
    """Everything random in the block follows `seed`; Python's, NumPy's and torch's global states are untouched.

    The generator serves our own choices. The seeded global states serve augmentations, which use no others. Blocks in
    several threads wait for each other.
    """
    checked_seed(seed)
    with _alone, torch.random.fork_rng():
        python, numpy = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield torch.Generator().manual_seed(seed)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

"""Two readings of LCCS: the paper's, and that of its released code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Variant:
    """Where the paper, read correctly, and the authors' released code differ."""

    steps: Literal["every minibatch", "last minibatch"]  # of an epoch, on which the optimiser takes a step
    drop_last: bool  # an incomplete minibatch is left out
    stale: bool  # inference uses the statistics from before the last step
    borrow_scale: bool  # the directions of sigma are scaled by the singular values of the means
    guard: bool  # layers that see one position per image, or reach sigma <= 0, are taken care of
    double: bool  # adaptation runs in float64


VARIANTS = {
    "paper": Variant("every minibatch", False, stale=False, borrow_scale=False, guard=True, double=False),
    "released": Variant("last minibatch", True, stale=True, borrow_scale=True, guard=False, double=True),
}

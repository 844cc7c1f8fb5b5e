"""The place that a network is adapted to: how far it is from what the network was trained on."""

from __future__ import annotations

from fewshift.core import _progress as progress
from fewshift.core.distance import look
from fewshift.core.network import Network
from fewshift.core.support import Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.trust.shift import Shift, judged

NEAR = 0.2  # source deviations: up to here the source's head is still right, and what few labels teach does harm


def shift_of(network: Network, target: Target) -> Shift | None:
    """How far the images of the place are from those of training; None where layers cannot tell."""
    if target.unlabelled is not None:
        images = target.unlabelled
    elif target.support is not None:
        images = Unlabelled(target.support.images)
    else:
        return None
    try:
        with progress.silent():
            return judged(look(network.model, images, network.head), total=len(images))
    except FewshiftError:
        return None

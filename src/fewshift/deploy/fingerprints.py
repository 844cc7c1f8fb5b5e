"""A word for a run: the networks and options that its results depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from fewshift.core.contents import content_of


def fingerprint(networks: Sequence[nn.Module], options: Any) -> str:
    """Sixteen hexadecimal digits that change with any weight and any option."""
    kinds = tuple(type(network).__name__ for network in networks)
    facts = hashlib.sha256(repr((kinds, options)).encode())
    for network in networks:
        for name, value in network.state_dict().items():
            facts.update(name.encode())
            for part in content_of(value, name):
                facts.update(part)
    return facts.hexdigest()[:16]

"""The source network as it is: the baseline of every comparison."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.core.copies import structural_copy
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network
from fewshift.core.support import Target


@dataclass(frozen=True)
class Source(Method):
    """No adaptation."""

    name: ClassVar[str] = "source"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.NOTHING
    changes: ClassVar[str] = "nothing"
    verified: ClassVar[str] = "`tests/methods/test_contract.py`: no tensor changes, bit for bit"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """A copy of the network in evaluation mode."""
        return Fitted(copy.deepcopy(structural_copy(network.model if isinstance(network, Network) else network)))

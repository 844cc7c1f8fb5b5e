"""Method: a frozen dataclass whose fields are its hyper-parameters, with one operation."""

from __future__ import annotations

import abc
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ClassVar

from torch import nn

from fewshift.network import Network
from fewshift.target import Target


class Needs(Enum):
    """What a method looks at."""

    NOTHING = "nothing"
    SUPPORT = "support"
    UNLABELLED = "unlabelled"
    STREAM = "stream"


@dataclass(frozen=True)
class Fitted:
    """A predictor, and what is worth knowing about how it came to be.

    `layers` tells per BatchNorm layer, `notes` about the whole; both hold plain numbers and words, ready for JSON.
    """

    predictor: nn.Module
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method(abc.ABC):
    """A way to adapt. Concrete methods are frozen dataclasses that define `fit` and the class variables."""

    name: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[Needs]
    changes: ClassVar[str]  # which tensors of the network may differ afterwards, in words
    returns: ClassVar[str] = "plain network"

    def adapt(self, network: nn.Module | Network, target: Target, seed: int = 0) -> nn.Module:
        """The predictor: images in, logits out. The given network stays as it is, bit for bit."""
        return self.fit(network, target, seed).predictor

    @abc.abstractmethod
    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """The predictor together with its diagnostics."""

    def settings(self) -> dict[str, Any]:
        """The fields, ready for JSON: `type(self)(**settings)` is the same method."""
        return asdict(self)

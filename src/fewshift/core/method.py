"""Method: a frozen dataclass whose fields are its hyper-parameters, with one operation."""

from __future__ import annotations

import abc
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, ClassVar, get_args, get_type_hints

from torch import nn

from fewshift.core.network import Network
from fewshift.core.support import Target
from fewshift.errors import FewshiftError
from fewshift.trust.gain import HeldOut, SupportLoss

WORDS = {
    int: "a whole number from 0",
    float: "a number from 0",
    str: "a word",
    bool: "true or false",
    type(None): "none",
}


class Needs(Enum):
    """What a method looks at."""

    NOTHING = "nothing"
    SUPPORT = "support"
    UNLABELLED = "unlabelled"
    EITHER = "support or unlabelled"
    STREAM = "stream"


@dataclass(frozen=True)
class Fitted:
    """A predictor, and what is worth knowing about how it came to be.

    `layers` tells per BatchNorm layer, `notes` about the whole; both hold plain numbers and words, ready for JSON.
    """

    predictor: nn.Module
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    held: HeldOut | None = None  # answers about support images by networks that had not seen them, if it made some
    support_loss: SupportLoss | None = None  # what blending statistics does to it, if it was looked at


@dataclass(frozen=True)
class Method(abc.ABC):
    """A way to adapt. Concrete methods are frozen dataclasses that define `fit` and the class variables."""

    name: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[Needs]
    changes: ClassVar[str]  # which tensors of the network may differ afterwards, in words
    returns: ClassVar[str] = "plain network"

    @property
    def plain(self) -> bool:
        """Whether the predictor is the source network with other weights, which a delta can carry."""
        return self.returns == "plain network"

    def adapt(self, network: nn.Module | Network, target: Target, seed: int = 0) -> nn.Module:
        """The predictor: images in, logits out. The given network stays as it is, bit for bit."""
        return self.fit(network, target, seed).predictor

    @abc.abstractmethod
    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """The predictor together with its diagnostics."""

    def __post_init__(self) -> None:
        """Every field has the kind of value its annotation says, and no number is negative or NaN."""
        for name, kinds in _kinds(type(self)).items():
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = type(value) in kinds or (float in kinds and number)
            if not fits or (number and not 0 <= value < float("inf")):
                words = " or ".join(WORDS[kind] for kind in kinds)
                raise FewshiftError(f"{name}={value!r} does not fit {self.name}: give {words}")
        self.check()

    def check(self) -> None:  # noqa: B027  (most methods have nothing to add)
        """What only this method knows about its fields; raises a FewshiftError."""

    def at_least(self, **least: int) -> None:
        """One sentence when a field is smaller than it can be."""
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise FewshiftError(f"{name}={getattr(self, name)} is too small: give at least {value}")

    def settings(self) -> dict[str, Any]:
        """The fields, ready for JSON: `type(self)(**settings)` is the same method."""
        return asdict(self)


@cache
def _kinds(method: type[Method]) -> dict[str, tuple[type, ...]]:
    """The types that each field may have."""
    hints = get_type_hints(method)
    return {it.name: get_args(hints[it.name]) or (hints[it.name],) for it in fields(method)}

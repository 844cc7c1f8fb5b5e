"""Method: a frozen dataclass whose fields are its hyper-parameters, with one operation."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor, nn

from fewshift.core._progress import Stage
from fewshift.core.hooks import without_clone
from fewshift.core.network import Network
from fewshift.core.settings import Settings
from fewshift.core.support import Support, Target


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
    `cautious`: nothing but statistics changed, and those by no more than a few images can tell from chance.
    """

    predictor: nn.Module
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    cautious: bool = False


@dataclass(frozen=True)
class Method(Settings, abc.ABC):
    """A way to adapt. Concrete methods are frozen dataclasses that define `fit` and the class variables."""

    name: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[Needs]
    changes: ClassVar[str]  # which tensors of the network may differ afterwards, in words
    verified: ClassVar[str]  # which test compares it with what, and how closely, in words
    returns: ClassVar[str] = "plain network"

    @property
    def plain(self) -> bool:
        """Whether the predictor is the source network with other weights, which a delta can carry."""
        return self.returns == "plain network"

    @property
    def cost(self) -> float:
        """How long a fit takes, roughly, in passes over the support: three for each epoch of gradient steps."""
        return 1.0 + 3.0 * getattr(self, "epochs", 0)

    def adapt(self, network: nn.Module | Network, target: Target, seed: int = 0) -> nn.Module:
        """The predictor: images in, logits out. The given network stays as it is, bit for bit."""
        predictor = self.fit(network, target, seed).predictor
        without_clone(predictor)
        return predictor

    @abc.abstractmethod
    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """The predictor together with its diagnostics."""

    def _misfit(self) -> str:
        return f"does not fit {self.name}"


@dataclass(frozen=True)
class Proposal:
    """One candidate of a composite method: how to fit it, and what it says of images that it was not fitted to."""

    name: str
    fit: Callable[[], Fitted]  # to all images
    held_out: Callable[[], list[Tensor]]  # for each image, (1, ...) logits of a fit without the image's fold
    small: bool = True  # whether it changes BatchNorm and the head alone


@dataclass(frozen=True)
class Proposals:
    """The candidates that fit a target, the preferred one first; they share what they can share."""

    candidates: Sequence[Proposal]
    folds: Sequence[Tensor]  # positions in the support that are held out together; none if nothing can be held out
    decisive: bool = True  # whether held-out images may overrule the preference


@dataclass(frozen=True)
class Composite(Method):
    """A method that has several candidates for an answer; `trust.choice` decides between them on held-out images."""

    @abc.abstractmethod
    def proposals(self, network: Network, target: Target, seed: int) -> Proposals:
        """What can be tried here."""

    def allows(self, proposal: Proposal) -> bool:
        """Whether the settings let this candidate be chosen."""
        return True

    def stages(self, support: Support) -> list[Stage]:
        """What is done one after the other, and what each costs relative to the others; none if that is not known."""
        return []

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """The preferred candidate: without held-out images there is nothing to choose by."""
        network = Network.of(network, target.some_images(self.name, "support images"))
        candidates = self.proposals(network, target, seed).candidates
        return next(candidate for candidate in candidates if self.allows(candidate)).fit()

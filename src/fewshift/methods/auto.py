"""auto: our best answer. It proposes candidates that share their stages; held-out images decide between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fewshift.core.method import Composite, Fitted, Needs
from fewshift.core.network import Network
from fewshift.core.support import Target
from fewshift.methods.lccs import LCCS

CLASSIFIERS = ("finetuned", "ncc", "source")  # the preferred one first


@dataclass(frozen=True)
class Auto(Composite):
    """LCCS's statistics with the classifier that does best on held-out images: finetuned, nearest centroids, or the
    source's.

    The source's classifier stays where a class has a single image or none: a class that is not adapted to would be
    forgotten by a new classifier, and no held-out image could tell.

    - epochs, lr: those of LCCS's gradient stage.
    """

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = LCCS.changes

    epochs: int = 10
    lr: float = 1e-3

    def candidates(self, network: Network, target: Target) -> tuple[str, ...]:
        """The classifiers that this support can teach."""
        support = target.need_support(self.name)
        complete = len(support.counts) == network.classes and support.shots > 1
        return CLASSIFIERS if complete and support.kind.centroids and network.head is not None else ("source",)

    def fits(self, network: Network, target: Target, seed: int) -> Callable[[str], Fitted]:
        """Statistics are learned once, whatever classifier stands on top."""
        lccs = LCCS(epochs=self.epochs, lr=self.lr)
        stages = lccs.stages(network, target, seed)
        return lambda classifier: lccs.with_classifier(stages, classifier)

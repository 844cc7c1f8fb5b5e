"""auto: our best answer. It proposes candidates that share their stages; held-out images decide between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from fewshift.core._progress import Stage
from fewshift.core.method import Composite, Needs, Proposal, Proposals
from fewshift.core.network import Network
from fewshift.core.support import FOLDS, Support, Target
from fewshift.methods._blending import GRID
from fewshift.methods._refining import Steps
from fewshift.methods.blend import Blend, BlendAll, fitted, refined

BLEND, HEAD, ALL = "blend", "blend + head", "blend + all"


@dataclass(frozen=True)
class Auto(Composite):
    """The best of a blend of statistics, a new head on it, and its last layers trained: held-out images decide.

    - A blend: the share v of the target's statistics, the same in all layers.
    - A new head needs an image of every class: a class that is not adapted to would be forgotten, and no held-out image
      could tell.
    - The last layers are trained from two images per class on, if the head leaves something to learn and the network's
      forward lets gradients through. They make a large delta.

    Unlabelled images share in the statistics and in the head, unless they lack classes that the support has. A loss of
    one's own is that of the gradient steps; v and the head go by cross-entropy.

    `fewshift.adapt` and `fewshift bench` hand over the candidate that held-out images choose. `Auto().adapt`, which has
    no judge, hands over the first that the support allows.

    - size: "any", or "small" = BatchNorm and head alone, a delta of kilobytes.
    - prior: that of `blend`; epochs, lr: those of `blend-all`.
    """

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "everything; with size='small' BatchNorm and the head"
    verified: ClassVar[str] = (
        "`tests/methods/test_blend.py`: what it hands over is what the candidate that it names gives, to 1e-5; it "
        "has no original"
    )

    size: str = "any"
    prior: float = Blend.prior
    epochs: int = BlendAll.epochs
    lr: float = BlendAll.lr

    def check(self) -> None:
        """A known size."""
        self.one_of(size=("any", "small"))

    def allows(self, proposal: Proposal) -> bool:
        """Whether the delta may be as large as that."""
        return self.size == "any" or proposal.small

    @property
    def cost(self) -> float:
        """The statistics are read about three times for each v, and the last layers trained once for each fold."""
        return 3.0 * (len(GRID) + FOLDS * self.epochs)

    def stages(self, support: Support) -> list[Stage]:
        """An epoch without a fold takes about as long as the statistics under one v."""
        last = FOLDS * self.epochs if support.shots > 1 else 0
        return [Stage("statistics", len(GRID)), Stage("last layers", last), Stage("candidates", 1)]

    def proposals(self, network: Network, target: Target, seed: int) -> Proposals:
        """The blend, and what this support can teach on top of it."""
        steps = Steps(self.epochs, self.lr, target.cost, seed)
        refinement, used = refined(network, target, self.name, self.prior, steps)
        blend = refinement.blend

        def proposal(
            name: str, tensors: Callable[[], dict[str, Tensor]], held_out: Callable[[], list[Tensor]]
        ) -> Proposal:
            notes = used | (refinement.head_notes if name == HEAD else {})
            return Proposal(name, lambda: fitted(blend, tensors(), notes), held_out, small=name != ALL)

        by_blend = partial(blend.held_out, refinement.folds)
        candidates = [proposal(BLEND, dict, by_blend)]
        several = blend.support.shots > 1
        if refinement.head is not None:
            # a single image cannot be held out and still give its class a row: the blend that the head rests on answers
            head = proposal(HEAD, refinement.head_tensors, refinement.head_held_out if several else by_blend)
            candidates.insert(0, head)
            if several and network.learns and refinement.leaves_something:
                candidates.insert(0, proposal(ALL, refinement.tuned_tensors, refinement.tuned_held_out))
        return Proposals(candidates, refinement.folds, decisive=several)

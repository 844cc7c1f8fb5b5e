"""Switchable Whitening: shallow features whitened by the batch, by the image, or by something in between.

Pan et al., "Switchable Whitening for Deep Representation Learning", ICCV 2019; placed as in the comparison that the
paper quotes (Choi et al., CVPR 2021). Statistics are mixed, not whitening matrices, and how much of each is learned,
for means and for covariances apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift import normalisation
from fewshift.errors import FewshiftError
from fewshift.sources.algorithm import Algorithm, Learner, Task
from fewshift.sources.placement import normalise_at
from fewshift.sources.stages import AUTO


@dataclass(frozen=True)
class SwitchableWhitening(Algorithm):
    """Plain training of a network that whitens shallow features.

    - group: so many channels are whitened together; it divides the channels of every layer.
    - iterations: of Newton's; more whiten better and cost more.
    - decay: running = decay * running + (1 - decay) * batch; short trainings want less than 0.99.
    - tied: one mixture for means and covariances.
    - layers: where, with commas between: a BatchNorm layer is replaced, a stage or block whitened after its last
      addition; auto is the stem's BatchNorm and the first two of a network's four stages.
    """

    name: ClassVar[str] = "switchable-whitening"
    paper: ClassVar[str] = "Pan et al., ICCV 2019"

    group: int = 16
    iterations: int = 5
    decay: float = 0.99
    tied: bool = False
    layers: str = AUTO

    def check(self) -> None:
        """A group, and a share that is kept."""
        self.at_least(group=1)
        if self.decay > 1:
            raise FewshiftError(f"decay={self.decay} is no share: give a number from 0 to 1")

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the layers in; the stem's begins with what the BatchNorm layer in its place has learned."""
        return normalise_at(
            model,
            self.layers,
            lambda channels: normalisation.SwitchableWhitening(
                channels, self.group, self.iterations, self.decay, self.tied
            ),
        )

    def learner(self, model: nn.Module, task: Task) -> Learner:
        """Nothing is added to the training."""
        return Learner(model, task)

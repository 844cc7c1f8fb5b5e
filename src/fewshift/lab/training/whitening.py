"""What the whitening algorithms share: groups of channels, Newton's iterations, and where the layers stand."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import nn

from fewshift.core import normalisation
from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Learner, Task
from fewshift.lab.training.placement import normalise_at
from fewshift.lab.training.stages import AUTO


@dataclass(frozen=True)
class WhiteningAlgorithm(Algorithm):
    """Plain training of a network that whitens shallow features.

    - group: so many channels are whitened together; it divides the channels of every layer.
    - iterations: of Newton's; more whiten better and cost more.
    - decay: running = decay * running + (1 - decay) * batch.
    - layers: where, with commas between: a BatchNorm layer is replaced, a stage or block whitened after its last
      addition; auto is the stem's BatchNorm and the first two of a network's four stages.
    """

    group: int = 16
    iterations: int = 5
    decay: float = 0.9
    layers: str = AUTO

    @abc.abstractmethod
    def layer(self, channels: int) -> normalisation.Whitening:
        """A whitening layer for so many channels."""

    def check(self) -> None:
        """A group, and a share that is kept."""
        self.at_least(group=1)
        if self.decay > 1:
            raise FewshiftError(f"decay={self.decay} is no share: give a number from 0 to 1")

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the layers in; the stem's begins with what the BatchNorm layer in its place has learned."""
        return normalise_at(model, self.layers, self.layer)

    def learner(self, model: nn.Module, task: Task) -> Learner:
        """Nothing is added to the training."""
        return Learner(model, task)

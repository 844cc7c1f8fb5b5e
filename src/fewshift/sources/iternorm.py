"""IterNorm: shallow features whitened by the batch.

Huang et al., "Iterative Normalization: Beyond Standardization towards Efficient Whitening", CVPR 2019. The whitening
matrix is found by a few of Newton's iterations. Where the layers stand in the comparison that the paper quotes was
never published: here they stand where those of the other whitening methods do.
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
class IterNorm(Algorithm):
    """Plain training of a network that whitens shallow features by the batch, at test by the running matrix.

    - group: so many channels are whitened together; it divides the channels of every layer.
    - iterations: of Newton's; more whiten better and cost more.
    - decay: running = decay * running + (1 - decay) * batch.
    - layers: where, with commas between: a BatchNorm layer is replaced, a stage or block whitened after its last
      addition; auto is the stem's BatchNorm and the first two of a network's four stages.
    """

    name: ClassVar[str] = "iternorm"
    paper: ClassVar[str] = "Huang et al., CVPR 2019"

    group: int = 64
    iterations: int = 5
    decay: float = 0.9
    layers: str = AUTO

    def check(self) -> None:
        """A group, and a share that is kept."""
        self.at_least(group=1)
        if self.decay > 1:
            raise FewshiftError(f"decay={self.decay} is no share: give a number from 0 to 1")

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the layers in; the stem's begins as the BatchNorm layer in its place."""
        return normalise_at(
            model,
            self.layers,
            lambda channels: normalisation.IterNorm(channels, self.group, self.iterations, self.decay),
        )

    def learner(self, model: nn.Module, task: Task) -> Learner:
        """Nothing is added to the training."""
        return Learner(model, task)

"""IBN-Net: instance normalisation in shallow layers, beside BatchNorm.

Pan et al., "Two at Once: Enhancing Learning and Generalization Capacities via IBN-Net", ECCV 2018. How an image looks
is mostly in the moments of shallow features, which instance normalisation takes away; what tells classes apart is left
to BatchNorm. The network begins with the weights it is given: there is no training on ImageNet with these layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.core.normalisation import InstanceBatchNorm, InstanceNorm
from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Learner, Task
from fewshift.lab.training.placement import check_sizes, first_norms, normalise_at, replace_batchnorm
from fewshift.lab.training.stages import AUTO

STAGES = (1, 2, 3)  # of variant a
VARIANTS = ("a", "b")
SHARE = 0.5


@dataclass(frozen=True)
class IBN(Algorithm):
    """Plain training of a network with some instance normalisation.

    - variant: a normalises part of the channels by image, after the first convolution of every block; b normalises all
      channels by image, in the stem and after the addition at the end of the first two stages.
    - share: of the channels that variant a normalises by image.
    - layers: where, with commas between: stages, blocks or BatchNorm layers; auto is, for a, the first three of a
      network's four stages; for b, the stem's BatchNorm and the first two stages.
    """

    name: ClassVar[str] = "ibn"
    paper: ClassVar[str] = "Pan et al., ECCV 2018"

    variant: str = "b"
    share: float = SHARE
    layers: str = AUTO

    def check(self) -> None:
        """A variant that exists, and a share of the channels."""
        self.one_of(variant=VARIANTS)
        if not 0 < self.share < 1:
            raise FewshiftError(f"share={self.share} leaves one side empty: give a number between 0 and 1")
        if self.variant == "b" and self.share != SHARE:
            raise FewshiftError("share is of variant a, and variant b normalises all channels: leave it out")

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the layers in; they begin with what the BatchNorm layers in their place have learned."""
        if self.variant == "b":
            return normalise_at(model, self.layers, InstanceNorm)
        for name in list(first_norms(model, self.layers, STAGES)):
            replace_batchnorm(model, name, lambda channels: InstanceBatchNorm(channels, self.share))
        return model

    def learner(self, model: nn.Module, task: Task) -> Learner:
        """Nothing is added to the training."""
        check_sizes(model, task)
        return Learner(model, task)

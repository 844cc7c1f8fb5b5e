"""IBN-Net: instance normalisation in shallow layers, beside BatchNorm.

Pan et al., "Two at Once: Enhancing Learning and Generalization Capacities via IBN-Net", ECCV 2018. How an image looks
is mostly in the moments of shallow features, which instance normalisation takes away; what tells classes apart is left
to BatchNorm. The network begins with the weights it is given: there is no training on ImageNet with these layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.lab.training.algorithm import Algorithm, Task, Trainee
from fewshift.models.layers.changes import IBNChange
from fewshift.models.layers.placement import check_sizes


@dataclass(frozen=True)
class IBN(IBNChange, Algorithm):
    """Plain training of a network with some instance normalisation."""

    name: ClassVar[str] = "ibn"
    paper: ClassVar[str] = "Pan et al., ECCV 2018"

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        """Nothing is added to the training."""
        check_sizes(model, task.shape)
        return Trainee(model, task)

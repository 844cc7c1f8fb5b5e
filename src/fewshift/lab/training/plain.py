"""Algorithms that add no loss: plain supervised training, of the network as it is or with other normalisation layers.

A network with other layers begins with the weights it is given: there is no training on ImageNet with these layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.lab.training.algorithm import Algorithm, Task, Trainee
from fewshift.models.layers.changes import IBNChange, IterNormChange, SwitchableWhiteningChange
from fewshift.models.layers.placement import check_sizes


@dataclass(frozen=True)
class ERM(Algorithm):
    """The mean loss over all source images, whichever domain they are from.

    Empirical risk minimisation: Vapnik, "Principles of Risk Minimization for Learning Theory", NeurIPS 1991; for source
    networks as in Gulrajani and Lopez-Paz, "In Search of Lost Domain Generalization", ICLR 2021.
    """

    name: ClassVar[str] = "erm"
    paper: ClassVar[str] = "Vapnik, NeurIPS 1991"
    verified: ClassVar[str] = (
        "`tests/lab/training/test_mixstyle_naive.py`: every weight after every step, and the statistics at the end, "
        "against the formulas, to 1e-9"
    )


@dataclass(frozen=True)
class IBN(IBNChange, Algorithm):
    """Plain training of a network with some instance normalisation.

    Pan et al., "Two at Once: Enhancing Learning and Generalization Capacities via IBN-Net", ECCV 2018. How an image
    looks is mostly in the moments of shallow features, which instance normalisation takes away; what tells classes
    apart is left to BatchNorm.
    """

    name: ClassVar[str] = "ibn"
    paper: ClassVar[str] = "Pan et al., ECCV 2018"
    verified: ClassVar[str] = (
        "`tests/core/test_normalisation.py`: the layer and its gradients against PyTorch's own; "
        "`tests/lab/training/test_ibn.py`: its places in the networks of libraries"
    )

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        """Nothing is added to the training."""
        check_sizes(model, task.shape)
        return Trainee(model, task)


@dataclass(frozen=True)
class IterNorm(IterNormChange, Algorithm):
    """Whitens by the batch, at test by the running matrix.

    Huang et al., "Iterative Normalization: Beyond Standardization towards Efficient Whitening", CVPR 2019. Where the
    layers stand in the comparison that the paper quotes was never published: here they stand where those of the other
    whitening methods do.
    """

    name: ClassVar[str] = "iternorm"
    paper: ClassVar[str] = "Huang et al., CVPR 2019"
    verified: ClassVar[str] = (
        "`tests/core/test_normalisation.py`: the layer and its gradients against the formulas, to 1e-6; where it "
        "stands in a network was never published"
    )


@dataclass(frozen=True)
class SwitchableWhitening(SwitchableWhiteningChange, Algorithm):
    """Whitens by statistics of batch and image, mixed; short trainings want a decay of less than 0.99.

    Pan et al., "Switchable Whitening for Deep Representation Learning", ICCV 2019; placed as in the comparison that the
    paper quotes (Choi et al., CVPR 2021). How much of each counts is learned, for means and for covariances apart.
    """

    name: ClassVar[str] = "switchable-whitening"
    paper: ClassVar[str] = "Pan et al., ICCV 2019"
    verified: ClassVar[str] = (
        "`tests/core/test_normalisation.py`: the layer and its gradients against the formulas, to 1e-6; "
        "`tests/lab/training/test_ibn.py`: its places in the networks of libraries"
    )

"""Fine-tuning parts of the network on the support: BatchNorm, head, feature extractor, or all with weight decay (L2).

The settings are those that the LCCS paper gives for all of them: rate 0.001, minibatches of 32, ten epochs; SGD with
momentum and decay 0.0004, but Adam without decay for BatchNorm. Each method has its own BatchNorm policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.core.adaptable import refuse_unadaptable
from fewshift.core.method import Fitted
from fewshift.core.network import Network
from fewshift.core.support import Target
from fewshift.methods._finetuning import FineTuning, SGDFineTuning, head_parameters, prepare, tune, tune_head


@dataclass(frozen=True)
class FinetuneBN(FineTuning):
    """Weight and bias of every BatchNorm layer by Adam; by default with the statistics of the support."""

    name: ClassVar[str] = "finetune-bn"
    changes: ClassVar[str] = "BatchNorm weight, bias and statistics"
    verified: ClassVar[str] = (
        "`tests/methods/test_finetuning_naive.py`: every weight after every step of Adam, and the statistics at the "
        "end, against the formulas, to 1e-9"
    )

    bn: str = "support"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train, then take the statistics that belong to the final weights."""
        network, support = prepare(network, target, self.name)
        refuse_unadaptable(network)
        return tune(network, support, target, "bn", self, seed)


@dataclass(frozen=True)
class FinetuneHead(SGDFineTuning):
    """The classifier alone, starting from the source's, on features of the unchanged body."""

    name: ClassVar[str] = "finetune-head"
    changes: ClassVar[str] = "the head"
    verified: ClassVar[str] = (
        "`tests/methods/test_finetuning_naive.py`: every weight after every step, against the formulas, to 1e-9"
    )

    bn: str = "source_frozen"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train the head; without augmentation the body computes its features once."""
        network, support = prepare(network, target, self.name)
        predictor, losses = tune_head(network, support, target, self, seed)
        parameters = sum(tensor.numel() for tensor in head_parameters(network, predictor))
        return Fitted(predictor, notes={"support_loss": losses, "parameters": parameters, "bn": self.bn})


@dataclass(frozen=True)
class FinetuneFeatures(SGDFineTuning):
    """Everything but the classifier, by SGD with decay; BatchNorm in training mode."""

    name: ClassVar[str] = "finetune-features"
    changes: ClassVar[str] = "everything but the head"
    verified: ClassVar[str] = (
        "`tests/methods/test_finetuning_naive.py`: every weight after every step, and the statistics at the end, "
        "against the formulas, to 1e-9"
    )

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train the body under the frozen source head."""
        return tune(*prepare(network, target, self.name), target, "body", self, seed)


@dataclass(frozen=True)
class L2(SGDFineTuning):
    """The whole network by SGD, decayed towards zero: cross-entropy + (weight_decay / 2) |w|^2."""

    name: ClassVar[str] = "l2"
    changes: ClassVar[str] = "everything"
    verified: ClassVar[str] = (
        "`tests/methods/test_finetuning_naive.py`: every weight after every step, and the statistics at the end, "
        "against the formulas, to 1e-9"
    )

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train everything."""
        return tune(*prepare(network, target, self.name), target, "all", self, seed)

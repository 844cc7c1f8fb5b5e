"""Fine-tuning parts of the network on the support: BatchNorm, head, feature extractor, or all with weight decay (L2).

The settings are those the LCCS paper gives for all of them: rate 0.001, minibatches of 32, ten epochs; SGD with
momentum and decay 0.0004, but Adam without decay for BatchNorm. Where the statistics come from is a field of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, refuse_unadaptable
from fewshift.core.support import Target
from fewshift.methods._finetuning import (
    FineTuning,
    adam,
    affine_parameters,
    all_parameters,
    body_parameters,
    check_policy,
    head_parameters,
    prepare,
    tune,
)


@dataclass(frozen=True)
class FinetuneBN(Method):
    """Weight and bias of every BatchNorm layer by Adam; by default with the statistics of the support."""

    name: ClassVar[str] = "finetune-bn"
    paper: ClassVar[str] = "baseline of Zhang et al., IJCAI 2022"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "BatchNorm weight, bias and statistics"

    bn: str = "support"
    epochs: int = 10
    lr: float = 1e-3
    batch_size: int | None = None

    def check(self) -> None:
        """Only settings that make sense."""
        check_policy(self.bn)
        self.at_least(batch_size=1)

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train, then take the statistics that belong to the final weights."""
        network, support = prepare(network, target, self.name)
        refuse_unadaptable(network)
        return tune(
            network,
            support,
            target,
            affine_parameters,
            adam(self.lr),
            bn=self.bn,
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=seed,
        )


@dataclass(frozen=True)
class FinetuneHead(FineTuning):
    """The classifier alone, starting from the source's, on features of the untouched body."""

    name: ClassVar[str] = "finetune-head"
    changes: ClassVar[str] = "the head"

    bn: str = "source_frozen"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train the head; without augmentation the body computes its features once."""
        network, support = prepare(network, target, self.name)
        predictor, losses = self.train_head(network, support, target, seed)
        parameters = sum(tensor.numel() for tensor in head_parameters(network, predictor))
        return Fitted(predictor, notes={"support_loss": losses, "parameters": parameters, "bn": self.bn})


@dataclass(frozen=True)
class FinetuneFeatures(FineTuning):
    """Everything but the classifier, by SGD with decay; BatchNorm in training mode."""

    name: ClassVar[str] = "finetune-features"
    changes: ClassVar[str] = "everything but the head"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train the body under the frozen source head."""
        network, support = prepare(network, target, self.name)
        return self.train(network, support, target, seed, body_parameters)


@dataclass(frozen=True)
class L2(FineTuning):
    """The whole network by SGD, decayed towards zero: cross-entropy + (weight_decay / 2) |w|^2."""

    name: ClassVar[str] = "l2"
    changes: ClassVar[str] = "everything"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train everything."""
        network, support = prepare(network, target, self.name)
        return self.train(network, support, target, seed, all_parameters)

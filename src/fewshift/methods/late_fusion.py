"""Late fusion: average the scores of the source classifier and of one trained on the few target images.

Hoffman et al., "One-Shot Adaptation of Supervised Deep Convolutional Models", 2013.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fewshift.core.heads import gives_output
from fewshift.core.method import Fitted
from fewshift.core.network import Network, head_inputs, linear, logits_of
from fewshift.core.support import Target
from fewshift.errors import FewshiftError
from fewshift.methods._finetuning import SGDFineTuning, prepare, tune_head


@dataclass(frozen=True)
class LateFusion(SGDFineTuning):
    """weight * source score + (1 - weight) * target score, both heads on the same features.

    Scores are softmax probabilities, and the predictor has both heads. With scores="logits" the average is one linear
    layer, and the predictor a plain network. The target head starts from the source's ("finetuned") or from scratch
    ("fresh").
    """

    name: ClassVar[str] = "late-fusion"
    paper: ClassVar[str] = "Hoffman et al., 2013"
    changes: ClassVar[str] = "a second head is added; the head, if scores are logits"
    returns: ClassVar[str] = "network with both heads"
    verified: ClassVar[str] = (
        "`tests/methods/test_finetuning_naive.py`: the second head after every step, and the blended probabilities, "
        "against the formulas, to 1e-9"
    )

    bn: str = "source_frozen"
    weight: float = 0.5
    scores: str = "probabilities"
    target_head: str = "finetuned"

    def check(self) -> None:
        """A policy that keeps the features, a weight in [0, 1], known words."""
        super().check()
        if self.bn == "train_running":
            raise FewshiftError(
                "late fusion needs both heads on the same features: use bn='source_frozen' or 'support'"
            )
        if not 0 <= self.weight <= 1:
            raise FewshiftError(f"weight={self.weight} is not a blend: give a number from 0 (target) to 1 (source)")
        self.one_of(scores=("probabilities", "logits"), target_head=("finetuned", "fresh"))

    @property
    def plain(self) -> bool:
        """Whether both heads become one linear layer."""
        return self.scores == "logits"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train the second head, then fuse."""
        network, support = prepare(network, target, self.name)
        predictor, losses = tune_head(network, support, target, self, seed, fresh=self.target_head == "fresh")
        head = network.need_head(self.name)
        if not gives_output(network.model, head, support.chunks(2)[0][0]):
            raise FewshiftError(
                f"{self.name} blends the scores of two heads, but more layers follow '{head}': use lp-ft"
            )
        source, tuned = linear(network.model, head), linear(predictor, head)
        notes = {"support_loss": losses, "bn": self.bn}
        if self.scores == "probabilities":
            body = network.with_tensors({}) if self.bn == "source_frozen" else copy.deepcopy(predictor)
            linear(body, head).load_state_dict(source.state_dict())
            return Fitted(BothHeads(body, head, tuned, self.weight), notes=notes)
        with torch.no_grad():
            for name, tensor in tuned.named_parameters():
                tensor.lerp_(source.get_parameter(name).to(tensor), self.weight)
        return Fitted(predictor, notes=notes)


class BothHeads(nn.Module):
    """One body, two heads; the logits are the logarithms of the blended probabilities."""

    def __init__(self, network: nn.Module, head: str, second: nn.Module, weight: float) -> None:
        super().__init__()
        self.network, self.second = network, copy.deepcopy(second)
        self._head, self._weight = head, weight
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """log(weight p_source + (1 - weight) p_target)."""
        with head_inputs(self.network, self._head) as seen:
            first = logits_of(self.network(images))
        second = self.second(seen[-1]).reshape(first.shape)
        blend = self._weight * first.softmax(1) + (1 - self._weight) * second.softmax(1)
        return torch.log(blend.clamp(min=torch.finfo(blend.dtype).tiny))

"""Tent: minimise the entropy of predictions, online, over BatchNorm's weight and bias.

Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fewshift.core.adaptable import refuse_unadaptable, refuse_without_gradients
from fewshift.core.loop import descend, step
from fewshift.core.losses import mean_entropy
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, batchnorm, like, logits_of
from fewshift.core.sharing import each_once
from fewshift.core.support import Target
from fewshift.errors import FewshiftError
from fewshift.methods._finetuning import in_float32
from fewshift.methods._streaming import refuse_empty, use_each_batch

RECENT = 256  # latest predictions, by which a collapse is recognised
COLLAPSED = 0.95  # share of them that fall into one class


@dataclass(frozen=True)
class Tent(Method):
    """Batch statistics, and one gradient step on weight and bias of 2d BatchNorm layers for every batch.

    Predictions come from the forward pass before the step; with several `steps`, from the last forward pass. The next
    batch starts from the weights of this one, unless `episodic`. Entropy minimisation may collapse into one class;
    the predictor's `record` shows it.
    """

    name: ClassVar[str] = "tent"
    paper: ClassVar[str] = "Wang et al., ICLR 2021"
    needs: ClassVar[Needs] = Needs.STREAM
    changes: ClassVar[str] = "BatchNorm weight and bias, batch after batch"
    returns: ClassVar[str] = "streaming predictor"
    verified: ClassVar[str] = (
        "`tests/methods/test_tent_naive.py`: every answer of a stream, and weight and bias after every batch, "
        "against the formulas with Adam and with Nesterov momentum, to 1e-9"
    )

    optimizer: str = "adam"
    lr: float = 1e-3
    steps: int = 1
    episodic: bool = False

    def check(self) -> None:
        """A known optimiser, and at least one step."""
        self.one_of(optimizer=tuple(OPTIMIZERS))
        self.at_least(steps=1)

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """A predictor that has not seen a batch yet."""
        network = Network.of(network, target.some_images(self.name, "a stream of batches"))
        refuse_unadaptable(network)
        refuse_without_gradients(network)
        return Fitted(EntropyMinimising(network, self))


OPTIMIZERS = {
    "adam": lambda tensors, lr: torch.optim.Adam(tensors, lr=lr),
    "sgd": lambda tensors, lr: torch.optim.SGD(tensors, lr=lr, momentum=0.9, nesterov=True),
}


class EntropyMinimising(nn.Module):
    """The predictor of Tent. Its state is its own: another `adapt` starts anew."""

    def __init__(self, network: Network, settings: Tent) -> None:
        super().__init__()
        self.model = in_float32(network.with_tensors({}).requires_grad_(False))
        use_each_batch(network, self.model)
        others = (nn.BatchNorm1d, nn.BatchNorm3d)
        affine = [layer.name for layer in network.layers if layer.affine]
        self._names = [name for name in affine if not isinstance(batchnorm(network.model, name), others)]
        if not self._names:
            raise FewshiftError(
                "tent needs 2d BatchNorm layers with weight and bias, and there are none: use testtime-bn"
            )
        self._settings = settings
        self._start_again()
        self._source = self._snapshot()
        self._recent: deque[int] = deque(maxlen=RECENT)
        self.eval()
        self.record: dict[str, Any] = {"batches": 0, "entropy": [], "diverged_at": [], "collapsed": False}

    def forward(self, images: Tensor) -> Tensor:
        """Logits of this batch, then a step towards less entropy."""
        refuse_empty(images)
        if not torch.isfinite(images).all():
            raise FewshiftError("an image of this batch contains NaN or infinity: check its preprocessing")
        with torch.inference_mode(False):  # gradients are needed even if the caller is in inference mode
            batch = like(self.model, images.clone())
            if self._settings.episodic:
                self._restore(self._source)
            for _ in range(self._settings.steps):
                logits = self._step(batch)
            self._note(logits)
        return logits.to(images.dtype)

    def train(self, mode: bool = True) -> EntropyMinimising:
        """Stays in evaluation mode: BatchNorm follows its batches anyway, and dropout must stay off."""
        del mode
        return super().train(False)

    def _step(self, images: Tensor) -> Tensor:
        with torch.enable_grad():  # also if the caller predicts under no_grad
            logits = logits_of(self.model(images))
            entropy = mean_entropy(logits, logits)
        if not torch.isfinite(entropy):
            return self._recover(images)
        self._sound = self._snapshot()
        self._optimizer.zero_grad(set_to_none=True)
        descend(entropy)
        step(self._optimizer)
        return logits.detach()

    def _recover(self, images: Tensor) -> Tensor:
        """After a divergence: the last weights with finite logits, a fresh optimiser, an entry in the record."""
        self.record["diverged_at"].append(self.record["batches"])
        self._restore(self._sound)
        with torch.no_grad():
            logits = logits_of(self.model(images))
        if not torch.isfinite(logits).all():
            raise FewshiftError("the logits of this batch are NaN even before adaptation: check its images")
        return logits

    def _start_again(self) -> None:
        tensors = [tensor.requires_grad_(True) for tensor in self._affine()]
        self._optimizer: torch.optim.Optimizer = OPTIMIZERS[self._settings.optimizer](tensors, self._settings.lr)
        self._sound = self._snapshot()

    def _affine(self) -> list[Tensor]:
        layers = [batchnorm(self.model, name) for name in self._names]
        return each_once(tensor for layer in layers for tensor in (layer.weight, layer.bias))

    def _snapshot(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self._affine()]

    def _restore(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            for mine, kept in zip(self._affine(), tensors, strict=True):
                mine.copy_(kept)
        self._start_again()

    def _note(self, logits: Tensor) -> None:
        predicted = logits.argmax(1).flatten()  # with pixel labels, a sample from everywhere
        self._recent.extend(predicted[:: -(-len(predicted) // RECENT)].tolist())
        self.record["batches"] += 1
        self.record["entropy"].append(float(mean_entropy(logits, logits)))
        most = Counter(self._recent).most_common(1)[0][1]
        self.record["top_share"] = most / len(self._recent)
        enough = len(self._recent) == RECENT and logits.shape[1] > 1
        self.record["collapsed"] = self.record["collapsed"] or (enough and most / RECENT > COLLAPSED)

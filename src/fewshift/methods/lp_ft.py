"""LP-FT: linear probing, then full fine-tuning at a tenth of the rate.

Kumar et al., "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution", ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.copies import answering
from fewshift.core.method import Fitted
from fewshift.core.network import Network, like, logits_of
from fewshift.core.support import Support, Target
from fewshift.methods._finetuning import FineTuning, prepare, trainable, tune, tune_head


@dataclass(frozen=True)
class LPFT(FineTuning):
    """The head first, with the body held; then everything. Both by Adam, stopped early by cross-validation.

    Each stage gets the number of epochs, up to `probe_epochs` and `epochs`, that has the lowest loss on held-out parts
    of the *support*: stratified folds, every fold trained in full. If a class has one image, nothing can be held out,
    and both stages run in full.
    """

    name: ClassVar[str] = "lp-ft"
    paper: ClassVar[str] = "Kumar et al., ICLR 2022"
    changes: ClassVar[str] = "everything"
    verified: ClassVar[str] = (
        "`tests/methods/test_finetuning_naive.py`: every weight after every step of both stages and of their "
        "cross-validation, and the epochs it chooses, against the formulas, to 1e-9"
    )

    bn: str = "source_frozen"
    probe_epochs: int = 100
    folds: int = 3

    def check(self) -> None:
        """At least two folds."""
        super().check()
        self.at_least(folds=2)

    @property
    def cost(self) -> float:
        """Once for each fold, and once for all; training a head costs little beside."""
        return 3.0 * self.epochs * (self.folds + 1)

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Choose the epochs inside the support, then run both stages on all of it."""
        network, support = prepare(network, target, self.name)
        network.need_head(self.name)
        parts = self._folds(support, seed)
        stages = [("probing, cross-validated", 0.5), ("fine-tuning, cross-validated", len(parts)), ("training", 1)]
        with progress.plan(stages):
            probe_epochs, probe_curve = self._choose_probe(network, support, target, parts, seed)
            epochs, curve = self._choose_tune(network, support, target, parts, probe_epochs, seed)
            with progress.stage("training"):
                probed = self._probe(network, support, target, probe_epochs, seed)
                fitted = self._tune(probed, support, target, epochs, seed)
        notes = {
            "probe_epochs": probe_epochs,
            "probe_held_out_loss": probe_curve,
            "epochs": epochs,
            "held_out_loss": curve,
        }
        return replace(fitted, notes=fitted.notes | notes)

    def _folds(self, support: Support, seed: int) -> list[Tensor]:
        """Empty if a class has a single image, and with pixel labels."""
        folds = min(self.folds, support.shots) if support.kind.centroids else 1
        generator = torch.Generator().manual_seed(seed)
        return support.kind.folds(support.labels, folds, generator) if folds > 1 else []

    def _probe(self, network: Network, support: Support, target: Target, epochs: int, seed: int) -> Network:
        """The network with a head trained on the features of its unchanged body."""
        bn = "support" if self.bn == "support" else "source_frozen"
        model, _ = tune_head(network, support, target, replace(self, bn=bn, epochs=epochs), seed)
        return replace(network, model=model)

    def _tune(self, network: Network, support: Support, target: Target, epochs: int, seed: int, **more: Any) -> Fitted:
        """Everything trained at a tenth of the rate; `more` goes to `tune`."""
        return tune(network, support, target, "all", replace(self, epochs=epochs, lr=self.lr / 10), seed, **more)

    def _choose_probe(
        self, network: Network, support: Support, target: Target, folds: list[Tensor], seed: int
    ) -> tuple[int, list[float]]:
        """The best of 0, 1, 2, 5, 10, ... epochs: probing is cheap, and its curve is smooth."""
        if not folds:
            return self.probe_epochs, []
        steps = sorted(
            {0, self.probe_epochs, *(step for step in (1, 2, 5, 10, 20, 50, 100, 200) if step < self.probe_epochs)}
        )
        losses = [
            sum(
                held_out_loss(self._probe(network, kept, target, epochs, seed).model, held, target)
                for kept, held in support.splits(folds)
            )
            / len(folds)
            for epochs in progress.track(steps, "probing, cross-validated")
        ]
        return steps[min(range(len(steps)), key=losses.__getitem__)], losses

    def _choose_tune(
        self, network: Network, support: Support, target: Target, folds: list[Tensor], probe_epochs: int, seed: int
    ) -> tuple[int, list[float]]:
        """One run per fold, evaluated after every epoch."""
        if not folds:
            return self.epochs, []
        curves = []
        for kept, held in progress.track(support.splits(folds), "fine-tuning, cross-validated"):
            probed = self._probe(network, kept, target, probe_epochs, seed)
            curve = [held_out_loss(trainable(probed, self.bn, kept), held, target)]
            self._tune(probed, kept, target, self.epochs, seed, after_epoch=partial(_append_loss, curve, held, target))
            curves.append(curve)
        mean = torch.tensor(curves, dtype=torch.float64).mean(0)
        return int(mean.argmin()), mean.tolist()


def _append_loss(curve: list[float], held: Support, target: Target, predictor: nn.Module) -> None:
    curve.append(held_out_loss(predictor, held, target))


@torch.no_grad()
def held_out_loss(model: nn.Module, held: Support, target: Target) -> float:
    """The loss on images that were not trained on, in evaluation mode."""
    return float(target.cost(logits_of(answering(model)(like(model, held.pictures))), held.targets))

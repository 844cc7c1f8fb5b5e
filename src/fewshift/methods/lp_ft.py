"""LP-FT: linear probing, then full fine-tuning at a tenth of the rate.

Kumar et al., "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution", ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, like, logits_of
from fewshift.core.support import Support, Target
from fewshift.methods._finetuning import adam, all_parameters, check_policy, prepare, trainable, tune, tune_head


@dataclass(frozen=True)
class LPFT(Method):
    """The head first, the body held; then everything. Both by Adam, stopped where cross-validation says.

    How many epochs each stage gets, up to `probe_epochs` and `epochs`, is the number with the lowest loss on held-out
    parts of the *support*: stratified folds, every fold trained in full. With one image in a class nothing can be held
    out, and the numbers are used as they are.
    """

    name: ClassVar[str] = "lp-ft"
    paper: ClassVar[str] = "Kumar et al., ICLR 2022"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "everything"

    bn: str = "source_frozen"
    probe_epochs: int = 100
    epochs: int = 10
    lr: float = 1e-3
    batch_size: int | None = None
    folds: int = 3

    def check(self) -> None:
        """Only settings that make sense."""
        check_policy(self.bn)
        self.at_least(folds=2, batch_size=1)

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Choose the epochs inside the support, then run both stages on all of it."""
        network, support = prepare(network, target, self.name)
        network.need_head(self.name)
        parts = self._folds(support, seed)
        probe_epochs, probe_curve = self._choose_probe(network, support, target, parts, seed)
        epochs, curve = self._choose_tune(network, support, target, parts, probe_epochs, seed)
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
        """None where a class has a single image, or pixels have labels."""
        folds = min(self.folds, support.shots) if support.kind.centroids else 1
        generator = torch.Generator().manual_seed(seed)
        return support.kind.folds(support.labels, folds, generator) if folds > 1 else []

    def _probe(self, network: Network, support: Support, target: Target, epochs: int, seed: int) -> Network:
        """The network with a head trained on the features of its untouched body."""
        model, _ = tune_head(
            network,
            support,
            target,
            adam(self.lr),
            bn="support" if self.bn == "support" else "source_frozen",
            epochs=epochs,
            batch_size=self.batch_size,
            seed=seed,
        )
        return replace(network, model=model)

    def _tune(
        self,
        network: Network,
        support: Support,
        target: Target,
        epochs: int,
        seed: int,
        after_epoch: Callable[[nn.Module], None] | None = None,
    ) -> Fitted:
        return tune(
            network,
            support,
            target,
            all_parameters,
            adam(self.lr / 10),
            bn=self.bn,
            epochs=epochs,
            batch_size=self.batch_size,
            seed=seed,
            after_epoch=after_epoch,
        )

    def _choose_probe(
        self, network: Network, support: Support, target: Target, folds: list[Tensor], seed: int
    ) -> tuple[int, list[float]]:
        """Tried at 0, 1, 2, 5, 10, ... epochs: probing is cheap, and its curve is smooth."""
        if not folds:
            return self.probe_epochs, []
        steps = sorted(
            {0, self.probe_epochs, *(it for it in (1, 2, 5, 10, 20, 50, 100, 200) if it < self.probe_epochs)}
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
        """One run per fold, looked at after every epoch."""
        if not folds:
            return self.epochs, []
        curves = []
        for kept, held in progress.track(support.splits(folds), "fine-tuning, cross-validated"):
            probed = self._probe(network, kept, target, probe_epochs, seed)
            curve = [held_out_loss(trainable(probed, self.bn, kept), held, target)]
            self._tune(
                probed,
                kept,
                target,
                self.epochs,
                seed,
                partial(_look, curve, held, target),
            )
            curves.append(curve)
        mean = torch.tensor(curves, dtype=torch.float64).mean(0)
        return int(mean.argmin()), mean.tolist()


def _look(curve: list[float], held: Support, target: Target, predictor: nn.Module) -> None:
    curve.append(held_out_loss(predictor, held, target))


@torch.no_grad()
def held_out_loss(model: nn.Module, held: Support, target: Target) -> float:
    """The loss on images that were not trained on, in evaluation mode."""
    return float(target.cost(logits_of(model.eval()(like(model, held.pictures))), held.targets))

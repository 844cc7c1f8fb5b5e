"""L2-SP: fine-tune everything, decayed towards where it started instead of towards zero.

Li, Grandvalet and Davoine, "Explicit Inductive Bias for Transfer Learning with Convolutional Networks", ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.method import Fitted, Method, Needs
from fewshift.network import Network
from fewshift.target import Target
from fewshift.tuning import Penalty, all_parameters, check_policy, prepare, sgd, tune


@dataclass(frozen=True)
class L2SP(Method):
    """cross-entropy + (alpha / 2) |w - w0|^2 over the body + (beta / 2) |w|^2 over the head; no weight decay beside.

    - scope: "all" parameters of the body, or its "weights" only (no biases, no BatchNorm), as in the original.
    - head: "l2" towards zero, or "sp" towards its start as well.

    `L2SP(**L2SP.PRESETS["original"])` and `"delta_code"` give the strengths of the two public implementations.
    """

    name: ClassVar[str] = "l2-sp"
    paper: ClassVar[str] = "Li et al., ICML 2018"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "everything"
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "original": {"alpha": 0.1, "beta": 0.01, "scope": "weights"},
        "delta_code": {"alpha": 0.01, "beta": 0.01, "scope": "all"},
    }

    alpha: float = 4e-4
    beta: float = 4e-4
    scope: str = "all"
    head: str = "l2"
    bn: str = "train_running"
    epochs: int = 10
    lr: float = 1e-3
    momentum: float = 0.9
    batch_size: int = 32

    def check(self) -> None:
        """Only settings that make sense."""
        check_policy(self.bn)
        self.at_least(batch_size=1)
        if self.scope not in ("all", "weights") or self.head not in ("l2", "sp"):
            raise FewshiftError("scope is 'all' or 'weights', head is 'l2' or 'sp': choose one of these")

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train everything, held by the penalty."""
        network, support = prepare(network, target, self.name)
        return tune(
            network,
            support,
            target,
            all_parameters,
            sgd(self.lr, 0.0, self.momentum),
            bn=self.bn,
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=seed,
            penalty=lambda model: self.penalty(network, model),
        )

    def penalty(self, network: Network, model: nn.Module) -> Penalty:
        """The distance of `model` from what it is now."""
        head = f"{network.need_head(self.name)}."
        named = dict(model.named_parameters())
        body = [name for name in named if not name.startswith(head)]
        near = [name for name in body if self.scope == "all" or named[name].ndim > 1]
        near += [name for name in named if name.startswith(head)] if self.head == "sp" else []
        small = [name for name in named if name.startswith(head)] if self.head == "l2" else []
        start = {name: named[name].detach().clone() for name in near}

        def value(_: Tensor) -> Tensor:
            away = torch.stack([(named[name] - start[name]).square().sum() for name in near]).sum()
            size = torch.stack([named[name].square().sum() for name in small]).sum() if small else 0.0
            return self.alpha / 2 * away + self.beta / 2 * size

        return value

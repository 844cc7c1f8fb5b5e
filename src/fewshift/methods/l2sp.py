"""L2-SP: fine-tune everything, decayed towards where it started instead of towards zero.

Li, Grandvalet and Davoine, "Explicit Inductive Bias for Transfer Learning with Convolutional Networks", ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fewshift.core.method import Fitted
from fewshift.core.network import Network
from fewshift.core.support import Target
from fewshift.methods._finetuning import Penalty, SGDFineTuning, prepare, tune


@dataclass(frozen=True)
class L2SP(SGDFineTuning):
    """cross-entropy + (alpha / 2) |w - w0|^2 over the body + (beta / 2) |w|^2 over the head.

    - scope: "all" parameters, or "weights" only (no biases, no BatchNorm), as in the original.
    - head: "l2" towards zero, or "sp" towards its start as well.

    `L2SP(**L2SP.PRESETS["original"])` and `"delta_code"` have the strengths of the two public implementations.
    """

    name: ClassVar[str] = "l2-sp"
    paper: ClassVar[str] = "Li et al., ICML 2018"
    changes: ClassVar[str] = "everything"
    verified: ClassVar[str] = (
        "`tests/methods/test_finetuning_naive.py`: every weight after every step, with our strengths and with those "
        "of both public implementations, against the formulas, to 1e-9"
    )
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "original": {"alpha": 0.1, "beta": 0.01, "scope": "weights"},
        "delta_code": {"alpha": 0.01, "beta": 0.01, "scope": "all"},
    }

    weight_decay: float = 0.0  # the penalty is the decay
    alpha: float = 4e-4
    beta: float = 4e-4
    scope: str = "all"
    head: str = "l2"

    def check(self) -> None:
        """Known words for scope and head."""
        super().check()
        self.one_of(scope=("all", "weights"), head=("l2", "sp"))

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train everything with the penalty."""
        network, support = prepare(network, target, self.name)
        return tune(network, support, target, "all", self, seed, penalty=partial(self.penalty, network))

    def penalty(self, network: Network, model: nn.Module) -> Penalty:
        """The distance of `model` from what it is now."""
        head = "\0" if network.head is None else f"{network.head}."  # without a head everything is body
        named = dict(model.named_parameters())
        held = [name for name in named if self.scope == "all" or named[name].ndim > 1]
        small = [name for name in held if self.head == "l2" and name.startswith(head)]
        centre = {name: (torch.zeros_like if name in small else torch.clone)(named[name].detach()) for name in held}

        def value(_: Tensor) -> Tensor:
            pulls = [
                (self.beta if name in small else self.alpha) / 2 * (named[name] - centre[name]).square().sum()
                for name in held
            ]
            return torch.stack(pulls).sum()

        return value

"""Empirical risk minimisation: plain supervised training.

Vapnik, "Principles of Risk Minimization for Learning Theory", NeurIPS 1991; for source networks as in Gulrajani and
Lopez-Paz, "In Search of Lost Domain Generalization", ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewshift.lab.training.algorithm import Algorithm


@dataclass(frozen=True)
class ERM(Algorithm):
    """The mean loss over all source images, whichever domain they are from."""

    name: ClassVar[str] = "erm"
    paper: ClassVar[str] = "Vapnik, NeurIPS 1991"

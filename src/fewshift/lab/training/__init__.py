"""Training source networks. A new algorithm costs one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Batch, Learner, Task
from fewshift.lab.training.csg import CSG
from fewshift.lab.training.erm import ERM
from fewshift.lab.training.ibn import IBN
from fewshift.lab.training.isw import ISW
from fewshift.lab.training.iternorm import IterNorm
from fewshift.lab.training.mixstyle import MixStyle
from fewshift.lab.training.switchable_whitening import SwitchableWhitening

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (ERM, MixStyle, CSG, IBN, SwitchableWhitening, IterNorm, ISW)
}


def algorithm_of(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of that name with these settings, or one sentence with those there are."""
    if name not in ALGORITHMS:
        raise FewshiftError(f"unknown algorithm {name!r}: use one of {', '.join(ALGORITHMS)}")
    known = [it.name for it in fields(ALGORITHMS[name])]
    if unknown := [it for it in settings or {} if it not in known]:
        raise FewshiftError(f"{name} has no setting {unknown[0]!r}: choose one of {', '.join(known) or 'none'}")
    return ALGORITHMS[name](**settings or {})


__all__ = [
    "ALGORITHMS",
    "CSG",
    "ERM",
    "IBN",
    "ISW",
    "Algorithm",
    "Batch",
    "IterNorm",
    "Learner",
    "MixStyle",
    "SwitchableWhitening",
    "Task",
    "algorithm_of",
]

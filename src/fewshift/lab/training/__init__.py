"""Training source networks: the algorithms by name. A new one costs one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm
from fewshift.lab.training.csg import CSG
from fewshift.lab.training.isw import ISW
from fewshift.lab.training.mixstyle import MixStyle
from fewshift.lab.training.plain import ERM, IBN, IterNorm, SwitchableWhitening

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (ERM, MixStyle, CSG, IBN, SwitchableWhitening, IterNorm, ISW)
}


def algorithm_of(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of that name with these settings; an error lists the names that exist."""
    if name not in ALGORITHMS:
        raise FewshiftError(f"unknown algorithm {name!r}: use one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](**settings or {})

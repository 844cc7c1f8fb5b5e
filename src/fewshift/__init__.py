"""Fit a trained network to a new place with a handful of labelled images.

    result = fewshift.adapt(model, "photos/", preprocess=...)
    result.model                       # the same class, adapted
    result.delta.save("camera-7.safetensors")
    fewshift.apply(model, "camera-7.safetensors")

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewshift.adaptation import Adaptation, Inspection, adapt, inspect
    from fewshift.comparison import Comparison, compare
    from fewshift.curve import LearningCurve, learning_curve
    from fewshift.data import Preprocess
    from fewshift.delta import Delta, apply, revert
    from fewshift.errors import FewshiftError
    from fewshift.method import Method
    from fewshift.methods import LCCS, METHODS, AdaBN, Source, Tent, TestTimeBN
    from fewshift.network import Network
    from fewshift.shifts import Shift, shift
    from fewshift.target import Support, Target, draw_support
    from fewshift.version import __version__

_HOMES = {
    "Adaptation": "adaptation",
    "Inspection": "adaptation",
    "adapt": "adaptation",
    "inspect": "adaptation",
    "Comparison": "comparison",
    "compare": "comparison",
    "LearningCurve": "curve",
    "learning_curve": "curve",
    "Preprocess": "data",
    "Delta": "delta",
    "apply": "delta",
    "revert": "delta",
    "FewshiftError": "errors",
    "Method": "method",
    "METHODS": "methods",
    "LCCS": "methods",
    "AdaBN": "methods",
    "Source": "methods",
    "Tent": "methods",
    "TestTimeBN": "methods",
    "Network": "network",
    "Shift": "shifts",
    "shift": "shifts",
    "Support": "target",
    "Target": "target",
    "draw_support": "target",
    "__version__": "version",
}

__all__ = [
    "LCCS",
    "METHODS",
    "AdaBN",
    "Adaptation",
    "Comparison",
    "Delta",
    "FewshiftError",
    "Inspection",
    "LearningCurve",
    "Method",
    "Network",
    "Preprocess",
    "Shift",
    "Source",
    "Support",
    "Target",
    "Tent",
    "TestTimeBN",
    "__version__",
    "adapt",
    "apply",
    "compare",
    "draw_support",
    "inspect",
    "learning_curve",
    "revert",
    "shift",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fewshift' has no attribute '{name}'")
    value = getattr(import_module(f"fewshift.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

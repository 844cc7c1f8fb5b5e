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
    from fewshift.api import Adaptation, Inspection, adapt, inspect
    from fewshift.core.delta import Delta, apply, revert
    from fewshift.core.method import Method
    from fewshift.core.network import Network
    from fewshift.core.support import Support, Target, draw_support
    from fewshift.errors import FewshiftError
    from fewshift.images import Preprocess
    from fewshift.methods.adabn import AdaBN
    from fewshift.methods.catalog import METHODS
    from fewshift.methods.lccs import LCCS
    from fewshift.methods.source import Source
    from fewshift.methods.tent import Tent
    from fewshift.methods.testtime_bn import TestTimeBN
    from fewshift.trust.comparison import Comparison, compare
    from fewshift.trust.learning_curve import LearningCurve, learning_curve
    from fewshift.trust.shift import Shift, shift

    __version__: str

_HOMES = {
    "Adaptation": "api",
    "Inspection": "api",
    "adapt": "api",
    "inspect": "api",
    "Comparison": "trust.comparison",
    "compare": "trust.comparison",
    "LearningCurve": "trust.learning_curve",
    "learning_curve": "trust.learning_curve",
    "Preprocess": "images",
    "Delta": "core.delta",
    "apply": "core.delta",
    "revert": "core.delta",
    "FewshiftError": "errors",
    "Method": "core.method",
    "METHODS": "methods.catalog",
    "LCCS": "methods.lccs",
    "AdaBN": "methods.adabn",
    "Source": "methods.source",
    "Tent": "methods.tent",
    "TestTimeBN": "methods.testtime_bn",
    "Network": "core.network",
    "Shift": "trust.shift",
    "shift": "trust.shift",
    "Support": "core.support",
    "Target": "core.support",
    "draw_support": "core.support",
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
    if name == "__version__":
        value = import_module("importlib.metadata").version("fewshift")
    elif name in _HOMES:
        value = getattr(import_module(f"fewshift.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'fewshift' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

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
    from fewshift.api import Adaptation, Inspection, adapt, evaluate, inspect, predict
    from fewshift.core.delta import Delta, apply, revert
    from fewshift.core.method import Method
    from fewshift.core.network import Network
    from fewshift.core.support import Support, Target, draw_support
    from fewshift.deploy.bulk import ImagePredictions, PixelPredictions
    from fewshift.errors import FewshiftError
    from fewshift.images import Preprocess
    from fewshift.methods.adabn import AdaBN
    from fewshift.methods.catalog import METHODS
    from fewshift.methods.lccs import LCCS
    from fewshift.methods.source import Source
    from fewshift.methods.tent import Tent
    from fewshift.methods.testtime_bn import TestTimeBN
    from fewshift.trust.comparison import Comparison, compare
    from fewshift.trust.evaluation import Evaluation, ImageEvaluation, PixelEvaluation
    from fewshift.trust.leaks import LeakWarning
    from fewshift.trust.learning_curve import LearningCurve, learning_curve
    from fewshift.trust.shift import Shift, shift
    from fewshift.version import __version__

_HOMES = {
    "Adaptation": "api",
    "Inspection": "api",
    "adapt": "api",
    "evaluate": "api",
    "inspect": "api",
    "predict": "api",
    "Comparison": "trust.comparison",
    "compare": "trust.comparison",
    "LearningCurve": "trust.learning_curve",
    "learning_curve": "trust.learning_curve",
    "Evaluation": "trust.evaluation",
    "ImageEvaluation": "trust.evaluation",
    "PixelEvaluation": "trust.evaluation",
    "LeakWarning": "trust.leaks",
    "ImagePredictions": "deploy.bulk",
    "PixelPredictions": "deploy.bulk",
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
    "__version__": "version",
}

__all__ = [
    "LCCS",
    "METHODS",
    "AdaBN",
    "Adaptation",
    "Comparison",
    "Delta",
    "Evaluation",
    "FewshiftError",
    "ImageEvaluation",
    "ImagePredictions",
    "Inspection",
    "LeakWarning",
    "LearningCurve",
    "Method",
    "Network",
    "PixelEvaluation",
    "PixelPredictions",
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
    "evaluate",
    "inspect",
    "learning_curve",
    "predict",
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

"""Fit a trained network to a new place with a handful of labelled images.

    net = fewshift.load("timm:resnet18", weights="w.safetensors")
    result = fewshift.adapt(net, "photos/")
    result.model                       # the same class, adapted
    result.delta.save("camera-7.safetensors")
    fewshift.apply(net, "camera-7.safetensors")

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewshift.api import (
        adapt,
        apply,
        compare,
        evaluate,
        inspect,
        learning_curve,
        left_out,
        load,
        merge,
        predict,
        revert,
        shift,
    )
    from fewshift.core.delta import Delta
    from fewshift.core.draws import draw_support
    from fewshift.core.method import Method
    from fewshift.core.network import Network
    from fewshift.core.support import Support, Target
    from fewshift.deploy.class_table import ImagePredictions
    from fewshift.deploy.exporting import Export, export
    from fewshift.deploy.parts import PartPredictions
    from fewshift.deploy.pixels import PixelPredictions
    from fewshift.deploy.sites import Sites
    from fewshift.errors import FewshiftError
    from fewshift.fleet.sites import adapt_sites
    from fewshift.images.preprocess import Preprocess
    from fewshift.methods.adabn import AdaBN
    from fewshift.methods.auto import Auto
    from fewshift.methods.catalog import METHODS
    from fewshift.methods.lccs import LCCS
    from fewshift.methods.source import Source
    from fewshift.methods.tent import Tent
    from fewshift.methods.testtime_bn import TestTimeBN
    from fewshift.models.card_files import write_card
    from fewshift.report.cautions import CautionWarning
    from fewshift.report.comparison import Comparison
    from fewshift.report.fleet import Fleet
    from fewshift.report.learning_curve import LearningCurve
    from fewshift.report.results import Adaptation, Inspection
    from fewshift.report.sites import SiteTable, list_sites
    from fewshift.trust.evaluation import Evaluation, ImageEvaluation, PixelEvaluation
    from fewshift.trust.leaks import LeakWarning
    from fewshift.trust.shift import Shift

    __version__: str

_NAMES = {
    "api": "adapt apply compare evaluate inspect learning_curve left_out load merge predict revert shift",
    "core.delta": "Delta",
    "core.method": "Method",
    "core.network": "Network",
    "core.draws": "draw_support",
    "core.support": "Support Target",
    "deploy.class_table": "ImagePredictions",
    "deploy.exporting": "Export export",
    "deploy.parts": "PartPredictions",
    "deploy.pixels": "PixelPredictions",
    "deploy.sites": "Sites",
    "errors": "FewshiftError",
    "fleet.sites": "adapt_sites",
    "images.preprocess": "Preprocess",
    "methods.adabn": "AdaBN",
    "methods.auto": "Auto",
    "methods.catalog": "METHODS",
    "methods.lccs": "LCCS",
    "methods.source": "Source",
    "methods.tent": "Tent",
    "methods.testtime_bn": "TestTimeBN",
    "models.card_files": "write_card",
    "report.cautions": "CautionWarning",
    "report.comparison": "Comparison",
    "report.fleet": "Fleet",
    "report.learning_curve": "LearningCurve",
    "report.results": "Adaptation Inspection",
    "report.sites": "SiteTable list_sites",
    "trust.evaluation": "Evaluation ImageEvaluation PixelEvaluation",
    "trust.leaks": "LeakWarning",
    "trust.shift": "Shift",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LCCS",
    "METHODS",
    "AdaBN",
    "Adaptation",
    "Auto",
    "CautionWarning",
    "Comparison",
    "Delta",
    "Evaluation",
    "Export",
    "FewshiftError",
    "Fleet",
    "ImageEvaluation",
    "ImagePredictions",
    "Inspection",
    "LeakWarning",
    "LearningCurve",
    "Method",
    "Network",
    "PartPredictions",
    "PixelEvaluation",
    "PixelPredictions",
    "Preprocess",
    "Shift",
    "SiteTable",
    "Sites",
    "Source",
    "Support",
    "Target",
    "Tent",
    "TestTimeBN",
    "__version__",
    "adapt",
    "adapt_sites",
    "apply",
    "compare",
    "draw_support",
    "evaluate",
    "export",
    "inspect",
    "learning_curve",
    "left_out",
    "list_sites",
    "load",
    "merge",
    "predict",
    "revert",
    "shift",
    "write_card",
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

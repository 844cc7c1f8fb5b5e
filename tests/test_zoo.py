"""The zoo (`benchmarks/zoo.py`) has to see what is wrong, or its count of exact architectures means nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch

from fewshift.core import moments
from fewshift.core.delta import Delta
from fewshift.core.moments import Moments
from fewshift.core.source_layer import SourceLayer

FILE = Path(__file__).parents[1] / "benchmarks" / "zoo.py"


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["zoo"] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(FILE.parent)  # as if it were run: it imports its neighbour
        spec.loader.exec_module(module)
    return module


def judged(zoo, name, seconds=60.0):
    return zoo.judged(zoo.Architecture("timm", name), seconds)


def test_a_sound_architecture_is_exact(zoo):
    result = judged(zoo, "test_efficientnet")
    assert result["verdict"] == "exact"
    assert result["moved"] > 1e6 * result["allowed"]


@pytest.mark.parametrize("what", ["merging", "statistics", "revert"])
def test_a_small_mistake_is_seen(zoo, what, monkeypatch):
    affine, pooled, revert = SourceLayer.affine, Moments.pooled_var.fget, Delta.revert

    def not_source(delta, model):
        result = revert(delta, model)
        with torch.no_grad():
            next(result.parameters()).view(-1)[0] += 1e-12
        return result

    mistakes = {
        "merging": (
            SourceLayer,
            "affine",
            lambda own, normal: (affine(own, normal)[0] * 1.00001, affine(own, normal)[1]),
        ),
        "statistics": (moments.Moments, "pooled_var", property(lambda own: pooled(own) * 1.00001)),
        "revert": (Delta, "revert", not_source),
    }
    monkeypatch.setattr(*mistakes[what])
    assert judged(zoo, "test_efficientnet")["verdict"] == "wrong"


def test_what_has_no_batchnorm_is_left_out_and_what_takes_long_is_stopped(zoo):
    assert judged(zoo, "test_vit") == {"verdict": "left out", "reason": "no BatchNorm"}
    assert judged(zoo, "test_efficientnet", seconds=0.05)["verdict"] == "out of time"


def test_every_name_is_asked_once_and_each_family_has_its_first_before_any_has_its_second(zoo):
    names = [each.name for each in zoo.architectures("timm.*")]
    assert sorted(names) == sorted(timm.list_models())
    modules = timm.list_modules()
    firsts = {timm.list_models(module=module)[0] for module in modules if timm.list_models(module=module)}
    assert set(names[: len(firsts)]) == firsts
    others = [each.name for each in zoo.architectures("torchvision.*")]
    assert len(others) == len(set(others)) > 80


def test_a_run_that_is_not_complete_says_so(zoo, capsys):
    verdicts = {
        "timm.a": {"verdict": "exact", "dtype": "float64"},
        "timm.b": {"verdict": "left out", "reason": "no BatchNorm"},
    }
    zoo.show(verdicts, True, waiting=1455)
    assert "1,455 more names were not reached: the run is not complete." in capsys.readouterr().out
    zoo.show(verdicts, True)
    assert "not complete" not in capsys.readouterr().out

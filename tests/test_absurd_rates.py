"""A learning rate that makes no sense ends in one sentence, or in a network with numbers for answers."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from fewshift import METHODS, FewshiftError, Target
from fewshift.core.support import Unlabelled
from fewshift.lab.training import ERM, IBN, MixStyle
from fewshift.lab.training.trainer import train
from tests.helpers.methods import QUICK
from tests.helpers.networks import make_support, make_tiny
from tests.helpers.training import RECIPE, make_small, make_sources

ABSURD = [1e30, 1e38, 1e39, 1e308]


@pytest.mark.parametrize("lr", ABSURD)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "heavy-ball"])
@pytest.mark.parametrize("algorithm", [ERM(), MixStyle(), IBN()], ids=lambda algorithm: algorithm.name)
def test_training_stops_with_one_sentence(algorithm, optimizer, lr):
    recipe = replace(RECIPE, lr=lr, optimizer=optimizer, nesterov=False, epochs=2)
    with pytest.raises(FewshiftError, match=r"lower lr$"):
        train(make_small(), make_sources(), recipe, algorithm)


def test_the_rates_of_head_and_body_together_are_too_large():
    with pytest.raises(FewshiftError, match=r"a rate of 4e\+58 is larger than any weight can be: lower lr"):
        train(make_small(), make_sources(), replace(RECIPE, lr=1e30, head_rate=1e30), ERM())


@pytest.mark.parametrize("lr", ["1e30", "1e308", "inf", "nan", "-1"])
def test_the_command_says_so_without_a_traceback(lr, command, tmp_path):
    out = tmp_path / "w.safetensors"
    words = ("--source", "uci", "--recipe", "quick", "--epochs", 1, "--set", "schedule=constant", "--out", out)
    result = command("train", "digits", *words, f"--lr={lr}")
    assert result.code == 1
    assert "Traceback" not in result.stderr
    assert "lr" in result.stderr.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize("lr", [1e30, 1e39])
@pytest.mark.parametrize("name", [name for name in METHODS if "lr" in METHODS[name].__dataclass_fields__])
def test_no_method_answers_with_what_is_no_number(name, lr):
    support = make_support()
    target = Target(support, Unlabelled(make_support(seed=3).images))
    with suppress(FewshiftError):
        predictor = METHODS[name](**{**QUICK.get(name, {}), "lr": lr}).adapt(make_tiny(), target)
        assert torch.isfinite(predictor(support.images)).all()


@pytest.mark.parametrize("lr", [math.inf, math.nan, -1.0])
def test_a_rate_that_is_no_number_from_zero_is_refused_at_once(lr):
    with pytest.raises(FewshiftError, match="lr="):
        replace(RECIPE, lr=lr)
    with pytest.raises(FewshiftError, match="lr="):
        METHODS["lccs"](lr=lr)

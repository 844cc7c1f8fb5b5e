"""What an algorithm may do, and what is resumed of it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fewshift import FewshiftError
from fewshift.lab.training import ALGORITHMS
from fewshift.lab.training.algorithm import Algorithm, Batch, Task, Trainee
from fewshift.lab.training.gather import Sources
from fewshift.lab.training.recipes import Recipe
from tests.helpers.networks import make_tiny, same_state, state
from tests.helpers.training import (
    RECIPE,
    StoppedError,
    make_checkpoint,
    stop_in_epoch,
)
from tests.helpers.training import run_plain as run


def test_no_algorithm_has_a_setting_of_a_recipe_and_all_survive_json():
    recipe = {setting.name for setting in fields(Recipe)}
    for name, kind in ALGORITHMS.items():
        assert name == kind.name
        assert not recipe & {setting.name for setting in fields(kind)}
        assert kind(**json.loads(json.dumps(kind().settings()))) == kind()
    assert Recipe(**json.loads(json.dumps(RECIPE.settings()))) == RECIPE


class Busy(Trainee):
    """Uses everything an algorithm may: a hook, views, a queue, parameters of its own, epochs, source images."""

    def __init__(self, model: nn.Module, task: Task, weight: float) -> None:
        super().__init__(model, task)
        self.projection = nn.Linear(6, 2)
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("mask", torch.zeros(()))
        self.weight, self.seen, self.calls = weight, [], []
        self.watch("bn2", self._mix)

    def _mix(self, layer: nn.Module, _: object, output: Tensor) -> Tensor | None:
        assert not layer.training or len(self.batch.domains) == len(output)
        self.features = output.mean((2, 3))
        return output + 0.1 * torch.randn(()) if layer.training else None

    def extra(self, batch: Batch, logits: Tensor) -> Tensor:
        first, second = batch.views
        assert first.shape == second.shape
        assert not torch.equal(first, second)
        assert batch.domains.shape == batch.labels.shape
        self.queue = torch.cat([self.queue[1:], logits.detach().mean()[None]])
        return self.weight * (1 + self.mask) * self.projection(self.features).square().mean()

    def before_epoch(self, epoch: int) -> None:
        super().before_epoch(epoch)
        self.model.bn1.eval()

    def after_step(self) -> None:
        self.calls.append("step")

    def after_epoch(self, epoch: int, sources: Sources) -> None:
        if epoch == 0:
            pixels, _ = sources.train.batch(torch.randperm(len(sources.train))[:4])
            self.mask.fill_(float(sources.preprocess.normalise(pixels).mean().abs()))


@dataclass(frozen=True)
class BusyAlgorithm(Algorithm):
    name: ClassVar[str] = "busy"
    paper: ClassVar[str] = "-"
    views: ClassVar[int] = 2
    weight: float = 0.5

    def modify(self, model: nn.Module) -> nn.Module:
        model.set_submodule("drop", nn.Dropout(0.2))
        return model

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        return Busy(model, task, self.weight)


def test_an_algorithm_can_do_what_the_cards_ask_and_is_resumed_bit_for_bit(tmp_path):
    whole = run(algorithm=BusyAlgorithm())
    source = state(make_tiny())
    assert torch.equal(whole.model.state_dict()["bn1.running_mean"], source["bn1.running_mean"])
    assert not torch.equal(whole.model.state_dict()["bn2.running_mean"], source["bn2.running_mean"])
    assert whole.model.drop.p == 0.2
    assert not whole.model.bn2._forward_hooks
    assert not same_state(state(whole.model), state(run(algorithm=BusyAlgorithm(weight=0.0)).model))
    with pytest.raises(StoppedError):
        run(algorithm=BusyAlgorithm(), checkpoint=make_checkpoint(tmp_path), hear=stop_in_epoch(2))
    kept = make_checkpoint(tmp_path).kept()
    assert {"queue", "mask", "projection.weight"} <= kept["trainee"].keys()
    resumed = run(algorithm=BusyAlgorithm(), checkpoint=make_checkpoint(tmp_path), resume=True)
    assert same_state(state(resumed.model), state(whole.model))
    assert make_checkpoint(tmp_path).weights().keys() == whole.model.state_dict().keys()


def test_every_epoch_has_random_numbers_of_its_own_that_follow_from_the_seed():
    drawn: list[tuple[float, ...]] = []

    class Drawing(Trainee):
        def before_epoch(self, epoch: int) -> None:
            super().before_epoch(epoch)
            drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))

    @dataclass(frozen=True)
    class Draw(Algorithm):
        def trainee(self, model: nn.Module, task: Task) -> Trainee:
            return Drawing(model, task)

    for seed in (0, 0, 1):
        run(algorithm=Draw(), seed=seed)
    assert drawn[:3] == drawn[3:6]
    assert len({number for numbers in drawn for number in numbers}) == 18


def test_settings_of_an_algorithm_are_checked():
    with pytest.raises(FewshiftError, match="weight=-1 cannot be: give a number from 0"):
        BusyAlgorithm(weight=-1)

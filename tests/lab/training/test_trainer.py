"""The trainer: any algorithm, the same bits from the same seed."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift import FewshiftError
from fewshift.core.labels import IMAGES
from fewshift.lab.training import ERM, trainer
from fewshift.lab.training.algorithm import Task, Trainee
from fewshift.lab.training.batches import order
from fewshift.lab.training.gather import Sources
from fewshift.lab.training.recipes import Moment, Recipe
from fewshift.lab.training.trainer import train
from tests.helpers.networks import make_tiny, same_state, state
from tests.helpers.training import (
    RECIPE,
    ROOM,
    StoppedError,
    make_checkpoint,
    make_sources,
    stop_in_epoch,
)
from tests.helpers.training import run_plain as run


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, again, other = run(), run(), run(seed=1)
    assert same_state(state(first.model), state(again.model))
    assert [epoch.loss for epoch in first.epochs] == [epoch.loss for epoch in again.epochs]
    assert not same_state(state(first.model), state(other.model))


def test_the_given_network_and_the_global_random_states_are_untouched():
    model = make_tiny()
    before = state(model), model.training, random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    train(model, make_sources(), replace(RECIPE, augment="enlarge+randaugment"), ERM())
    assert same_state(state(model), before[0])
    assert model.training == before[1]
    assert random.getstate() == before[2]
    assert np.array_equal(np.random.get_state()[1], before[3])
    assert torch.equal(torch.get_rng_state(), before[4])


def test_training_learns_what_there_is_to_learn():
    done = run(replace(RECIPE, epochs=12))
    assert done.epochs[-1].validation == 1.0
    assert done.epochs[-1].loss < done.epochs[0].loss
    assert not done.model.training


def test_it_is_the_loop_anyone_would_write():
    recipe = Recipe(epochs=2, lr=0.05, batch_size=8, schedule="cosine", weight_decay=1e-3, augment="none")
    sources, model = make_sources(), make_tiny()
    model.drop = nn.Identity()
    done = train(model, sources, recipe, ERM())

    model = model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    for epoch in range(2):
        for indices in order(sources, recipe, 0, epoch):
            pixels, labels = sources.train.batch(indices)
            images = (pixels[:, :, 1:9, 1:9].float() / 255 - 0.5) / 0.25
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        rates.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(done.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_bfloat16_multiplies_in_half_the_bits_and_keeps_float32_weights():
    recipe = Recipe(epochs=1, lr=0.05, batch_size=44, schedule="constant", weight_decay=0.0, augment="none")
    sources, model = make_sources(), make_tiny()
    model.drop = nn.Identity()
    halved = train(model, sources, replace(recipe, precision="bfloat16"), ERM()).model.state_dict()

    (indices,) = order(sources, recipe, 0, 0)
    pixels, labels = sources.train.batch(indices)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.train()((pixels[:, :, 1:9, 1:9].float() / 255 - 0.5) / 0.25)
    assert logits.dtype == torch.bfloat16
    F.cross_entropy(logits.float(), labels).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(halved[name], weight - 0.05 * weight.grad, rtol=1e-2, atol=1e-3)
        assert halved[name].dtype == torch.float32
    exact = train(model, sources, recipe, ERM()).model.state_dict()
    assert any(not torch.equal(exact[name], halved[name]) for name, _ in model.named_parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_training_that_is_stopped_and_resumed_has_the_bits_of_one_that_was_not(tmp_path, optimizer):
    recipe = replace(RECIPE, optimizer=optimizer, lr=0.01)
    whole = run(recipe)
    with pytest.raises(StoppedError):
        run(recipe, checkpoint=make_checkpoint(tmp_path), hear=stop_in_epoch(1))
    checkpoint = make_checkpoint(tmp_path)
    seen: list[int] = []
    resumed = run(recipe, checkpoint=checkpoint, resume=True, hear=lambda standing: seen.append(standing.moment.epoch))
    assert set(seen) == {1, 2}
    assert same_state(state(resumed.model), state(whole.model))
    assert same_state(checkpoint.weights(), state(whole.model))
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]
    assert not checkpoint.state.exists()
    assert checkpoint.finished() is not None


def test_accumulated_parts_of_a_batch_are_the_batch():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.fc(self.conv(images).relu().mean((2, 3)))

    torch.manual_seed(0)
    model, sources = Plain(), make_sources((40, 40))
    at_once, in_parts = (
        train(model, sources, replace(RECIPE, batch_size=32, accumulate=parts, label_smoothing=0.1), ERM())
        for parts in (1, 2)
    )
    for name, tensor in at_once.model.state_dict().items():
        torch.testing.assert_close(in_parts.model.state_dict()[name], tensor, rtol=0, atol=1e-6)
    assert not same_state(state(at_once.model), state(model))


def test_patience_stops_on_source_validation_and_keeps_the_best(tmp_path, monkeypatch):
    recipe = replace(RECIPE, epochs=9, schedule="constant", patience=2)
    scores = iter([0.5, 0.7, 0.7, 0.6, 0.9])
    monkeypatch.setattr(trainer, "score", lambda *_: next(scores))
    checkpoint = make_checkpoint(tmp_path)
    done = run(recipe, checkpoint=checkpoint)
    monkeypatch.undo()
    assert (len(done.epochs), done.kept) == (4, 1)
    two = run(replace(recipe, epochs=2, patience=None))
    assert same_state(state(done.model), state(two.model))
    assert same_state(checkpoint.weights(), state(two.model))
    card = json.loads(checkpoint.card.read_text())
    assert (card["source_validation_accuracy"], card["kept_epoch"], card["finished"]) == (70.0, 2, True)


def test_the_head_learns_at_its_own_rate():
    trainee = Trainee(make_tiny(), Task(("a",), ("p",), IMAGES, "fc"))
    trunk, head = trainee.groups(0.01, 5.0)
    assert (trunk["lr"], head["lr"]) == (0.01, pytest.approx(0.05))
    assert head["params"] == list(trainee.model.fc.parameters())
    assert len(trunk["params"]) + len(head["params"]) == len(list(trainee.model.parameters()))


def test_a_loss_that_is_not_a_number_is_one_sentence():
    with pytest.raises(FewshiftError, match=r"the loss became (nan|inf) in epoch 1: lower lr"):
        run(replace(RECIPE, lr=1e30, schedule="constant", epochs=1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["fc.weight", "running_var"])
def test_weights_that_are_not_numbers_after_the_last_step_are_never_written(tmp_path, name, value):
    class Breaks(Trainee):
        def after_epoch(self, epoch: int, sources: Sources) -> None:
            if epoch == 1:
                statistic = next(tensor for key, tensor in self.model.state_dict().items() if key.endswith(name))
                statistic.view(-1)[0] = value

    class Breaking(ERM):
        def trainee(self, model: nn.Module, task: Task) -> Trainee:
            return Breaks(model, task)

    checkpoint = make_checkpoint(tmp_path)
    good: dict[str, Tensor] = {}
    with pytest.raises(FewshiftError, match=r"^training diverged in epoch 2: lower lr or weight_decay$"):
        run(
            algorithm=Breaking(),
            checkpoint=checkpoint,
            hear_epoch=lambda *_: good.update(checkpoint.weights()),
        )
    assert same_state(checkpoint.weights(), good)
    assert len(json.loads(checkpoint.card.read_text())["history"]) == 1


@pytest.mark.parametrize("together", [None, 2])
@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
def test_the_steps_told_add_up_to_those_done(together, schedule):
    recipe = replace(RECIPE, domains_per_batch=together, schedule=schedule)
    sources = make_sources((24, 20, 12))
    moments: list[Moment] = []
    run(recipe, sources=sources, hear=lambda standing: moments.append(standing.moment))
    made = sum(len(order(sources, recipe, 0, epoch)) for epoch in range(recipe.epochs))
    assert [moment.step for moment in moments] == list(range(1, made + 1))
    assert moments[-1].steps == made
    assert schedule == "cosine" or {moment.steps for moment in moments} == {made}


@pytest.mark.parametrize("together", [None, 2])
def test_a_training_of_a_million_epochs_begins_at_once(monkeypatch, together):
    made: list[int] = []
    monkeypatch.setattr(trainer, "order", lambda *words: made.append(words[-1]) or order(*words))
    with pytest.raises(StoppedError):
        run(
            replace(RECIPE, epochs=10**6, domains_per_batch=together, schedule="cosine"),
            hear=stop_in_epoch(0),
        )
    assert made == [0]


def test_images_on_disk_train_as_those_in_memory_do():
    in_memory, on_disk = (run(sources=make_sources(room=room)) for room in (ROOM, 0))
    assert make_sources(room=0).train.nbytes == 0
    assert same_state(state(in_memory.model), state(on_disk.model))


def test_a_network_for_other_classes_is_refused():
    with pytest.raises(FewshiftError, match="4 outputs and there are 3 classes"):
        train(make_tiny(4), make_sources(), RECIPE, ERM())

"""Training source networks: one trainer, any algorithm, one label for an image or for each pixel."""

from __future__ import annotations

import errno
import json
import math
import random
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshift import FewshiftError, Preprocess
from fewshift.core.labels import IMAGES, PIXELS
from fewshift.core.randomness import private_randomness
from fewshift.images.scenes import Encoding, Scenes
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.datasets.collection import Collection
from fewshift.lab.training import ALGORITHMS, ERM, Algorithm, Batch, Task, Trainee, trainer
from fewshift.lab.training.augment import AUGMENTATIONS, augmentation, check_augment
from fewshift.lab.training.batches import by_domain, check_batches, shuffled
from fewshift.lab.training.checkpoint import Checkpoint
from fewshift.lab.training.gather import Sources, evaluation_steps, gather, load_sources, source_names, split
from fewshift.lab.training.order import order
from fewshift.lab.training.recipes import OFFICIAL, PAPER, RECIPES, Recipe, find_recipe
from fewshift.lab.training.samples import Joined, Pool
from fewshift.lab.training.schedules import SCHEDULES, Moment
from fewshift.lab.training.trainer import Trained, train
from fewshift.models import libraries as models
from fewshift.models.weights import begin_from
from tests.helpers.networks import make_tiny, same_state, state

STEPS = Preprocess(8, 8, (0.5,) * 3, (0.25,) * 3)
RECIPE = Recipe(epochs=3, lr=0.05, batch_size=8, nesterov=True, schedule="one-cycle", augment="crop")
ROOM = 2**20


class Listed:
    """Samples that are tensors already."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def pictures(count: int, seed: int, size: int = 10, classes: int = 3) -> Listed:
    """Bytes in which each class has a channel that is brighter."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    images = torch.randint(0, 160, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    images[torch.arange(count), labels] += 90
    return Listed(images, labels)


def make_sources(counts: tuple[int, ...] = (24, 20), held_out: int = 12, room: int = ROOM) -> Sources:
    train_images = Joined([pictures(count, seed) for seed, count in enumerate(counts)])
    return Sources(
        names=tuple(f"place{index}" for index in range(len(counts))),
        classes=("red", "green", "blue"),
        preprocess=STEPS,
        train=Pool(train_images, room),
        domains=train_images.domains,
        validation=Pool(Joined([pictures(held_out, 9, size=8)]), room) if held_out else None,
    )


def make_checkpoint(folder: Path, **facts: object) -> Checkpoint:
    known = {"classes": ["red", "green", "blue"], **STEPS.to_json(), "recipe": RECIPE.settings(), **facts}
    return Checkpoint(folder / "w.safetensors", known, ("recipe", *facts))


def run(recipe: Recipe = RECIPE, seed: int = 0, **options) -> Trained:
    options = {"sources": make_sources(), "algorithm": ERM()} | options
    return train(make_tiny(), recipe=recipe, seed=seed, **options)


class StoppedError(Exception):
    """Stands for a kill."""


def stop_in_epoch(number: int):
    def hear(standing) -> None:
        if standing.moment.epoch == number:
            raise StoppedError

    return hear


# --- the trainer


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, again, other = run(), run(), run(seed=1)
    assert same_state(state(first.model), state(again.model))
    assert [it.loss for it in first.epochs] == [it.loss for it in again.epochs]
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
    assert [it.loss for it in resumed.epochs] == [it.loss for it in whole.epochs]
    assert not checkpoint.state.exists()
    assert checkpoint.finished() is not None


def test_a_training_is_not_resumed_as_another(tmp_path):
    with pytest.raises(StoppedError):
        run(checkpoint=make_checkpoint(tmp_path, seed=0), hear=stop_in_epoch(1))
    with pytest.raises(FewshiftError, match=r"has seed 0 and this one 1: resume it as it was begun"):
        run(checkpoint=make_checkpoint(tmp_path, seed=1), resume=True)
    other = replace(make_checkpoint(tmp_path, seed=0), facts={"recipe": replace(RECIPE, lr=1.0).settings(), "seed": 0})
    with pytest.raises(FewshiftError, match=r"has recipe lr 0.05 and this one 1.0"):
        run(checkpoint=other, resume=True)
    make_checkpoint(tmp_path).state.write_bytes(b"no state")
    with pytest.raises(FewshiftError, match=r"w.resume is damaged: remove it and begin anew with --overwrite"):
        run(checkpoint=make_checkpoint(tmp_path), resume=True)


def test_a_training_begun_anew_leaves_the_one_before_until_its_first_epoch_is_done(tmp_path):
    with pytest.raises(StoppedError):
        run(checkpoint=make_checkpoint(tmp_path, seed=0), hear=stop_in_epoch(1))
    before = {it.name: it.read_bytes() for it in tmp_path.iterdir()}
    with pytest.raises(StoppedError):
        run(seed=1, checkpoint=make_checkpoint(tmp_path, seed=1), hear=stop_in_epoch(0))
    assert {it.name: it.read_bytes() for it in tmp_path.iterdir()} == before
    anew = run(seed=1, checkpoint=make_checkpoint(tmp_path, seed=1))
    assert same_state(make_checkpoint(tmp_path, seed=1).weights(), state(anew.model))
    assert same_state(state(anew.model), state(run(seed=1).model))


def test_a_resume_state_of_which_one_bit_is_another_is_one_sentence(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    with pytest.raises(StoppedError):
        run(checkpoint=checkpoint, hear=stop_in_epoch(1))
    good = checkpoint.state.read_bytes()
    for place in (0, 64, 65, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        checkpoint.state.write_bytes(bad)
        with pytest.raises(FewshiftError, match=r"the resume state .* is damaged"):
            run(checkpoint=checkpoint, resume=True)
    checkpoint.state.write_bytes(good)
    assert same_state(state(run(checkpoint=checkpoint, resume=True).model), state(run().model))


@pytest.mark.parametrize("change", [{"trainee": {}}, {"optimizer": {}}, {"epochs": [{"loss": 1.0}]}, {"epochs": 3}])
def test_a_resume_state_of_other_contents_is_one_sentence(tmp_path, change):
    checkpoint = make_checkpoint(tmp_path)
    with pytest.raises(StoppedError):
        run(checkpoint=checkpoint, hear=stop_in_epoch(1))
    checkpoint.keep({**checkpoint.kept(), **change})
    with pytest.raises(FewshiftError, match=r"the resume state .* is damaged"):
        run(checkpoint=checkpoint, resume=True)


def test_weights_are_read_to_go_on_only_where_the_best_are_kept(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    patient = replace(RECIPE, patience=3)
    with pytest.raises(StoppedError):
        run(patient, checkpoint=checkpoint, hear=stop_in_epoch(1))
    checkpoint.file.write_bytes(b"no weights")
    with pytest.raises(FewshiftError, match=r"the weights .* are damaged: begin anew with --overwrite"):
        run(patient, checkpoint=checkpoint, resume=True)
    checkpoint.file.unlink()
    with pytest.raises(FewshiftError, match=r"the weights .* are missing: begin anew with --overwrite"):
        run(patient, checkpoint=checkpoint, resume=True)
    save_file(make_tiny(5).state_dict(), checkpoint.file)
    with pytest.raises(FewshiftError, match=r"the weights .* are of another network"):
        run(patient, checkpoint=checkpoint, resume=True)
    checkpoint.file.unlink()
    resumed = run(checkpoint=checkpoint, resume=True)
    assert same_state(checkpoint.weights(), state(resumed.model))
    assert same_state(state(resumed.model), state(run().model))


def test_weights_that_are_lost_after_the_last_epoch_are_written_again(tmp_path, monkeypatch):
    checkpoint = make_checkpoint(tmp_path)
    monkeypatch.setattr(Checkpoint, "close", lambda _: None)
    done = run(checkpoint=checkpoint)
    monkeypatch.undo()
    checkpoint.file.unlink()
    run(checkpoint=checkpoint, resume=True)
    assert same_state(checkpoint.weights(), state(done.model))
    assert checkpoint.finished() is not None


def test_a_training_into_a_file_keeps_others_out_of_it(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    checkpoint.lock.touch()  # of a process that died
    with (
        checkpoint.alone(),
        pytest.raises(FewshiftError, match=r"another training writes .*w.safetensors: wait until it is done"),
        make_checkpoint(tmp_path).alone(),
    ):
        pass
    assert not checkpoint.lock.exists()
    with checkpoint.alone():
        assert checkpoint.lock.name == "w.lock"


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    checkpoint, good = make_checkpoint(tmp_path), {}
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if good and "w.safetensors" in path.name:
            write(path, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FewshiftError) as told:
        run(checkpoint=checkpoint, hear_epoch=lambda *_: good.update(checkpoint.weights()))
    assert str(told.value) == (
        f"cannot write {checkpoint.file}: No space left on device, the last good checkpoint is kept: make room, "
        "then go on with --resume"
    )
    assert same_state(checkpoint.weights(), good)
    assert len(json.loads(checkpoint.card.read_text())["history"]) == 1  # the card is that of these weights
    assert sorted(it.name for it in tmp_path.iterdir()) == ["w.json", "w.resume", "w.safetensors"]
    monkeypatch.undo()
    assert same_state(state(run(checkpoint=checkpoint, resume=True).model), state(run().model))


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
                found = next(it for key, it in self.model.state_dict().items() if key.endswith(name))
                found.view(-1)[0] = value

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
    assert [it.step for it in moments] == list(range(1, made + 1))
    assert moments[-1].steps == made
    assert schedule == "cosine" or {it.steps for it in moments} == {made}


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


# --- the parts of a recipe


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_is_a_mixture_with_the_uniform_distribution(smoothing):
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1])
    targets = (1 - smoothing) * F.one_hot(labels, 4) + smoothing / 4
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    task = Task(tuple("abcd"), ("p",), IMAGES, None, smoothing)
    torch.testing.assert_close(task.loss(logits, labels), expected)


def test_pixels_without_a_label_are_not_smoothed():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 4, 3, 5, generator=generator), torch.randint(0, 4, (2, 3, 5), generator=generator)
    task = Task(tuple("abcd"), ("p",), PIXELS, None, 0.1)
    ignored = labels.clone()
    ignored[1] = 255
    torch.testing.assert_close(task.loss(logits, ignored), task.loss(logits[:1], labels[:1]))
    assert task.loss(logits, torch.full_like(labels, 255)) == 0


def test_cosine_is_the_rate_of_the_paper():
    rates = [1e-3 * SCHEDULES["cosine"](Moment(0, 1, epoch, 150)) for epoch in range(150)]
    assert rates == pytest.approx([0.0005 * (1 + math.cos(math.pi * epoch / 150)) for epoch in range(150)])


@pytest.mark.parametrize("steps", [5, 62, 1000])
def test_one_cycle_is_torchs(steps):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps, cycle_momentum=False)
    for step in range(steps):
        rate = 0.05 * SCHEDULES["one-cycle"](Moment(step, steps, 0, 1))
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        if step < steps - 1:
            cycle.step()


def test_poly_and_constant_are_their_formulas():
    moments = [Moment(step, 40, 0, 1) for step in range(40)]
    assert [SCHEDULES["poly"](it) for it in moments] == pytest.approx([(1 - it.step / 40) ** 0.9 for it in moments])
    assert {SCHEDULES["constant"](it) for it in moments} == {1.0}


def test_shuffled_batches_are_full_and_show_no_image_twice():
    batches = shuffled(100, 32, torch.Generator().manual_seed(0))
    assert [len(it) for it in batches] == [32, 32, 32]
    assert len(torch.cat(batches).unique()) == 96


def test_batches_by_domain_have_two_domains_in_equal_parts():
    domains = torch.arange(3).repeat_interleave(torch.tensor([200, 300, 500]))
    batches = by_domain(domains, 128, 2, torch.Generator().manual_seed(0))
    used = torch.zeros(3, dtype=torch.long)
    for number, batch in enumerate(batches, start=1):
        halves = domains[batch].view(2, 64)
        assert all(len(half.unique()) == 1 for half in halves)
        assert halves[0, 0] != halves[1, 0]
        used += torch.bincount(domains[batch], minlength=3)
        left = torch.tensor([200, 300, 500]) - used
        # the epoch ends with the first batch that leaves a domain short
        assert (left.min() < 64) == (number == len(batches))
    assert len(torch.cat(batches).unique()) == len(batches) * 128


def test_an_order_follows_from_seed_and_epoch():
    sources, recipe = make_sources(), replace(RECIPE, domains_per_batch=2)
    first, again, next_epoch, other = (order(sources, recipe, *key) for key in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, next_epoch))
    assert not all(map(torch.equal, first, other))


@pytest.mark.parametrize("name", sorted(set(AUGMENTATIONS) - {"scenes"}))
def test_augmentations_give_the_size_asked_for_and_keep_the_bytes(name):
    images = pictures(6, 0, size=18).images
    for layout in (images, images.contiguous(memory_format=torch.channels_last)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found, labels = augmentation(name, (16, 16), IMAGES)(layout, torch.arange(6))
        assert found.shape == (6, 3, 16, 16)
        assert found.dtype == torch.uint8
        assert torch.equal(labels, torch.arange(6))


@pytest.fixture
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("name", ["crop", "shift"])
def test_geometry_moves_images_and_labels_alike(seeded, name):
    # every pixel has a number of its own, so a pair that was moved differently cannot stay equal
    labels = torch.arange(4 * 7 * 7).view(4, 7, 7).byte()
    images = labels[:, None].repeat(1, 3, 1, 1)
    size = (5, 6) if name == "crop" else (7, 7)
    moved, moved_labels = augmentation(name, size, PIXELS)(images, labels)
    inside = moved_labels != 255  # where something from outside came in, the image is black
    assert torch.equal(moved, (moved_labels * inside)[:, None].repeat(1, 3, 1, 1))
    assert moved_labels.shape == (4, *size)
    assert not torch.equal(moved_labels, labels[:, : size[0], : size[1]])


def test_half_of_the_images_are_enlarged_and_their_labels_with_them(seeded):
    labels = (torch.arange(16)[:, None] // 4 * 4 + torch.arange(16) // 4).byte()  # blocks of 4 x 4
    images, labels = labels[None, None].repeat(40, 1, 1, 1) * 10, labels.repeat(40, 1, 1)
    larger, larger_labels = augmentation("enlarge", (16, 16), PIXELS)(images, labels)
    mirrored = larger_labels[:, 0, 0] > larger_labels[:, 0, -1]
    larger, larger_labels = (
        torch.stack([tensor.flip(-1) if flip else tensor for tensor, flip in zip(batch, mirrored, strict=True)])
        for batch in (larger, larger_labels)
    )
    changed = (larger != images).flatten(1).any(1)
    assert 10 < changed.sum() < 30
    assert 10 < mirrored.sum() < 30
    assert torch.equal(changed, (larger_labels != labels).flatten(1).any(1))
    inside = larger == larger_labels[:, None] * 10  # away from the edges of blocks, where images are interpolated
    assert inside[changed].double().mean() > 0.5


def test_scenes_are_scaled_between_a_half_and_two_and_ignored_outside(seeded):
    labels = torch.zeros(30, 20, 30, dtype=torch.uint8)
    labels[:, 8:12, 12:18] = 1  # a patch of 4 x 6 pixels
    images = (labels[:, None] * 100 + 50).repeat(1, 3, 1, 1)
    changed, changed_labels = augmentation("scenes", (20, 30), PIXELS)(images, labels)
    assert changed.shape == (30, 3, 20, 30)
    outside = changed_labels == 255
    assert outside.any()
    assert not outside.all((1, 2)).any()
    whole = (changed_labels == 1).sum((1, 2)).max()
    assert 4 * 24 * 0.6 < whole <= 4 * 24 * 1.2  # the largest patch is about twice as wide and high


def test_images_smaller_than_a_crop_are_one_sentence():
    with pytest.raises(FewshiftError, match="images of 18x18 pixels have no part of 20x16"):
        augmentation("crop", (16, 20), IMAGES)(pictures(2, 0, size=18).images, torch.arange(2))


def test_augmentations_that_would_separate_images_from_their_labels_are_refused():
    with pytest.raises(FewshiftError, match=r"enlarge.randaugment is not for labels of each pixel: use one of none"):
        check_augment("enlarge+randaugment", PIXELS)
    with pytest.raises(FewshiftError, match="scenes is not for labels of each image"):
        check_augment("scenes", IMAGES)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epochs": 0}, "epochs=0 is too small: give at least 1"),
        ({"batch_size": 1}, "batch_size=1 is too small: give at least 2"),
        ({"batch_size": 8, "accumulate": 5}, "5 parts of a batch of 8 leave single images"),
        ({"lr": -1.0}, "lr=-1.0 cannot be: give a number from 0"),
        ({"lr": "fast"}, "lr='fast' cannot be: give a number from 0"),
        ({"schedule": "steps"}, "unknown schedule 'steps': use one of constant, cosine, poly, one-cycle"),
        ({"held_out": 1.0}, "held_out=1.0 is no share: give a number from 0 to below 1"),
        ({"patience": 2, "held_out": 0.0}, "patience needs images that validate: set held_out above 0"),
        ({"optimizer": "heavy-ball"}, "nesterov is not for heavy-ball"),
    ],
)
def test_a_recipe_that_cannot_be_is_one_sentence(change, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        replace(RECIPE, **change)


@pytest.mark.parametrize(
    ("counts", "size", "together", "sentence"),
    [
        ([3], 8, None, "3 training images make no batch of 8: lower batch_size"),
        ([30], 8, 2, "batches of 2 domains need as many sources, 1 given"),
        ([30, 30], 9, 2, "a batch of 9 cannot be shared equally by 2 domains"),
        ([30, 3], 8, 2, "a batch takes 4 images of a domain and one has 3"),
    ],
)
def test_batches_that_cannot_be_are_one_sentence(counts, size, together, sentence):
    domains = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    with pytest.raises(FewshiftError, match=sentence):
        check_batches(domains, size, together)


def test_a_batch_that_is_too_large_for_memory_is_one_sentence():
    sources = replace(make_sources(), preprocess=replace(STEPS, resize=9000, crop=9000))
    with pytest.raises(FewshiftError, match=r"a batch of 32 images of 9000x9000 pixels takes 29 GB: lower size"):
        train(make_tiny(), sources, replace(RECIPE, batch_size=32), ERM())


def test_recipes_of_the_paper_are_those_of_its_cards():
    pacs = find_recipe("paper", "pacs")
    assert (pacs.lr, pacs.epochs, pacs.batch_size, pacs.domains_per_batch, pacs.size) == (1e-3, 150, 128, 2, 224)
    assert (pacs.weight_decay, pacs.nesterov, pacs.schedule) == (5e-4, False, "cosine")
    assert find_recipe("paper", "camelyon17").augment == find_recipe("paper", "iwildcam").augment == "none"
    assert "randaugment" in find_recipe("paper", "office31").augment
    quick = find_recipe("quick", "pacs")
    assert (quick.lr, quick.lr * quick.head_rate, round(quick.size * quick.margin)) == (0.01, 0.05, 144)
    with pytest.raises(FewshiftError, match="unknown recipe 'slow': use one of paper, quick"):
        find_recipe("slow", "pacs")


def test_recipes_and_official_sources_name_what_there_is():
    for name in {*PAPER, *(it for table in RECIPES.values() for it in table)}:
        find_collection(name)
    for (name, target), sources in OFFICIAL.items():
        assert {target, *sources} <= set(find_collection(name).domains)
        assert target not in sources


# --- the source images


@pytest.fixture
def collection(tmp_path) -> Collection:
    """Three domains of 20 images in two classes; every image of a domain has its shade."""
    for shade, domain in enumerate(("art", "photo", "sketch")):
        for name in ("cat", "dog"):
            folder = tmp_path / "data" / "animals" / domain / name
            folder.mkdir(parents=True)
            for index in range(10):
                pixels = np.full((12, 16, 3), 80 * shade + index * 4 + 2 * (name == "dog"), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return replace(
        find_collection("pacs"),
        name="animals",
        domains=("art", "photo", "sketch"),
        targets=("art", "photo", "sketch"),
        classes=("cat", "dog"),
        counts=None,
        class_counts={},
    )


def shades(pool: Pool) -> list[int]:
    return sorted(pool.batch(torch.arange(len(pool)))[0][:, 0, 4, 4].tolist())


@pytest.mark.parametrize("target", ["art", "photo", "sketch"])
def test_neither_training_nor_validation_contains_an_image_of_the_target(collection, tmp_path, target):
    names = source_names(collection, target, [])
    assert target not in names
    recipe = replace(RECIPE, size=8, held_out=0.25)
    steps = evaluation_steps(None, collection, recipe)
    found = gather(collection, load_sources(collection, names, tmp_path / "data"), recipe, steps)
    assert (len(found.train), len(found.validation)) == (30, 10)
    targets = {80 * collection.domains.index(target) + step for step in range(0, 40, 2)}
    everything = shades(found.train) + shades(found.validation)
    assert not targets & set(everything)
    assert len(set(everything)) == 40  # no image on both sides, none missing
    assert found.names == names
    assert found.domains.tolist() == [0] * 15 + [1] * 15


def test_training_images_are_larger_than_what_evaluation_cuts_out_of_them(collection, tmp_path):
    recipe = replace(RECIPE, size=8, margin=1.25)
    steps = evaluation_steps(Preprocess(256, 224, (0.1,) * 3, (0.2,) * 3, "bicubic"), collection, recipe)
    assert steps == Preprocess(10, 8, (0.1,) * 3, (0.2,) * 3, "bicubic")
    found = gather(collection, load_sources(collection, ["art"], tmp_path / "data"), recipe, steps)
    assert found.train.batch(torch.tensor([0]))[0].shape == (1, 3, 10, 10)
    assert found.validation.batch(torch.tensor([0]))[0].shape == (1, 3, 8, 8)


def test_the_held_out_part_is_the_same_for_every_recipe_and_of_digits_the_published_one():
    first, again = (split(find_collection("pacs"), "photo", 1670, 0.1) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert [len(it) for it in first] == [1503, 167]
    assert len(torch.cat(first).unique()) == 1670
    share = find_recipe("paper", "digits").held_out
    assert [len(it) for it in split(find_collection("digits"), "mnist", 5000, share)] == [4000, 1000]
    assert share == 1000 / 5000
    with pytest.raises(FewshiftError, match=r"held_out=0.1 cannot be: of the digits a fixed fifth validates"):
        split(find_collection("digits"), "mnist", 5000, 0.1)
    assert [len(it) for it in split(find_collection("pacs"), "photo", 50, 0.0)] == [50, 0]


@pytest.mark.parametrize(
    ("target", "sources", "sentence"),
    [
        ("moon", [], "has no domain 'moon': use one of art_painting, cartoon, photo, sketch"),
        (None, ["moon"], "has no domain 'moon'"),
        ("photo", ["photo"], "'photo' is both source and target"),
        (None, ["photo", "photo"], "source 'photo' is named twice"),
        (None, [], "neither a target nor a source is named"),
    ],
)
def test_domains_that_cannot_be_are_one_sentence(target, sources, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        source_names(find_collection("pacs"), target, sources)


def test_sources_are_those_named_or_the_official_ones_or_all_but_the_target():
    pacs, camelyon = find_collection("pacs"), find_collection("camelyon17")
    assert source_names(pacs, "sketch", []) == ("art_painting", "cartoon", "photo")
    assert source_names(pacs, "sketch", ["photo"]) == ("photo",)
    assert source_names(camelyon, "hospital2", []) == ("hospital0", "hospital3", "hospital4")


# --- a label for every pixel


class Painter(nn.Module):
    """One number per class for each pixel, at half the size of the image."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.bn(self.conv(images)).relu())


def make_scenes(folder: Path, sizes: list[tuple[int, int]]) -> Scenes:
    """Street below, sky above; the last rows are not labelled."""
    files, label_files = [], []
    for index, (height, width) in enumerate(sizes):
        labels = np.zeros((height, width), dtype=np.uint8)
        labels[height // 2 :] = 1
        image = np.where(labels[..., None] == 1, (60, 70, 60), (120, 160, 220)).astype(np.uint8)
        labels[-2:] = 255
        for kind, values, those in (("image", image, files), ("label", labels, label_files)):
            those.append(folder / f"{kind}{index}.png")
            Image.fromarray(values).save(those[-1])
    steps = Preprocess(None, None, (0.5,) * 3, (0.25,) * 3)
    return Scenes(tuple(files), tuple(label_files), ("sky", "street"), steps, Encoding.index(2), ((0,) * 3, (9,) * 3))


@pytest.mark.parametrize("sizes", [[(18, 24)] * 20, [(18, 24), (24, 18)] * 10])
def test_the_same_trainer_learns_scenes(tmp_path, sizes):
    recipe = Recipe(epochs=6, lr=0.1, batch_size=4, schedule="poly", augment="scenes", size=16, held_out=0.2)
    camvid = find_collection("camvid")
    steps = evaluation_steps(None, camvid, recipe)
    assert (steps.resize, steps.crop) == (16, None)
    sources = gather(camvid, {"day": make_scenes(tmp_path, sizes)}, recipe, steps)
    assert sources.labels is PIXELS
    torch.manual_seed(0)
    checkpoint = Checkpoint(tmp_path / "w.safetensors", {})
    done = train(Painter(), sources, recipe, ERM(), checkpoint=checkpoint)
    assert done.epochs[-1].validation > 0.8
    card = json.loads(checkpoint.card.read_text())
    assert card["source_validation_mean_iou"] == round(100 * done.epochs[-1].validation, 2)
    again = train(Painter(), replace(sources, validation=None), replace(recipe, epochs=1), ERM())
    assert again.epochs[0].validation is None


def test_scenes_are_counted_by_labelled_pixels_when_a_batch_is_accumulated(tmp_path):
    recipe = Recipe(epochs=1, lr=0.1, batch_size=4, schedule="constant", augment="scenes", size=16, held_out=0.0)
    camvid = find_collection("camvid")
    sources = gather(
        camvid, {"day": make_scenes(tmp_path, [(18, 24)] * 8)}, recipe, evaluation_steps(None, camvid, recipe)
    )
    torch.manual_seed(0)
    model = Painter()
    model.bn = nn.Identity()
    at_once, in_parts = (
        train(model, sources, replace(recipe, accumulate=parts), ERM()).model.state_dict() for parts in (1, 2)
    )
    for name in at_once:
        torch.testing.assert_close(in_parts[name], at_once[name], rtol=0, atol=1e-6)


def test_scenes_and_networks_for_images_do_not_go_together(tmp_path):
    recipe = Recipe(epochs=1, lr=0.1, batch_size=4, augment="scenes", size=16)
    camvid = find_collection("camvid")
    sources = gather(
        camvid, {"day": make_scenes(tmp_path, [(18, 24)] * 8)}, recipe, evaluation_steps(None, camvid, recipe)
    )
    with pytest.raises(FewshiftError, match=r"answer to an image has shape \(\) and its labels \(16, "):
        train(make_tiny(2), sources, recipe, ERM())


def test_scenes_of_different_sizes_are_padded_with_ignored_pixels():
    pairs = [
        (torch.ones(3, 2, 4).byte(), torch.zeros(2, 4).byte()),
        (torch.ones(3, 3, 2).byte(), torch.zeros(3, 2).byte()),
    ]
    images, labels = Pool(pairs, 0).batch(torch.tensor([0, 1]))
    assert images.shape == (2, 3, 3, 4)
    assert torch.equal(labels == 255, images[:, 0] == 0)
    with pytest.raises(FewshiftError, match="images have different shapes"):
        Pool([(image, torch.tensor(0)) for image, _ in pairs], ROOM).batch(torch.tensor([0, 1]))


# --- algorithms


def test_no_algorithm_has_a_setting_of_a_recipe_and_all_survive_json():
    recipe = {it.name for it in fields(Recipe)}
    for name, kind in ALGORITHMS.items():
        assert name == kind.name
        assert not recipe & {it.name for it in fields(kind)}
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


# --- weights to begin with


def test_weights_for_other_classes_fill_everything_but_the_head():
    model, other = make_tiny(3), make_tiny(5, seed=7)
    head = model.fc.weight.clone()
    begin_from(model, other.state_dict(), 3, "w", "tiny")
    assert torch.equal(model.fc.weight, head)
    assert torch.equal(model.conv1.weight, other.conv1.weight)
    assert torch.equal(model.bn2.running_var, other.bn2.running_var)
    begin_from(model, make_tiny(3, seed=8).state_dict(), 3, "w", "tiny")
    assert same_state(state(model), state(make_tiny(3, seed=8)))


def test_weights_without_a_head_leave_the_head_as_it_was_made():
    model, other = make_tiny(3), make_tiny(3, seed=7)
    head = state(model.fc)
    features = {key: tensor.half() for key, tensor in other.state_dict().items() if not key.startswith("fc.")}
    begin_from(model, features, 3, "w", "tiny")
    assert same_state(state(model.fc), head)
    assert all(
        torch.equal(model.state_dict()[key], tensor.to(model.state_dict()[key])) for key, tensor in features.items()
    )
    with pytest.raises(FewshiftError, match=r"fc.bias is missing, \(3,\) expected"):
        begin_from(model, features | {"fc.weight": torch.zeros(3, 6)}, 3, "w", "tiny")


def test_weights_of_a_classifier_fill_the_encoder_of_a_segmentation_network():
    pytest.importorskip("segmentation_models_pytorch")
    segmenter = models.load("smp:unet/resnet18", "random", classes=list("abcd"))
    before = state(segmenter)
    with private_randomness(7):
        classifier = models.load("torchvision:resnet18", "random", classes=list("abc"))
        larger = models.load("torchvision:resnet34", "random", classes=list("abc"))
    with pytest.raises(FewshiftError, match=r"another architecture than unet: layer1\.2\..* is not known there"):
        begin_from(segmenter, larger.state_dict(), 4, "w", "unet")
    begin_from(segmenter, classifier.state_dict(), 4, "w", "unet")
    assert not torch.equal(segmenter.encoder.layer3[1].conv2.weight, before["encoder.layer3.1.conv2.weight"])
    for name, tensor in segmenter.state_dict().items():
        known = classifier.state_dict().get(name.removeprefix("encoder."), before[name])
        assert torch.equal(tensor, known)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda it: {**it, "conv2.weight": torch.zeros(6, 6, 1, 1)}, r"conv2.weight is \(6, 6, 1, 1\), \(6, 6, 3, 3\)"),
        (lambda it: {**it, "conv1.weight": torch.zeros(9, 3, 3, 3)}, r"conv1.weight is \(9, 3, 3, 3\), \(6, 3, 3, 3\)"),
        (lambda it: {key: it[key] for key in it if key != "bn1.bias"}, r"bn1.bias is missing, \(6,\) expected"),
        (lambda it: {**it, "conv9.weight": torch.zeros(1)}, r"conv9.weight is not known there"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_one_sentence(change, fact):
    model = make_tiny(3)
    before = state(model)
    with pytest.raises(FewshiftError, match=rf"w is a checkpoint of another architecture than tiny: {fact}"):
        begin_from(model, change(make_tiny(3, seed=7).state_dict()), 3, "w", "tiny")
    assert same_state(state(model), before)

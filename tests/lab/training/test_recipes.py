"""The parts of a recipe: schedules, batches, what cannot be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fewshift import FewshiftError
from fewshift.core.labels import IMAGES, PIXELS
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.training import ERM
from fewshift.lab.training.algorithm import Task
from fewshift.lab.training.batches import by_domain, check_batches, order, shuffled
from fewshift.lab.training.recipes import OFFICIAL, PAPER, RECIPES, SCHEDULES, Moment, find_recipe
from fewshift.lab.training.trainer import train
from tests.helpers.networks import make_tiny
from tests.helpers.training import (
    RECIPE,
    STEPS,
    make_sources,
)


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
    assert [SCHEDULES["poly"](moment) for moment in moments] == pytest.approx(
        [(1 - moment.step / 40) ** 0.9 for moment in moments]
    )
    assert {SCHEDULES["constant"](moment) for moment in moments} == {1.0}


def test_shuffled_batches_are_full_and_show_no_image_twice():
    batches = shuffled(100, 32, torch.Generator().manual_seed(0))
    assert [len(batch) for batch in batches] == [32, 32, 32]
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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epochs": 0}, "epochs=0 is too small: give at least 1"),
        ({"batch_size": 1}, "batch_size=1 is too small: give at least 2"),
        ({"batch_size": 8, "accumulate": 5}, "5 parts of a batch of 8 leave single images"),
        ({"lr": -1.0}, "lr=-1.0 cannot be: give a number from 0"),
        ({"lr": "fast"}, "lr='fast' cannot be: give a number from 0"),
        ({"schedule": "steps"}, "schedule='steps' is unknown: choose one of constant, cosine, poly, one-cycle"),
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
    for name in {*PAPER, *(name for table in RECIPES.values() for name in table)}:
        find_collection(name)
    for (name, target), sources in OFFICIAL.items():
        assert {target, *sources} <= set(find_collection(name).domains)
        assert target not in sources

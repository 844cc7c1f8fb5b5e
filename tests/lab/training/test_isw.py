"""ISW: which covariances carry style, the loss on them, and when it begins."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor, nn

from fewshift import FewshiftError
from fewshift.core.labels import IMAGES
from fewshift.core.normalisation import InstanceNorm
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.training import ISW, algorithm_of, isw
from fewshift.lab.training.algorithm import Algorithm, Task, Trainee
from fewshift.lab.training.augment import photometric
from fewshift.lab.training.gather import evaluation_steps, gather
from fewshift.lab.training.isw import covariances, selective_loss, sensitive, style_variances, top_of_lowest
from fewshift.lab.training.recipes import Recipe
from fewshift.lab.training.trainer import train
from fewshift.models.layers.placement import normalise_at
from tests.helpers.networks import same_state, state
from tests.helpers.training import (
    RECIPE,
    Small,
    StoppedError,
    make_checkpoint,
    make_scenes,
    make_small,
    make_sources,
    stop_in_epoch,
)

EARLY = ISW(plain_epochs=1, trials=2, images=12)
TASK = Task(("red", "green", "blue"), ("place0", "place1"), IMAGES, "fc", shape=(3, 8, 8))


def standardised(count: int = 3, channels: int = 4, size: int = 5) -> Tensor:
    images = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images[:, 1] += images[:, 0]
    return InstanceNorm(channels, affine=False).double()(images)


def upper(*entries: tuple[int, int], channels: int = 4) -> Tensor:
    mask = torch.zeros(channels, channels, dtype=torch.bool)
    for entry in entries:
        mask[entry] = True
    return mask


# --- the parts


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_covariances_are_those_of_each_image_with_about_1_on_the_diagonal(layout):
    features = standardised()
    matrices = covariances(features.contiguous(memory_format=layout))
    for image, matrix in zip(features, matrices, strict=True):
        expected = np.cov(image.flatten(1).numpy()) + 1e-5 * np.eye(4)
        np.testing.assert_allclose(matrix.numpy(), expected, rtol=1e-10)
        assert matrix.diagonal().numpy() == pytest.approx(25 / 24, abs=1e-3)


def test_covariances_are_not_taken_in_half_precision():
    matrices = covariances(standardised().half())
    assert matrices.dtype == torch.float32
    torch.testing.assert_close(matrices, covariances(standardised()).float(), rtol=1e-2, atol=1e-2)


def test_the_loss_is_the_mean_absolute_entry_of_the_mask_image_by_image():
    matrices, mask = covariances(standardised()), upper((0, 1), (0, 3), (2, 3))
    by_image = [sum(abs(float(matrix[i, j])) for i, j in mask.nonzero().tolist()) / 3 for matrix in matrices]
    assert float(selective_loss(matrices, mask)) == pytest.approx(sum(by_image) / 3)


def test_the_loss_is_0_exactly_where_the_entries_of_the_mask_are():
    matrices, mask = covariances(standardised()), upper((0, 1), (1, 2))
    assert selective_loss(matrices, mask) > 0
    assert selective_loss(matrices * ~mask, mask) == 0
    assert selective_loss(matrices, upper()) == 0  # an empty mask is no division by 0


def test_the_variance_of_a_pair_is_torchs_above_the_diagonal():
    first, second = covariances(standardised()), covariances(standardised(channels=4, size=5).roll(1, 0))
    expected = torch.stack([first, second]).var(0).mean(0)
    variances = style_variances(first, second)
    torch.testing.assert_close(variances, torch.triu(expected, diagonal=1))
    assert (style_variances(first, first) == 0).all()


def brute_force(values: list[float]) -> tuple[float, float]:
    """The least sum of squares of three intervals of sorted values, and the top of the lowest: every cut is tried."""

    def squares(part: list[float]) -> float:
        return sum((value - sum(part) / len(part)) ** 2 for value in part)

    cuts = [(i, j) for i, j in itertools.combinations(range(1, len(values)), 2)]
    costs = {
        cut: squares(values[: cut[0]]) + squares(values[cut[0] : cut[1]]) + squares(values[cut[1] :]) for cut in cuts
    }
    best = min(costs, key=costs.__getitem__)
    return costs[best], values[best[0] - 1]


def cost(values: np.ndarray, top: float) -> float:
    """The least sum of squares of three intervals of which the first ends at `top`."""
    low, rest = values[values <= top], values[values > top]
    splits = [rest[:j].var() * j + rest[j:].var() * (len(rest) - j) for j in range(1, len(rest))]
    return low.var() * len(low) + min(splits, default=0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=3, max_size=16).filter(lambda values: len(set(values)) > 2))
def test_clusters_are_the_best_there_are(values):
    values = sorted(float(value) for value in values)
    top = top_of_lowest(*np.unique(values, return_counts=True))
    assert cost(np.array(values), top) == pytest.approx(brute_force(values)[0], abs=1e-9)


def test_clusters_are_those_that_k_means_finds():
    generator = np.random.default_rng(0)
    values = np.concatenate([np.zeros(600), generator.gamma(0.3, 1.0, 400)])
    top = top_of_lowest(*np.unique(values, return_counts=True))
    labels = KMeans(3, n_init=10, random_state=0).fit(values[:, None])
    lowest = values[labels.labels_ == labels.cluster_centers_.argmin()]
    assert top == lowest.max()


def test_sensitive_entries_lie_above_the_lowest_cluster_and_above_the_diagonal():
    variances = torch.zeros(6, 6, dtype=torch.float64)
    variances[0, 1:4] = torch.tensor([1e-4, 0.5, 1.0])
    variances[1, 2:5] = torch.tensor([2e-4, 0.45, 1.1])
    mask = sensitive(variances)
    assert mask.nonzero().tolist() == [[0, 2], [0, 3], [1, 3], [1, 4]]
    assert not sensitive(torch.zeros(5, 5)).any()
    assert sensitive(torch.tensor([[0.0, 3.0], [0.0, 0.0]])).nonzero().tolist() == [[0, 1]]


def test_other_colours_leave_everything_in_its_place():
    labels = torch.zeros(6, 32, 32, dtype=torch.uint8)
    labels[:, 4:20, 6:22] = 1
    images = torch.where(labels[:, None] == 1, torch.tensor([200, 60, 90]).view(3, 1, 1), 110).byte()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        changed = photometric(images)
        torch.manual_seed(0)
        assert torch.equal(photometric(images), changed)
    assert (changed.dtype, changed.shape) == (images.dtype, images.shape)
    assert all((one != other).float().mean() > 0.5 for one, other in zip(images, changed, strict=True))
    inside = -nn.functional.max_pool2d(-labels.float()[:, None], 11, 1, 5)[:, 0] == 1
    outside = nn.functional.max_pool2d(labels.float()[:, None], 11, 1, 5)[:, 0] == 0
    for image, within, without in zip(changed.float(), inside, outside, strict=True):
        for channel in image:  # one colour within, one without
            assert channel[within].std() < 1
            assert channel[without].std() < 1
    assert photometric(images[:, :1, :3, :2]).shape == (6, 1, 3, 2)  # grey, and smaller than the blur


# --- the masks


def trainee_of(algorithm: ISW, model: nn.Module | None = None) -> isw.Selective:
    trainee = algorithm.trainee(algorithm.modify(model or make_small()), TASK)
    assert isinstance(trainee, isw.Selective)
    return trainee


def test_masks_are_what_all_trials_agree_on(monkeypatch):
    trainee = trainee_of(ISW(plain_epochs=2, trials=3, images=4))
    trials = [upper((0, 1), (0, 2), (1, 3), channels=8), upper((0, 1), (1, 3), (5, 6), channels=8)]
    trials.append(upper((1, 3), (0, 2), (0, 1), (2, 7), channels=8))
    calls: list[Tensor] = []

    def scripted(variances: Tensor) -> Tensor:
        calls.append(variances)
        return trials[(len(calls) - 1) // 3]  # each trial looks at three points

    monkeypatch.setattr(isw, "sensitive", scripted)
    trainee.after_epoch(0, make_sources())
    assert not calls  # the plain epochs are not over
    trainee.after_epoch(1, make_sources())
    assert len(calls) == 3 * 3
    assert all((variances.tril() == 0).all() and variances.triu(1).any() for variances in calls)
    assert all(mask.nonzero().tolist() == [[0, 1], [1, 3]] for mask in trainee.masks)
    trainee.after_epoch(2, make_sources())
    assert len(calls) == 3 * 3  # they are found once


def test_masks_compare_training_images_with_copies_through_the_network_as_it_is_at_test(monkeypatch):
    trainee = trainee_of(ISW(plain_epochs=1, trials=1, images=44))
    sources, seen = make_sources(), []
    monkeypatch.setattr(isw, "photometric", lambda images: 255 - images)
    monkeypatch.setattr(isw, "sensitive", lambda variances: seen.append(variances) or upper(channels=8))
    trainee.train()
    before = state(trainee)
    trainee.after_epoch(0, sources)
    assert same_state(state(trainee), before)
    model, features = trainee.model.eval(), {}
    for point, name in enumerate(("bn1", "layer1.1.after_addition", "layer2.0.after_addition")):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, point=point: features.update({point: output.clone()})
        )
    pixels, _ = sources.train.batch(torch.arange(44))
    pairs = []
    for images in (pixels, 255 - pixels):
        with torch.no_grad():
            model(sources.preprocess.normalise(images))
        pairs.append([[np.cov(image.flatten(1).numpy()) for image in features[point]] for point in range(3)])
    for point in range(3):
        expected = np.triu(np.var([pairs[0][point], pairs[1][point]], axis=0, ddof=1).mean(0), 1)
        np.testing.assert_allclose(seen[point].numpy(), expected, rtol=1e-3, atol=1e-7)


def test_copies_that_are_the_same_leave_empty_masks_and_no_loss(monkeypatch):
    monkeypatch.setattr(isw, "photometric", lambda images: images)
    with_loss, without = (
        train(make_small(), make_sources(), replace(RECIPE, epochs=2), replace(EARLY, weight=weight))
        for weight in (5.0, 0.0)
    )
    assert [epoch.loss for epoch in with_loss.epochs] == [epoch.loss for epoch in without.epochs]


def test_masks_hold_entries_above_the_diagonal_alone():
    trainee = trainee_of(EARLY)
    trainee.after_epoch(0, make_sources())
    assert any(mask.any() for mask in trainee.masks)
    assert not any(mask.tril().any() for mask in trainee.masks)


# --- training


@dataclass(frozen=True)
class InstanceNorms(Algorithm):
    name: ClassVar[str] = "instance norms"
    paper: ClassVar[str] = "-"

    def modify(self, model: nn.Module) -> nn.Module:
        return normalise_at(model, "auto", lambda channels: InstanceNorm(channels, affine=False))

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        return Trainee(model, task)


def test_without_weight_it_is_training_with_instance_norms():
    ours, plain = (
        train(make_small(), make_sources(), RECIPE, algorithm) for algorithm in (ISW(weight=0.0), InstanceNorms())
    )
    assert same_state(state(ours.model), state(plain.model))


def test_the_loss_begins_after_the_plain_epochs_and_its_masks_do_not_stay_in_the_network():
    selective, plain = (
        train(make_small(), make_sources(), RECIPE, algorithm)
        for algorithm in (replace(EARLY, weight=3.0), InstanceNorms())
    )
    assert selective.epochs[0].loss == plain.epochs[0].loss
    assert selective.epochs[1].loss > plain.epochs[1].loss
    assert state(selective.model).keys() == state(plain.model).keys()


def test_the_gradient_of_the_loss_reaches_the_layers_before_each_point():
    trainee = trainee_of(replace(EARLY, weight=1.0))
    for mask in trainee.masks:
        mask.copy_(torch.ones(8, 8).triu(1))
    trainee.before_epoch(1)
    batch = isw.Batch((torch.randn(4, 3, 8, 8),), torch.tensor([0, 1, 2, 0]), torch.zeros(4))
    loss, logits = trainee.loss(batch)
    (loss - trainee.task.loss(logits, batch.labels)).backward()
    moved = {
        name
        for name, weight in trainee.model.named_parameters()
        if weight.grad is not None and weight.grad.abs().max() > 1e-7
    }
    assert {"conv1.weight", "layer1.1.conv1.weight", "layer2.0.bn2.weight"} <= moved
    assert not any(name.startswith(("layer3", "layer4", "fc")) for name in moved)


def test_masks_are_part_of_what_is_resumed(tmp_path):
    sources = make_sources()
    whole = train(make_small(), sources, RECIPE, EARLY)
    with pytest.raises(StoppedError):
        train(make_small(), sources, RECIPE, EARLY, checkpoint=make_checkpoint(tmp_path), hear=stop_in_epoch(1))
    kept = make_checkpoint(tmp_path).kept()["trainee"]
    assert [kept[f"mask{point}"].dtype for point in range(3)] == [torch.bool] * 3
    assert any(kept[f"mask{point}"].any() for point in range(3))
    resumed = train(make_small(), sources, RECIPE, EARLY, checkpoint=make_checkpoint(tmp_path), resume=True)
    assert same_state(state(resumed.model), state(whole.model))
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]


class Scenic(Small):
    """The same network, with an answer for each pixel; sizes have to be multiples of 4."""

    def forward(self, images: Tensor) -> Tensor:
        assert images.shape[2] % 4 == images.shape[3] % 4 == 0
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return nn.functional.conv2d(hidden, self.fc.weight[:2, :, None, None], self.fc.bias[:2])


def test_scenes_of_any_size_are_compared_one_by_one(tmp_path):
    recipe = Recipe(epochs=2, lr=0.05, batch_size=4, schedule="poly", augment="scenes", crop=32, held_out=0.0)
    camvid = find_collection("camvid")
    scenes = make_scenes(tmp_path, [(37, 66), (50, 35)] * 4)
    sources = gather(camvid, {"day": scenes}, recipe, evaluation_steps(None, camvid, recipe))
    torch.manual_seed(0)
    done = train(Scenic(), sources, recipe, replace(EARLY, images=5, trials=1))
    assert all(np.isfinite(epoch.loss) for epoch in done.epochs)


def test_a_loss_that_would_never_begin_is_told_before_training():
    with pytest.raises(FewshiftError, match=r"after 6 epochs .* 3: .*plain_epochs"):
        train(make_small(), make_sources(), RECIPE, ISW())
    for field in ("plain_epochs", "trials", "images"):
        with pytest.raises(FewshiftError, match=f"{field}=0 is too small: give at least 1"):
            algorithm_of("isw", {field: 0})

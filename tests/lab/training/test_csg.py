"""CSG: what is compared with what, where gradients go, what stays as it was; and the optimiser and schedule it has."""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift import FewshiftError, Network
from fewshift.core.labels import IMAGES
from fewshift.core.randomness import private_randomness
from fewshift.lab.datasets import digits
from fewshift.lab.training import CSG, ERM
from fewshift.lab.training.algorithm import Batch, Task
from fewshift.lab.training.batches import order
from fewshift.lab.training.csg import Contrast, Contrasting, attention, contrast_logits, pooled
from fewshift.lab.training.recipes import PAPER, SCHEDULES, Moment, Recipe
from fewshift.lab.training.samples import Pool
from fewshift.lab.training.trainer import Trained, train
from tests.helpers.networks import make_tiny, same_state, state
from tests.helpers.training import (
    RECIPE,
    Staged,
    StoppedError,
    adapts,
    digit_sources,
    make_batch,
    make_checkpoint,
    make_sources,
    make_staged,
    make_task,
    stop_in_epoch,
)

SMALL = CSG(queue=20, dimensions=5, hidden=7)
OWN_HEAD = replace(SMALL, hidden=0)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def run(algorithm: CSG = SMALL, recipe: Recipe = RECIPE, sources=None, model=None, **options) -> Trained:
    return train(model or make_staged(), sources or make_sources(), recipe, algorithm, **options)


def make_trainee(algorithm: CSG = OWN_HEAD, model: nn.Module | None = None) -> Contrasting:
    with private_randomness(0):
        trainee = algorithm.trainee(model or make_staged(), make_task())
    trainee.before_epoch(0)
    assert isinstance(trainee, Contrasting)
    return trainee


def moved(trainee: Contrasting) -> Contrasting:
    """A trainee whose network is no longer the one it began as."""
    with torch.no_grad(), private_randomness(1):
        for parameter in trainee.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return trainee


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


# --- pooling


def naive_attention(maps: np.ndarray) -> np.ndarray:
    """Of one image (channels, height, width)."""
    channels, height, width = maps.shape
    weights = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            weights[row, column] = sum(maps[c, row, column] * maps[c].mean() for c in range(channels))
    return weights / weights.sum()


def test_attention_is_its_formula_and_sums_to_one():
    features = torch.rand(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    weights = attention(features)
    torch.testing.assert_close(weights.sum((1, 2, 3)), torch.ones(3))
    for index, maps in enumerate(features.double().numpy()):
        expected = naive_attention(maps)
        np.testing.assert_allclose(weights[index, 0].numpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(
            pooled(features, weights)[index].numpy(), (maps * expected).sum(axis=(1, 2)), rtol=1e-5
        )


def test_a_map_without_any_activity_is_averaged_and_has_a_gradient():
    features = torch.zeros(2, 3, 2, 2)
    features[1] = 1.0
    features.requires_grad_()
    weights = attention(features)
    torch.testing.assert_close(weights, torch.full((2, 1, 2, 2), 0.25))
    pooled(features, weights).sum().backward()
    assert torch.isfinite(features.grad).all()


# --- the contrast


def test_a_query_that_is_its_key_has_a_logit_of_one_over_the_temperature():
    with private_randomness(0):
        stage, features = Contrast(4, 128, CSG().queue), torch.rand(3, 4)
    keys = unit(stage.key(features))
    logits = contrast_logits(unit(stage.query(features)), keys, stage.queue, CSG().temperature)
    assert logits.shape == (3, 65537)
    torch.testing.assert_close(logits[:, 0], torch.full((3,), 14.2857), rtol=1e-4, atol=0)
    torch.testing.assert_close(stage.queue.norm(dim=1), torch.ones(65536))


def test_the_loss_is_the_share_of_the_first_logit_written_out():
    with private_randomness(0):
        stage, queries, keys = Contrast(4, 5, 6), torch.rand(3, 4), torch.rand(3, 4)
    q, k = unit(stage.query(queries)).tolist(), unit(stage.key(keys)).tolist()
    losses = []
    for i in range(3):
        candidates = [k[i], *stage.queue.tolist()]
        shares = [math.exp(sum(a * b for a, b in zip(q[i], candidate, strict=True)) / 0.5) for candidate in candidates]
        losses.append(-math.log(shares[0] / sum(shares)))
    assert stage.loss(queries, keys, 0.5).item() == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_a_projection_is_linear_relu_linear_and_that_of_keys_begins_as_a_copy():
    stage = Contrast(4, 5, 6)
    assert [type(layer) for layer in stage.query] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [(layer.in_features, layer.out_features) for layer in stage.query if isinstance(layer, nn.Linear)] == [
        (4, 4),
        (4, 5),
    ]
    assert same_state(state(stage.query), state(stage.key))


def test_the_queue_holds_the_last_keys_in_a_ring():
    with private_randomness(0):
        stage = Contrast(4, 5, 7)
        expected = deque(stage.queue.tolist(), maxlen=7)
        for count in (3, 3, 2, 1, 3):  # past the end twice
            keys = torch.rand(count, 4)
            before = stage.queue.clone()
            stage.loss(torch.rand(count, 4), keys, 0.07)
            assert torch.equal(stage.queue, before)  # not among their own negatives
            rows = unit(stage.key(keys))
            stage.advance(keep=1.0)
            expected.extend(rows.tolist())
            place = int(stage.position)
            oldest_first = torch.cat([stage.queue[place:], stage.queue[:place]])
            torch.testing.assert_close(oldest_first, torch.tensor(list(expected)))


def test_the_projection_of_keys_follows_that_of_queries_slowly():
    trainee = make_trainee(replace(OWN_HEAD, keep=0.9))
    stage = trainee.stages[0]
    began, steps = state(stage.key), []
    for seed in range(2):
        with torch.no_grad(), private_randomness(seed):
            for parameter in stage.query.parameters():
                parameter.add_(torch.randn_like(parameter))
        steps.append(state(stage.query))
        trainee.after_step()
    for name, tensor in stage.key.state_dict().items():
        expected = 0.81 * began[name] + 0.09 * steps[0][name] + 0.1 * steps[1][name]
        torch.testing.assert_close(tensor, expected)
    assert CSG().keep == 0.999


def test_queries_are_of_the_first_view_and_keys_of_the_second_by_the_network_of_the_beginning():
    trainee, batch = moved(make_trainee()), make_batch([0, 1, 0], views=2)
    model, began = trainee.model, trainee.began
    first, second, second_began = (
        {3: net.layer3(net.layer2(net.layer1(images)))}
        for net, images in ((model, batch.views[0]), (model, batch.views[1]), (began, batch.views[1]))
    )
    for maps, net in ((first, model), (second, model), (second_began, began)):
        maps[4] = net.layer4(maps[3])
    expected = F.cross_entropy(model(batch.images), batch.labels)
    for number, stage in ((3, trainee.stages[0]), (4, trainee.stages[1])):
        rows = []
        for attended, maps in ((first, first), (second, second_began)):
            weights = torch.einsum("nchw,nc->nhw", attended[number], attended[number].mean((2, 3)))
            weights = weights / weights.sum((1, 2), keepdim=True)
            rows.append(torch.einsum("nchw,nhw->nc", maps[number], weights))
        q, k = unit(stage.query(rows[0])), unit(stage.key(rows[1]))
        logits = torch.cat([(q * k).sum(1)[:, None], q @ stage.queue.T], 1) / 0.07
        expected = expected + 0.1 * F.cross_entropy(logits, torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(trainee.loss(batch)[0], expected)


def test_gradients_reach_the_network_and_the_projections_of_queries_and_nothing_else():
    trainee, batch = moved(make_trainee()), make_batch([0, 1, 0], views=2)
    logits = trainee.model(batch.images)
    trainee.extra(batch, logits).backward()
    everything = dict(trainee.named_parameters())
    touched = {name for name, weight in everything.items() if weight.grad is not None}
    assert touched == {name for name in everything if name.startswith("model.layer") or ".query." in name}
    assert all(everything[name].grad.abs().sum() > 0 for name in touched)
    assert {name for name, weight in everything.items() if not weight.requires_grad} == {
        name for name in everything if name.startswith("began.") or ".key." in name
    }
    assert not any(stage.queue.requires_grad for stage in trainee.stages)


def test_the_gradient_of_the_contrast_is_that_of_queries_with_keys_held_still():
    """Keys and their attention are numbers: moving the second view's features changes nothing that is learned from."""
    trainee, batch = moved(make_trainee()), make_batch([0, 1, 0], views=2)
    weight = trainee.model.layer4[0].weight
    trainee.loss(batch)[0].backward()
    gradient, index, step = weight.grad.clone(), (1, 2, 1, 1), 1e-3
    key_model = copy.deepcopy(trainee.model)
    with torch.no_grad():
        attended = [key_model.layer3(key_model.layer2(key_model.layer1(batch.views[1])))]
        attended.append(key_model.layer4(attended[0]))
        maps = [trainee.began.layer3(trainee.began.layer2(trainee.began.layer1(batch.views[1])))]
        maps.append(trainee.began.layer4(maps[0]))
        keys = [pooled(features, attention(where)) for features, where in zip(maps, attended, strict=True)]

        def loss() -> float:
            third = trainee.model.layer3(trainee.model.layer2(trainee.model.layer1(batch.images)))
            fourth = trainee.model.layer4(third)
            value = F.cross_entropy(trainee.model(batch.images), batch.labels).double()
            for stage, features, key in zip(trainee.stages, (third, fourth), keys, strict=True):
                value += 0.1 * stage.loss(pooled(features, attention(features)), key, 0.07).double()
            return float(value)

        ends = []
        for sign in (1, -1):
            weight[index] += sign * step
            ends.append(loss())
            weight[index] -= sign * step
    assert float(gradient[index]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=0.02, abs=1e-4)


# --- in the trainer


def test_statistics_stay_those_of_the_beginning_and_affine_parameters_learn():
    source, done = state(make_staged()), state(run().model)
    kept = [name for name in source if name.endswith(STATISTICS)]
    assert len(kept) == 12
    assert all(torch.equal(done[name], source[name]) for name in kept)
    for number in range(1, 5):
        for name in ("0.weight", "1.weight", "1.bias"):
            assert not torch.equal(done[f"layer{number}.{name}"], source[f"layer{number}.{name}"])


def test_the_network_of_the_beginning_stays_as_it_was(tmp_path):
    with pytest.raises(StoppedError):
        run(OWN_HEAD, checkpoint=make_checkpoint(tmp_path), hear=stop_in_epoch(2))
    kept = make_checkpoint(tmp_path).kept()["trainee"]
    began = {name.removeprefix("began."): tensor for name, tensor in kept.items() if name.startswith("began.")}
    assert same_state(began, state(make_staged()))
    assert not same_state({name: kept[f"model.{name}"] for name in began}, state(make_staged()))
    for stage in "01":
        assert int(kept[f"stages.{stage}.position"]) == 2 * 5 * 8 % 20  # two epochs of five batches
        assert not torch.equal(kept[f"stages.{stage}.key.0.weight"], kept[f"stages.{stage}.query.0.weight"])


def test_a_training_that_is_stopped_and_resumed_has_the_bits_of_one_that_was_not(tmp_path):
    whole = run()
    with pytest.raises(StoppedError):
        run(checkpoint=make_checkpoint(tmp_path), hear=stop_in_epoch(1))
    seen: list[int] = []
    hear = lambda standing: seen.append(standing.moment.epoch)  # noqa: E731
    resumed = run(checkpoint=make_checkpoint(tmp_path), resume=True, hear=hear)
    assert set(seen) == {1, 2}
    assert same_state(state(resumed.model), state(whole.model))
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]


def test_parts_of_a_batch_are_compared_as_the_batch_is():
    algorithm = replace(SMALL, queue=24)  # whole batches, so that those forgotten are the same
    at_once, in_parts = (run(algorithm, replace(RECIPE, accumulate=parts)).model.state_dict() for parts in (1, 2))
    for name, tensor in at_once.items():
        torch.testing.assert_close(in_parts[name], tensor, rtol=1e-4, atol=1e-5)


def test_without_weight_it_is_plain_fine_tuning_in_evaluation_mode():
    recipe = Recipe(epochs=2, lr=0.05, batch_size=8, schedule="constant", weight_decay=1e-3, augment="none")
    sources, model = make_sources(), make_staged()
    trained = state(run(replace(OWN_HEAD, weight=0.0), recipe, sources).model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for epoch in range(2):
        for indices in order(sources, recipe, 0, epoch):
            pixels, labels = sources.train.batch(indices)
            optimizer.zero_grad()
            F.cross_entropy(model.eval()((pixels[:, :, 1:9, 1:9].float() / 255 - 0.5) / 0.25), labels).backward()
            optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-5)
    assert not same_state(trained, state(run(OWN_HEAD, recipe, sources).model))


def test_the_head_is_new_with_a_hidden_layer_and_learns_as_fast_as_the_projections():
    model = SMALL.modify(make_staged())
    assert [type(layer) for layer in model.fc] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [tuple(layer.weight.shape) for layer in model.fc if isinstance(layer, nn.Linear)] == [(7, 6), (3, 7)]
    head = Network.of(model, torch.zeros(2, 3, 8, 8)).head
    assert head == "fc.2"
    trainee = SMALL.trainee(model, replace(make_task(), head=head))
    trunk, new = trainee.groups(1e-5, 10.0)
    assert (trunk["lr"], new["lr"]) == (1e-5, pytest.approx(1e-4))
    stages = [weight for number in range(1, 5) for weight in model.get_submodule(f"layer{number}").parameters()]
    assert set(trunk["params"]) == set(stages)
    projections = [weight for stage in trainee.stages for weight in stage.query.parameters()]
    assert set(new["params"]) == {*model.fc.parameters(), *projections}
    assert CSG().hidden == 512


def test_nothing_of_it_stays_in_the_network_but_its_head():
    plain, done = SMALL.modify(make_staged()), run().model
    assert [(name, type(module)) for name, module in done.named_modules()] == [
        (name, type(module)) for name, module in plain.named_modules()
    ]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in done.modules())
    assert run(OWN_HEAD).model.state_dict().keys() == make_staged().state_dict().keys()


def test_the_stages_of_a_library_s_network_are_compared():
    trainee = replace(SMALL, queue=20).trainee(
        SMALL.modify(digits.digits_network()), Task(tuple("0123456789"), ("p",), IMAGES, "fc.2", shape=(1, 28, 28))
    )
    assert [name for name, module in trainee.model.named_modules() if module._forward_hooks] == ["layer3", "layer4"]
    assert [stage.query[0].in_features for stage in trainee.stages] == [32, 64]
    images = torch.rand(2, 2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    trainee.before_epoch(0)
    loss, _ = trainee.loss(Batch(tuple(images), torch.tensor([0, 1]), torch.tensor([0, 0])))
    loss.backward()
    assert trainee.model.conv1.weight.grad.abs().sum() > 0


# --- its optimiser and schedule


def test_the_recipe_for_visda_is_that_of_the_paper():
    recipe = PAPER["visda"]
    assert (recipe.lr, recipe.head_rate * recipe.lr) == (1e-5, pytest.approx(1e-4))
    assert (recipe.epochs, recipe.batch_size, recipe.weight_decay) == (30, 32, 5e-4)
    rates = [SCHEDULES[recipe.schedule](Moment(step, 1000, 0, 1)) for step in range(1000)]
    for step, rate in enumerate(rates):
        warm = min(0.01 + 0.99 * (step / 100) ** 2, 1)
        assert rate == pytest.approx(warm * (1 - step / 1000) ** 0.9)
    assert (rates[0], rates[100]) == (0.01, pytest.approx(0.9**0.9))


@pytest.mark.parametrize("schedule", ["warm-poly", "cosine"])
def test_heavy_ball_has_the_rate_inside_its_momentum(schedule):
    recipe = Recipe(
        epochs=3, lr=0.05, batch_size=8, optimizer="heavy-ball", schedule=schedule, weight_decay=1e-3, augment="none"
    )
    sources, model = make_sources(), make_tiny()
    model.drop = nn.Identity()
    trained = train(model, sources, recipe, ERM()).model.state_dict()
    model.train()
    velocity = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    step, steps = 0, 15
    for epoch in range(3):
        for indices in order(sources, recipe, 0, epoch):
            pixels, labels = sources.train.batch(indices)
            model.zero_grad()
            F.cross_entropy(model((pixels[:, :, 1:9, 1:9].float() / 255 - 0.5) / 0.25), labels).backward()
            warm = min(0.01 + 0.99 * (step / 100) ** 2, 1) * (1 - step / steps) ** 0.9
            rate = 0.05 * (warm if schedule == "warm-poly" else (1 + math.cos(math.pi * epoch / 3)) / 2)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    velocity[name] = 0.9 * velocity[name] + rate * (weight.grad + 1e-3 * weight)
                    weight.sub_(velocity[name])
            step += 1
    assert step == steps
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-5)
    plain = train(make_tiny(), sources, replace(recipe, optimizer="sgd"), ERM()).model
    assert not torch.allclose(plain.fc.weight, model.fc.weight, atol=1e-5)


# --- what cannot be


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"temperature": 0.0}, "temperature=0 .*above 0"),
        ({"keep": 1.1}, r"keep=1\.1 .*from 0 to 1"),
        ({"queue": 0}, "queue=0 .*at least 1"),
        ({"dimensions": 0}, "dimensions=0 .*at least 1"),
        ({"weight": -0.1}, r"weight=-0\.1 .*from 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_can(settings, facts):
    with pytest.raises(FewshiftError, match=facts):
        CSG(**settings)


class Signed(Staged):
    """Its stages do not end in a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        for number in (3, 4):
            self.get_submodule(f"layer{number}")[2] = nn.Identity()
        nn.init.constant_(self.layer4[1].bias, -1.0)


class Roundabout(Staged):
    """Its last linear layer is not what gives its output."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 3)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean((2, 3))


@pytest.mark.parametrize(
    ("algorithm", "model", "sentence"),
    [
        (replace(SMALL, queue=7), None, "queue of 7 keys .*batch of 8"),
        (
            CSG(),
            None,
            "65,536 keys .*44 training images.*set queue to 22",
        ),
        (replace(SMALL, layers="layer4,layer5"), None, "Staged .*'layer5'.*layer1"),
        (OWN_HEAD, make_tiny(), "Tiny .*layer1 to layer4"),
        (OWN_HEAD, Signed(), "'layer[34]' .*negative.*ReLU"),
        (replace(OWN_HEAD, layers="fc"), None, "'fc' .*map for each channel"),
        (SMALL, Roundabout(), "Roundabout .*last linear layer.*hidden to 0"),
        (SMALL, Convolutional(), "Convolutional .*linear layer.*hidden to 0"),
    ],
)
def test_what_it_cannot_work_with_is_one_sentence(algorithm, model, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        run(algorithm, model=model)


def test_it_learns_from_images_with_one_label_alone():
    pixels = [(torch.zeros(3, 8, 8).byte(), torch.zeros(8, 8).byte())] * 4
    sources = replace(make_sources(), train=Pool(pixels, 0))
    with pytest.raises(FewshiftError, match="csg cannot learn from a label of each pixel"):
        train(make_tiny(2), sources, RECIPE, SMALL)


# --- and then LCCS


def test_lccs_adapts_a_network_that_was_trained_so_from_the_statistics_it_began_with():
    source = digits.source_network("mnist")
    recipe = replace(PAPER["visda"], epochs=2, lr=1e-3, augment="shift", schedule="poly")
    done = train(source, digit_sources("uci", each=256), recipe, CSG(queue=128))
    assert done.epochs[1].loss < done.epochs[0].loss
    kept = {name: tensor for name, tensor in source.state_dict().items() if name.endswith(STATISTICS)}
    assert same_state({name: done.model.state_dict()[name] for name in kept}, kept)
    adapts(done.model)

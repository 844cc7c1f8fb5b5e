"""Is there a shift? No alarm on the source's own images, one on images of elsewhere, and nothing else touched."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import Tensor, nn

import fewshift
from fewshift import FewshiftError, Preprocess
from fewshift.core import distance
from fewshift.core.distance import Seen, look
from fewshift.core.support import Unlabelled
from fewshift.lab.datasets import digits
from fewshift.trust.shift import LayerShift, Shift, judged
from tests.helpers.networks import make_support, make_tiny, same_state, state, unsettle

DRAWS = 40
IMAGES = make_support().images


# --- the alarm, on real images


@pytest.fixture(scope="module", params=["mnist", "uci"])
def views(request) -> tuple[dict[str, Seen], dict[str, Seen]]:
    """What a digits network sees of held-out digits of its own place, and of the other place."""
    network = digits.source_network(request.param)
    own = digits.split(request.param)[1][0]
    other = digits.PLACES["uci" if request.param == "mnist" else "mnist"].read()[0][::15]
    return tuple(look(network, Unlabelled(digits.normalise(images)), most=360) for images in (own, other))


def part(view: dict[str, Seen], indices: Tensor) -> dict[str, Seen]:
    return {name: seen.part(indices) for name, seen in view.items()}


def alarms(view: dict[str, Seen], count: int, source: dict[str, Seen] | None = None) -> int:
    """In 40 draws of `count` images; with `source`, each against 30 others of it."""
    generator, alarms = torch.Generator().manual_seed(count), 0
    total = len(next(iter(view.values())).mean)
    for _ in range(DRAWS):
        order = torch.randperm(total, generator=generator)
        known = None
        if source is not None:
            theirs = torch.randperm(len(next(iter(source.values())).mean), generator=generator)
            known = part(source, order[count : count + 30] if source is view else theirs[:30])
        alarms += judged(part(view, order[:count]), known).shifted
    return alarms


@pytest.mark.parametrize("count", [1, 2, 5, 20, 100])
def test_images_of_the_source_raise_an_alarm_in_at_most_one_draw_of_twenty(views, count):
    assert alarms(views[0], count) <= DRAWS / 20


@pytest.mark.parametrize("count", [10, 40])
def test_images_of_elsewhere_always_raise_an_alarm(views, count):
    assert alarms(views[1], count) == DRAWS


@pytest.mark.parametrize("count", [1, 20])
def test_against_source_images_the_source_is_silent_too(views, count):
    assert alarms(views[0], count, views[0]) <= DRAWS / 20 + 1
    assert alarms(views[1], max(count, 10), views[0]) == DRAWS


def test_one_image_is_enough_for_forgotten_preprocessing():
    network, image = digits.source_network(), digits.split()[1][0][:1]
    right, wrong = (fewshift.shift(network, picture) for picture in (digits.normalise(image), 255 * image))
    assert not right.shifted
    assert wrong.shifted


def test_a_network_that_remembers_something_else_is_judged_by_source_images():
    """As after training with strong augmentation: the layers remember what no plain image looks like."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(80, 3, 8, 8, generator=generator)
    model = make_tiny()
    assert fewshift.shift(model, images[:40]).shifted
    compared = fewshift.shift(model, images[:40], source=images[40:])
    assert (compared.shifted, compared.source_images) == (False, 40)
    assert fewshift.shift(model, images[:40] + 0.2, source=images[40:]).shifted


# --- the numbers


class Watched(nn.Module):
    """Runs a network and keeps what enters its BatchNorm layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.seen = model.eval(), {}
        for name in ("bn1", "bn2"):
            getattr(model, name).register_forward_pre_hook(
                lambda _, args, name=name: self.seen.__setitem__(name, args[0].double().numpy())
            )

    @torch.no_grad()
    def forward(self, images: Tensor) -> dict[str, np.ndarray]:
        self.model(images)
        return self.seen


def naive(model: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    """Layer by layer, channel by channel, image by image, as the module's docstring has it."""
    layers = {}
    for name, entered in Watched(model)(images).items():
        layer = getattr(model, name)
        means, logs, stretches, spread = [], [], [], 0.0
        for channel in range(entered.shape[1]):
            mu, sigma = float(layer.running_mean[channel]), math.sqrt(float(layer.running_var[channel]) + layer.eps)
            values = entered[:, channel]
            d = [(image.mean() - mu) / sigma for image in values]
            q = [(image.var() + (image.mean() - mu) ** 2 + layer.eps) / sigma**2 for image in values]
            means.append(np.mean(d))
            stretches.append(math.log(np.mean(q)) / 2)
            logs.append(math.log(math.sqrt(values.var() + layer.eps) / sigma))
            if len(images) > 1:
                spread += np.var(d, ddof=1) + np.var(np.array(q) / 2 / np.mean(q), ddof=1)
        n, channels = len(images), len(means)
        variance = (2 * 0.25 + (n - 1) * spread / channels) / (2 + n - 1)
        effect = np.mean(np.square(means)) + np.mean(np.square(stretches))
        layers[name] = {
            "mean_shift": math.sqrt(np.mean(np.square(means))),
            "std_ratio": math.exp(np.mean(logs)),
            "score": math.sqrt(effect / (variance / n + 0.05**2)),
        }
    return layers


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_numbers_are_those_of_a_naive_loop(count):
    shift = fewshift.shift(make_tiny(), IMAGES[:count])
    expected = naive(make_tiny(), IMAGES[:count])
    assert [layer.name for layer in shift.layers] == list(expected)
    for layer in shift.layers:
        for what, value in expected[layer.name].items():
            assert getattr(layer, what) == pytest.approx(value, rel=1e-4), (layer.name, what)
    squares = [layer["score"] ** 2 for layer in expected.values()]
    assert shift.score == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-4)


@pytest.mark.parametrize("directions", [2, 6, 20])
def test_the_threshold_is_the_percentile_of_an_f_distribution_in_the_directions_of_the_images(directions):
    """400 images that differ in a few directions only: the guess of four directions counts for five of them."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(50, directions, generator=generator))[0]
    samples = torch.randn(400, directions, generator=generator) @ basis.T
    # small, so that variances hardly differ between images
    shift = judged({"layer": Seen(1e-3 * samples, torch.ones(400, 50))})
    counted = (5 + 398) / (5 / 4 + 398 / directions)
    assert shift.threshold**2 == pytest.approx(stats.f.ppf(0.95, counted, counted * 401), rel=0.03)


def test_one_image_has_the_threshold_of_the_guess():
    shift = judged({"layer": Seen(torch.randn(1, 50), torch.ones(1, 50))})
    assert shift.threshold**2 == pytest.approx(stats.f.ppf(0.95, 4, 8))


def test_images_at_what_the_layers_remember_score_below_one():
    seen = {"a": Seen(torch.zeros(5, 3), torch.ones(5, 3))}
    shift = judged(seen)
    assert (shift.score, shift.shifted) == (0, False)
    assert shift.layers[0].std_ratio == pytest.approx(1)


def test_order_and_batches_do_not_matter():
    images = make_support(shots=25).images  # 75: three batches
    forwards, backwards = fewshift.shift(make_tiny(), images), fewshift.shift(make_tiny(), images.flip(0))
    assert forwards.score == pytest.approx(backwards.score, rel=1e-5)
    assert forwards.threshold == pytest.approx(backwards.threshold, rel=1e-5)
    for one, other in zip(forwards.layers, backwards.layers, strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-5)


class Twice(nn.Module):
    """One layer that is executed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images)
        return self.fc(self.bn(self.bn(hidden)).mean((2, 3)))


def test_what_a_layer_sees_in_several_calls_is_pooled_for_each_image():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = unsettle(Twice())
    with torch.no_grad():
        first = model.conv(IMAGES)
        both = torch.cat([first.flatten(2), model.bn(first).flatten(2)], 2)
    sigma = (model.bn.running_var + model.bn.eps).sqrt()
    layer = fewshift.shift(model, IMAGES).layers[0]
    expected = ((both.mean((0, 2)) - model.bn.running_mean) / sigma).square().mean().sqrt()
    assert layer.mean_shift == pytest.approx(expected.item(), rel=1e-4)
    ratio = ((both.var((0, 2), correction=0) + model.bn.eps).sqrt() / sigma).log().mean().exp()
    assert layer.std_ratio == pytest.approx(ratio.item(), rel=1e-4)


# --- what goes in and what comes out


class Items:
    """A dataset whose images may differ in size."""

    def __init__(self, images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        return self.images[index], "whatever"


@pytest.mark.parametrize("form", [Tensor.numpy, Items, list, Unlabelled])
def test_every_form_of_images_gives_the_same(form):
    assert fewshift.shift(make_tiny(), form(IMAGES)).to_json() == fewshift.shift(make_tiny(), IMAGES).to_json()


def test_a_folder_is_read_with_its_preprocessing(tmp_path):
    pictures = [Image.new("RGB", (10, 9), (shade, 40, 90)) for shade in range(0, 240, 60)]
    for index, picture in enumerate(pictures):
        picture.save(tmp_path / f"{index}.png")
    steps = Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
    folder = fewshift.shift(make_tiny(), tmp_path, preprocess=steps)
    tensors = torch.stack([steps(picture) for picture in pictures])
    assert folder.to_json() == fewshift.shift(make_tiny(), tensors).to_json()


def test_images_of_different_sizes_are_compared_one_by_one():
    sizes = [IMAGES[0], IMAGES[1, :, :6], IMAGES[2], IMAGES[3]]
    together = fewshift.shift(make_tiny(), Items(sizes))
    alone = [fewshift.shift(make_tiny(), image.unsqueeze(0)) for image in sizes]
    assert together.images == 4
    assert together.layers[0].mean_shift <= max(shift.layers[0].mean_shift for shift in alone)


def test_of_many_images_some_are_looked_at_evenly_spread(monkeypatch):
    monkeypatch.setattr(distance, "MOST", 5)
    shift = fewshift.shift(make_tiny(), IMAGES)
    assert (shift.images, shift.total) == (5, 15)
    assert shift.score == fewshift.shift(make_tiny(), IMAGES[::3]).score


def test_the_result_ranks_its_layers_and_survives_json():
    shift = fewshift.shift(make_tiny(), IMAGES)
    assert [layer.rank for layer in shift.ranked] == [1, 2]
    assert shift.ranked[0].score == max(layer.score for layer in shift.layers)
    facts = json.loads(json.dumps(shift.to_json()))
    assert facts["shifted"] is (shift.score > shift.threshold)
    assert {layer["name"] for layer in facts["layers"]} == {"bn1", "bn2"}


def test_progress_is_told_to_whoever_listens():
    heard = []
    fewshift.shift(make_tiny(), IMAGES, progress=lambda *words: heard.append(words))
    assert heard[-1] == ("images", 15, 15)


def test_the_function_keeps_its_name_whatever_was_imported_first():
    import fewshift.trust.shift

    assert callable(fewshift.shift)


# --- what is left alone, and what is refused


def test_the_model_and_the_random_states_are_untouched():
    model = make_tiny().train()
    before, states = state(model), (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state())
    fewshift.shift(model, IMAGES, source=IMAGES)
    assert same_state(before, state(model))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.bn1._forward_pre_hooks
    assert states[0] == random.getstate()
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert torch.equal(states[2], torch.get_rng_state())


def without_statistics() -> nn.Module:
    model = make_tiny()
    model.bn1 = nn.BatchNorm2d(6, track_running_stats=False)
    return model


PLAIN = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
BAD = {
    "no BatchNorm": (PLAIN, IMAGES, "this network has none: use a network with BatchNorm"),
    "no statistics": (without_statistics(), IMAGES, "keeps no running statistics"),
    "NaN": (make_tiny(), torch.where(IMAGES > 2, torch.nan, IMAGES), "contains NaN or infinity: check its preproc"),
    "none": (make_tiny(), None, "there are no images: give"),
    "empty": (make_tiny(), IMAGES[:0], "give at least one"),
    "bytes": (make_tiny(), IMAGES.byte(), "preprocess them to floating point"),
    "a number": (make_tiny(), 7, "cannot read images from int"),
    "a bare folder": (make_tiny(), "photos", "images from photos need preprocessing"),
    "far too large": (make_tiny(), IMAGES * 1e30, "layer 'bn1' is not finite"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_one_sentence(mistake):
    model, images, sentence = BAD[mistake]
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.shift(model, images)


def test_the_distance_is_what_chance_does_not_explain_whatever_the_number_of_images():
    def layer(mean: float, ratio: float, score: float) -> LayerShift:
        return LayerShift("bn", mean, ratio, score, 1)

    def distance(*layers: LayerShift) -> float:
        return Shift(layers, 1.0, 1.5, 9, 9).distance

    assert distance(layer(0.3, 1.0, 1e9)) == pytest.approx(0.3)
    assert distance(layer(0.0, math.e**0.4, 1e9)) == pytest.approx(0.4)
    assert distance(layer(0.3, math.e**0.4, 1e9), layer(0.5, 1.0, 1e9)) == pytest.approx(0.5)
    assert distance(layer(0.3, 1.0, 1.0), layer(0.3, 1.0, 0.2)) == 0.0  # as far as images of the source are
    assert distance(layer(0.3, 1.0, math.sqrt(2))) == pytest.approx(0.3 / math.sqrt(2))  # half of the square
    assert math.isfinite(distance(layer(0.0, 0.0, 5.0)))  # a layer that sees nothing


def test_an_exact_shift_of_the_first_layer_has_its_distance():
    """Images whose first layer is off by one deviation everywhere: no chance in it, so that is the distance."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16, 2)).eval()
    images = torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    images = (images - images.mean((2, 3), keepdim=True)) / images.std((2, 3), keepdim=True, correction=0)
    assert fewshift.shift(model, images).distance == pytest.approx(0.0, abs=0.01)
    assert fewshift.shift(model, images + 1.0).distance == pytest.approx(1.0, abs=0.02)

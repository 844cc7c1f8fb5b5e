"""LCCS: the invariants of its card, and every point where paper and released code differ.

`test_lccs_naive.py` compares all of it with the paper written out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fewshift import LCCS, AdaBN, FewshiftError, Network, Support, Target
from fewshift.core.reading import read
from fewshift.core.spans import Linear, Span
from tests.helpers.networks import make_support, make_tiny, unsettle


def fitted(method, model=None, support=None, seed=0):
    return method.fit(model or make_tiny(), Target(support or make_support()), seed)


def logits(method, model=None, support=None, images=None, seed=0):
    support = support or make_support()
    with torch.no_grad():
        return fitted(method, model, support, seed).predictor(support.images if images is None else images)


def test_no_blend_and_no_steps_is_the_source_exactly(tiny, support):
    assert torch.equal(logits(LCCS(init=0.0, epochs=0, classifier="source")), tiny(support.images))


def test_full_blend_and_no_steps_is_adabn(support):
    assert torch.allclose(logits(LCCS(init=1.0, epochs=0, classifier="source")), logits(AdaBN()), atol=1e-6)


def test_without_steps_the_number_of_spanning_vectors_does_not_matter():
    assert torch.equal(
        logits(LCCS(init=0.4, epochs=0, n=1, classifier="source")),
        logits(LCCS(init=0.4, epochs=0, n=15, classifier="source")),
    )


@pytest.mark.parametrize(("n", "expected"), [(1, 2 * 2 * 2), (4, 2 * 2 * 5)])
def test_two_times_n_plus_one_numbers_are_learned_per_layer(n, expected):
    assert fitted(LCCS(n=n)).notes["parameters"] == expected


def test_more_vectors_than_channels_or_images_exist_are_not_invented():
    result = fitted(LCCS(n="k*classes"))  # 15 images, 6 channels
    assert all(layer["n"] == [7, 7] for layer in result.layers.values())


def test_coefficients_move_about_a_thousandth_per_step():
    result = fitted(LCCS(init=0.5, n=3, batch_size=64))
    assert result.notes["steps"] == 10
    for layer in result.layers.values():
        for name in ("eta", "rho"):
            start = torch.tensor([0.5, 0.5] + [0.0] * (len(layer[name]) - 2))
            assert 0 < (torch.tensor(layer[name]) - start).abs().max() < 0.032


def test_of_equally_good_blends_the_largest_is_taken():
    method = LCCS(epochs=0, classifier="source")
    constant = Target(make_support(), loss=lambda logits, labels: logits.sum() * 0)
    assert method.fit(make_tiny(), constant).notes["v"] == 1.0


def test_greedy_chooses_layer_by_layer_with_later_layers_at_the_source():
    support = make_support()
    v = fitted(LCCS(init="greedy", epochs=0), support=support).notes["v"]
    network = Network.of(make_tiny(), support.images)
    losses = {}
    for step in range(11):
        blend = {"bn1": step / 10, "bn2": 0.0}
        losses[step / 10] = float(F.cross_entropy(read(network, [support.images], blend).logits[0], support.labels))
    first = v if isinstance(v, float) else v["bn1"]
    assert first == min(losses, key=lambda value: losses[value])


def test_convex_weights_stay_between_zero_and_one():
    result = fitted(LCCS(combination="convex", init=1.0, lr=0.2))
    for layer in result.layers.values():
        for name in ("eta", "rho"):
            assert len(layer[name]) == 2
            assert sum(layer[name]) == pytest.approx(1)
            assert all(0 <= value <= 1 for value in layer[name])


def test_entropy_does_not_look_at_the_labels():
    support = make_support()
    swapped = replace(support, labels=support.labels.flip(0))
    method = LCCS(objective="entropy", classifier="source")
    assert torch.equal(logits(method, support=support), logits(method, support=swapped))


def test_a_fraction_keeps_fewer_directions_for_less_variance():
    few, many = (fitted(LCCS(n=fraction, epochs=0)).layers["bn2"]["n"] for fraction in (0.5, 0.99))
    assert all(left <= right for left, right in zip(few, many, strict=True))
    assert few != many


def test_auto_keeps_the_source_classifier_below_five_shots_and_uses_centroids_from_five():
    assert fitted(LCCS(epochs=0), support=make_support(4)).notes["classifier"] == "source"
    assert fitted(LCCS(epochs=0), support=make_support(5)).notes["classifier"] == "ncc"
    partly = make_support(5)
    keep = partly.labels < 2
    assert (
        fitted(LCCS(epochs=0), support=Support(partly.images[keep], partly.labels[keep])).notes["classifier"]
        == "source"
    )


def test_a_finetuned_head_lowers_the_loss_of_the_frozen_features():
    support = make_support()
    before = logits(LCCS(classifier="source"), support=support)
    after = logits(LCCS(classifier="finetuned", classifier_epochs=40), support=support)
    assert F.cross_entropy(after, support.labels) < F.cross_entropy(before, support.labels)
    plain, tuned = (
        fitted(LCCS(epochs=1, classifier=kind), support=support).predictor for kind in ("source", "finetuned")
    )
    assert torch.equal(plain.bn2.weight, tuned.bn2.weight)
    assert not torch.equal(plain.fc.weight, tuned.fc.weight)


def test_augmented_and_plain_images_go_where_the_paper_sends_them():
    """Augmented: EMA and gradient steps. Plain: grid loss, spanning vectors, centroids."""
    seen = []
    support = replace(make_support(), augment=lambda image: seen.append(1) or image.flip(-1))
    fitted(LCCS(init=0.5, epochs=0, classifier="ncc"), support=support)
    assert not seen
    fitted(LCCS(init=0.5, epochs=2, classifier="ncc"), support=support)
    assert len(seen) == 2 * len(support)
    seen.clear()
    fitted(LCCS(grid=3, epochs=0, classifier="source"), support=support)
    assert len(seen) == 3 * 10 * len(support)  # ten augmented epochs for each candidate


def test_the_same_views_are_drawn_for_every_candidate():
    support = replace(make_support(), augment=lambda image: image + torch.rand(()))
    notes = fitted(LCCS(statistics="ema", epochs=0, grid=2), support=support).notes
    again = fitted(LCCS(statistics="ema", epochs=0, grid=3), support=support).notes
    assert notes["grid"][1]["loss"] == again["grid"][2]["loss"]


def test_exact_statistics_ignore_the_augmentation_in_the_grid():
    support = make_support()
    noisy = replace(support, augment=lambda image: image * 3)
    left = fitted(LCCS(statistics="exact", epochs=0), support=support).notes["grid"]
    assert left == fitted(LCCS(statistics="exact", epochs=0), support=noisy).notes["grid"]


# where the released code differs


def test_released_takes_one_step_per_epoch_on_a_full_minibatch():
    sizes = []

    def record(logits, labels):
        sizes.append(len(labels))
        return F.cross_entropy(logits, labels)

    support = make_support(shots=5, classes=7)  # N = 35
    model = make_tiny(classes=7)
    kwargs = {"init": 0.5, "epochs": 3, "classifier": "source"}
    paper = LCCS(**kwargs).fit(model, Target(support, loss=record))
    assert paper.notes["steps"] == 6
    assert sorted(sizes) == [3] * 3 + [32] * 3
    sizes.clear()
    released = LCCS(variant="released", **kwargs).fit(model, Target(support, loss=record))
    assert released.notes["steps"] == 2  # the third is never used
    assert sizes == [32, 32]
    big = make_support(shots=10, classes=7)
    assert LCCS(**kwargs).fit(model, Target(big)).notes["steps"] == 9


def test_released_with_one_epoch_is_released_with_none():
    none, one = (logits(LCCS(variant="released", epochs=epochs, classifier="ncc")) for epochs in (0, 1))
    assert torch.equal(none, one)
    none, one = (logits(LCCS(epochs=epochs, classifier="ncc")) for epochs in (0, 1))
    assert not torch.equal(none, one)


def test_released_uses_the_last_step_when_a_head_is_trained_after_it():
    notes = fitted(LCCS(variant="released", epochs=3, classifier="finetuned")).notes
    assert notes["steps"] == 3
    assert len(notes["classifier_loss"]) == 10


def test_released_adapts_in_float64_and_answers_in_the_networks_type():
    types = []

    def record(logits, labels):
        types.append(logits.dtype)
        return F.cross_entropy(logits, labels)

    predictor = LCCS(variant="released").adapt(make_tiny(), Target(make_support(), loss=record))
    assert set(types) == {torch.float64}
    assert predictor(make_support().images).dtype == torch.float32
    span = Span(torch.zeros(4, 3).double(), torch.zeros(4, 3).double())
    first, rest, *_ = Linear(span, 0.5, split=True).parameters()
    assert (first.dtype, rest.dtype) == (torch.float32, torch.float64)


def test_a_reference_run_in_float64_is_near_the_ordinary_one():
    ordinary, reference = logits(LCCS()), logits(LCCS(adapt_dtype="float64"))
    assert torch.allclose(ordinary, reference, atol=1e-2)
    assert not torch.equal(ordinary, reference)


def test_sigma_may_not_reach_zero_in_the_paper_variant():
    exploding = Target(make_support(), loss=lambda logits, labels: -logits.abs().mean())
    settings = {"init": 0.0, "lr": 0.1, "n": 1, "epochs": 15, "classifier": "source"}
    with pytest.raises(FewshiftError, match=r"channels of layer 'bn\d' reached a standard deviation of zero"):
        LCCS(**settings).fit(make_tiny(), exploding)
    floored = LCCS(min_sigma=0.05, **settings).fit(make_tiny(), exploding)
    assert min(layer["min_sigma"] for layer in floored.layers.values()) == pytest.approx(0.05)


# degenerate inputs


def test_a_dead_layer_stays_finite():
    model = make_tiny()
    nn.init.zeros_(model.conv2.weight)
    assert torch.isfinite(logits(LCCS(), model)).all()


def test_a_channel_without_gamma_is_constant_and_can_be_lifted():
    model = make_tiny()
    with torch.no_grad():
        model.bn1.weight[0] = 0
    assert fitted(LCCS(classifier="source"), model).predictor.bn1.weight[0] == 0
    assert fitted(LCCS(classifier="source", gamma_floor=1e-2), model).predictor.bn1.weight[0] != 0


@pytest.mark.parametrize("n", [1, 100, "k*classes", 0.9])
def test_one_image_per_class_and_one_pixel_maps_stay_finite(n):
    torch.manual_seed(0)
    model = unsettle(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 2),
        )
    )  # fmt: skip
    support = make_support(shots=1, classes=2)
    result = fitted(LCCS(n=n), model, support)
    assert torch.isfinite(result.predictor(support.images)).all()
    assert result.layers["5"]["n"][1] == 1  # no spatial deviation per image: the pooled one alone
    with pytest.raises(FewshiftError, match="one position per image"):
        fitted(LCCS(variant="released", n=n), model, support)


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0}, {"n": 1.5}, {"n": "all"}, {"init": 1.5}, {"init": "best"}, {"grid": 1}, {"epochs": -1},
        {"classifier": "knn"}, {"variant": "mine"}, {"combination": "x"}, {"objective": "x"}, {"statistics": "x"},
        {"batch_size": 0}, {"adapt_dtype": "int8"}, {"classifier": "evidence"},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_in_one_sentence(bad):
    with pytest.raises(FewshiftError, match=next(iter(bad))):
        LCCS(**bad)

"""A blend by leave-one-out statistics, heads on it, and the method `auto` that chooses between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fewshift
from fewshift import FewshiftError, Network, Support, Target
from fewshift.core.losses import log_losses
from fewshift.core.reading import read, tied
from fewshift.core.support import Unlabelled
from fewshift.lab.datasets import digits
from fewshift.methods._blending import GRID
from fewshift.methods._refining import Refinement, Steps, last_weights
from fewshift.methods.auto import Auto
from fewshift.methods.blend import Blend, BlendAll, BlendHead, refined
from fewshift.methods.lccs import LCCS
from tests.core.test_leaving_out import naive_apart
from tests.helpers.networks import make_support, make_tiny, same_state, scenes, state, street, unsettle

QUICK = Auto(epochs=1)
STEPS = Steps(epochs=1, lr=2e-3, loss=F.cross_entropy, seed=0)


def worth(model: nn.Module, images: torch.Tensor) -> float:
    """James and Stein: of a distance of s sampling errors, the share that is more than chance."""
    return max(0.0, 1 - 1 / fewshift.shift(model, images).score ** 2)


def naive_v(model: nn.Module, support: Support, prior: float) -> float:
    """The v with the least tempered loss of all images, each judged apart, and prior."""
    costs = {}
    for share in GRID:
        v = share * worth(model, support.images)
        with torch.no_grad():
            losses = log_losses(naive_apart(model, support.images, v), support.labels)
        away = (share - 0.2) / (0.8 if share > 0.2 else 0.2)
        costs[v] = float(losses.sum()) + prior * away**2
    return min(costs, key=lambda v: costs[v])


@pytest.mark.parametrize("shots", [1, 3, 6])
@pytest.mark.parametrize("prior", [0.0, 2.0, 1000.0])
def test_v_has_the_least_loss_apart_and_prior(shots, prior):
    model, support = make_tiny(), make_support(shots)
    chosen = Blend(prior=prior).fit(model, Target(support)).notes["v"]
    assert chosen == pytest.approx(naive_v(model, support, prior))
    assert prior < 1000 or chosen == pytest.approx(0.2 * worth(model, support.images))


def test_images_that_look_like_the_sources_leave_its_statistics():
    model, (own, labels) = digits.source_network(), digits.split()[1]
    generator, silent = torch.Generator().manual_seed(0), 0
    for _ in range(5):
        chosen = torch.cat(
            [torch.where(labels == digit)[0][torch.randperm(20, generator=generator)[:2]] for digit in range(10)]
        )
        support = Support(digits.normalise(own[chosen]), labels[chosen])
        score = fewshift.shift(model, support.images).score
        fitted = Blend(prior=0).fit(model, Target(support))
        assert fitted.notes["reach"] == pytest.approx(max(0.0, 1 - 1 / max(score, 1) ** 2), abs=1e-6)
        if score <= 1:
            silent += 1
            assert fitted.notes["v"] == 0
            assert same_state(state(fitted.predictor), state(model))
    assert silent > 0


def test_a_blend_is_the_source_with_v_of_the_supports_statistics():
    model, support = make_tiny(), make_support(4)
    fitted = Blend().fit(model, Target(support))
    network = Network.of(model, support.images)
    expected = read(network, [support.images], tied(network, fitted.notes["v"])).logits[0]
    with torch.no_grad():
        assert torch.allclose(fitted.predictor(support.images), expected, atol=1e-5)


def test_images_of_different_sizes_are_worth_what_their_shift_says():
    model, support = make_tiny(), make_support(3)
    sizes = [F.interpolate(image[None], (10, 10))[0] if at % 2 else image for at, image in enumerate(support.images)]
    fitted = Blend().fit(model, Target(Support(sizes, support.labels)))
    assert fitted.notes["reach"] == pytest.approx(1 - 1 / fewshift.shift(model, sizes).score ** 2)


def test_a_single_image_leaves_the_sources_statistics():
    support = scenes(1)
    assert same_state(state(Blend().adapt(street(), Target(support))), state(street()))


def test_lccs_can_choose_v_with_each_image_left_out():
    model, support = make_tiny(), make_support(2)
    fitted = LCCS(statistics="leave-one-out", epochs=0, classifier="source").fit(model, Target(support))
    for point in fitted.notes["grid"]:
        with torch.no_grad():
            loss = F.cross_entropy(naive_apart(model, support.images, point["v"]), support.labels)
        assert point["loss"] == pytest.approx(float(loss), abs=1e-5)


def test_unlabelled_images_share_in_the_statistics():
    model, support, others = make_tiny(), make_support(3), make_support(20, seed=1)
    alone, together = (
        Blend(prior=1e6).adapt(model, Target(support, unlabelled)) for unlabelled in (None, Unlabelled(others.images))
    )
    network = Network.of(model, support.images)
    together_images = torch.cat([support.images, others.images])
    v = 0.2 * worth(model, together_images)
    expected = read(network, [together_images], tied(network, v)).logits[0]
    with torch.no_grad():
        assert torch.allclose(together(support.images), expected[: len(support)], atol=1e-5)
        assert not torch.allclose(alone(support.images), together(support.images), atol=1e-3)


def test_unlabelled_images_that_lack_classes_are_left_out():
    model, support = make_tiny(), make_support(6)
    few = Unlabelled(support.images[support.labels == 0].repeat(10, 1, 1, 1))
    alone = BlendHead().fit(model, Target(support))
    left_out = BlendHead().fit(model, Target(support, few))
    assert left_out.notes["unlabelled"]["used"] is False
    assert same_state(state(left_out.predictor), state(alone.predictor))


def test_a_new_head_needs_an_image_of_every_class():
    support = make_support(2).part(torch.tensor([0, 3, 1, 4]))
    with pytest.raises(FewshiftError, match=r"class 2 has no support image.*blend"):
        BlendHead().fit(make_tiny(), Target(support))
    result = fewshift.adapt(make_tiny(), support, method=QUICK, accept="always")
    assert list(result.choice.answers) == ["blend"]
    assert not any(name.startswith("fc") for name in result.delta.bits)


def test_the_last_layers_hold_three_quarters_of_the_weights():
    model, support = make_tiny(), make_support(1)
    weights = {id(weight) for weight in last_weights(model, "fc", support, 0.5)}
    names = {name for name, weight in model.named_parameters() if id(weight) in weights}
    # of 512 weights in the body, conv2 has 324 and comes last but for bn2
    assert names == {"fc.weight", "fc.bias", "bn2.weight", "bn2.bias", "conv2.weight"}
    everything = {id(weight) for weight in last_weights(model, "fc", support, 1.0)}
    assert everything == {id(weight) for weight in model.parameters()}


def test_with_no_epochs_the_tuned_network_is_the_mean_of_blends_without_each_fold():
    model, support = make_tiny(), make_support(3)
    tuned = BlendAll(epochs=0, prior=1e6).adapt(model, Target(support))
    v, parts = 0.2 * worth(model, support.images), []
    for fold in support.kind.folds(support.labels, 3, torch.Generator().manual_seed(0)):
        rest = torch.tensor([place for place in range(len(support)) if place not in fold.tolist()])
        kept = Target(support.part(rest))
        parts.append(LCCS(init=v, epochs=0, n=1, classifier="source").adapt(model, kept).bn1.weight)
    assert torch.allclose(tuned.bn1.weight, torch.stack(parts).mean(0), atol=1e-6)


# auto


def test_auto_hands_over_the_candidate_that_it_names():
    model, support = make_tiny(), make_support(5)
    result = fewshift.adapt(model, support, method=QUICK, accept="always")
    methods = {"blend": Blend(), "blend + head": BlendHead(epochs=1), "blend + all": BlendAll(epochs=1)}
    assert set(result.choice.answers) == set(methods)
    adapted = methods[result.choice.chosen].adapt(model, Target(support))
    temperature = result.notes.get("temperature", 1.0)
    with torch.no_grad():
        assert torch.allclose(result.model(support.images), adapted(support.images) / temperature, atol=1e-5)


@pytest.mark.parametrize("name", ["head_held_out", "tuned_held_out"])
def test_the_labels_of_a_fold_have_no_say_in_its_answers(name):
    first, _ = refined(make_tiny(), Target(make_support(6)), "blend-all", 2.0, STEPS)
    fold = first.folds[0]
    labels = first.blend.support.targets.clone()
    labels[fold] = (labels[fold] + 1) % 3
    support = replace(first.blend.support, labels=labels)
    other = Refinement(replace(first.blend, support=support), STEPS)
    other.__dict__["folds"] = first.folds  # those that the first labels gave
    before, after = (torch.cat(getattr(part, name)()) for part in (first, other))
    assert torch.equal(before[fold], after[fold])
    assert not torch.equal(before, after)


def test_an_image_unlike_all_others_does_not_blow_up_a_deep_network():
    layers = [module for _ in range(30) for module in (nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU())]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)).eval()
    images = make_support(2).images.clone()
    images[0] *= 30
    network = Network.of(model, images)
    logits = read(network, [images], tied(network, 1.0), leave_out=True).logits[0]
    assert float(logits.abs().max()) < 100
    assert fewshift.adapt(model, Support(images, torch.arange(6) % 3), method=QUICK, accept="always").gain is not None


def test_a_layer_that_folds_frames_into_its_batch_leaves_nothing_out():
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            hidden = self.bn(self.conv(images.repeat_interleave(5, 0))).relu()
            return self.fc(hidden.mean((2, 3)).view(len(images), 5, -1).mean(1))

    support = make_support(3)
    network = Network.of(unsettle(Frames()), support.images)
    apart, together = (
        read(network, [support.images], tied(network, 0.5), leave_out=way).logits[0] for way in (True, False)
    )
    assert torch.equal(apart, together)
    assert fewshift.adapt(unsettle(Frames()), support, method=QUICK, accept="always").gain is not None


def test_a_candidate_that_diverges_is_not_taken():
    result = fewshift.adapt(make_tiny(), make_support(4), method=Auto(epochs=1, lr=1e10), validate=None)
    assert result.choice.chosen != "blend + all"
    assert all(torch.isfinite(tensor).all() for tensor in result.model.state_dict().values())


def test_a_head_that_shares_its_weight_is_not_replaced():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_tiny(6)
            self.again = nn.Linear(6, 6)
            self.again.weight = self.inner.fc.weight

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.again(self.inner(images))

    result = fewshift.adapt(Tied(), make_support(4, classes=6), method=QUICK, accept="always")
    assert list(result.choice.answers) == ["blend"]
    assert "only candidate" in result.to_json()["why"]


def test_weights_that_were_not_trained_stay_bit_for_bit():
    model = make_tiny(width=12)
    adapted = BlendAll(epochs=1).adapt(model, Target(make_support(6)))
    trained = {id(weight) for weight in last_weights(model, "fc", make_support(1), 0.75)}
    for name, weight in model.named_parameters():
        if id(weight) not in trained and not name.startswith("bn"):
            assert torch.equal(weight, adapted.get_parameter(name))
    assert torch.equal(model.bn1.running_mean, adapted.bn1.running_mean)


@pytest.mark.parametrize(("shots", "everything"), [(7, False), (8, True)])
def test_from_eight_images_per_class_on_all_layers_are_trained(shots, everything):
    model = make_tiny(width=12)  # its second convolution has four in five of the weights
    adapted = BlendAll(epochs=1).adapt(model, Target(make_support(shots)))
    assert torch.equal(model.conv1.weight, adapted.conv1.weight) is not everything


@pytest.mark.parametrize(("classes_there", "used"), [(40, True), (5, False)])
def test_a_fair_sample_of_many_classes_is_used_and_a_few_of_them_are_not(classes_there, used):
    # 30 images cannot show more than three quarters of 40 classes, and that is not held against them
    model = nn.Sequential(nn.BatchNorm1d(40), nn.Linear(40, 40)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(40))
    rows = torch.eye(40) + 0.01 * torch.randn(40, 40, generator=torch.Generator().manual_seed(1))
    support = Support(torch.cat([rows, rows]), torch.arange(40).repeat(2))
    drawn = torch.randint(classes_there, (30,), generator=torch.Generator().manual_seed(0))
    _, notes = refined(model, Target(support, Unlabelled(rows[drawn])), "blend", 2.0, STEPS)
    assert notes["unlabelled"]["used"] is used


def test_a_page_of_a_single_scene_is_written(tmp_path):
    assert fewshift.adapt(street(), scenes(1), method=QUICK).report(tmp_path / "page.html").exists()


def test_with_one_image_of_each_class_the_head_is_taken_and_the_body_held():
    result = fewshift.adapt(make_tiny(), make_support(1), method=QUICK, accept="always")
    assert result.choice.chosen == "blend + head"
    assert not any(name.startswith("conv") for name in result.delta.bits)


def test_a_small_delta_leaves_the_convolutions():
    model, support = make_tiny(), make_support(4)
    result = fewshift.adapt(model, support, method=QUICK, accept="always", size="small")
    assert not any(name.startswith("conv") for name in result.delta.bits)
    assert result.choice.large == ("blend + all",)
    assert "blend + all" in result.choice.answers  # judged all the same
    assert "large delta" in result.to_json()["why"]


def test_a_size_is_a_choice_of_auto_alone():
    with pytest.raises(FewshiftError, match=r"size='small'.*not of 'lccs'"):
        fewshift.adapt(make_tiny(), make_support(2), method="lccs", size="small")
    with pytest.raises(FewshiftError, match="size"):
        fewshift.adapt(make_tiny(), make_support(2), size="tiny")


def test_every_candidate_stands_in_the_json():
    facts = fewshift.adapt(make_tiny(), make_support(4), method=QUICK, accept="always").to_json()
    assert [row["name"] for row in facts["candidates"]] == ["blend + all", "blend + head", "blend"]
    assert [row["name"] for row in facts["candidates"] if row["chosen"]] == [facts["chosen"]]
    assert [row["large"] for row in facts["candidates"]] == [True, False, False]


def test_pixels_have_the_same_candidates():
    result = fewshift.adapt(street(), scenes(3), method=QUICK, accept="always")
    assert list(result.choice.answers) == ["blend + all", "blend + head", "blend"]
    assert result.gain is not None


def test_in_half_precision_auto_works_and_returns_half():
    result = fewshift.adapt(make_tiny().half(), make_support(4), method=QUICK, accept="always")
    assert result.choice.chosen in ("blend + all", "blend + head", "blend")
    assert result.model.fc.weight.dtype == torch.float16


def test_a_network_without_a_known_head_gets_a_blend():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_tiny()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(images)

    result = fewshift.adapt(Scaled(), make_support(4), method=QUICK, accept="always")
    assert list(result.choice.answers) == ["blend"]


def test_settings_are_part_of_the_method():
    assert replace(Auto(), size="small") == Auto(size="small")
    with pytest.raises(FewshiftError, match="size"):
        Auto(size="medium")


@pytest.mark.parametrize("method", [QUICK, LCCS(epochs=1, grid=2), BlendAll(epochs=1)])
def test_volumes_are_adapted_like_pictures(method):
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Linear(4, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.fc(self.bn(self.conv(images)).relu().mean((2, 3, 4)))

    images = torch.randn(9, 1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    result = fewshift.adapt(Volume(), (images, torch.arange(9) % 3), method=method, accept="always", validate=None)
    assert result.delta.bits
    assert torch.isfinite(result.model(images)).all()

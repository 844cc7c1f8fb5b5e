"""Networks with other norms (ibn, switchable-whitening, iternorm): where layers go, training, adaptation afterwards."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace
from functools import cache

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.models import resnet as timm_resnet
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet

import fewshift
from fewshift import LCCS, FewshiftError, Target
from fewshift.core.network import is_batchnorm, list_layers
from fewshift.core.normalisation import InstanceBatchNorm, InstanceNorm
from fewshift.lab.training import ALGORITHMS, algorithm_of
from fewshift.lab.training.trainer import train
from fewshift.methods.catalog import METHODS
from fewshift.models import libraries
from fewshift.models.layers.placement import normalise_at
from tests.helpers.networks import make_support, same_state, state, unsettle
from tests.helpers.training import (
    RECIPE,
    Small,
    StoppedError,
    make_checkpoint,
    make_small,
    make_sources,
    stop_in_epoch,
)

CASES = {
    "ibn a": ("ibn", {"variant": "a"}),
    "ibn b": ("ibn", {"variant": "b"}),
    "switchable-whitening": ("switchable-whitening", {"group": 4, "decay": 0.8}),
    "iternorm": ("iternorm", {"group": 8}),
    "isw": ("isw", {"plain_epochs": 1, "trials": 2, "images": 8}),
}
BLOCKS = {
    "torchvision basic": torchvision_resnet.BasicBlock,
    "torchvision bottleneck": torchvision_resnet.Bottleneck,
    "timm basic": timm_resnet.BasicBlock,
    "timm bottleneck": timm_resnet.Bottleneck,
}


def make_images(count: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def modified(case: str, model: nn.Module) -> nn.Module:
    name, settings = CASES[case]
    return algorithm_of(name, settings).modify(model)


def kinds(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


# --- where layers go


def test_variant_a_of_resnet_50_keeps_53_batchnorm_layers_of_which_13_are_halved_and_b_keeps_52():
    with torch.device("meta"):
        whole, a, b = (torchvision.models.resnet50() for _ in range(3))
    algorithm_of("ibn", {"variant": "a"}).modify(a)
    algorithm_of("ibn", {"variant": "b"}).modify(b)
    channels, halved = ({layer.name: layer.channels for layer in list_layers(model).layers} for model in (whole, a))
    assert [len(list_layers(model).layers) for model in (whole, a, b)] == [53, 53, 52]
    half = {name: count for name, count in halved.items() if name not in channels}
    assert len(half) == 13
    assert all(count == channels[name.removesuffix(".batch")] / 2 for name, count in half.items())
    assert all(name.endswith("bn1.batch") and name.startswith(("layer1", "layer2", "layer3")) for name in half)
    assert kinds(b, InstanceNorm) == ["bn1", "layer1.2.after_addition.norm", "layer2.3.after_addition.norm"]
    assert [b.get_submodule(name).num_features for name in kinds(b, InstanceNorm)] == [64, 256, 512]


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_end_of_a_stage_is_normalised_after_the_addition_and_before_the_activation(kind):
    model = make_small(BLOCKS[kind])
    block = model.layer1[-1]
    inputs = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    last = "bn3" if "bottleneck" in kind else "bn2"
    hook = block.get_submodule(last).register_forward_hook(lambda _, __, output: seen.append(output.clone()))
    block(inputs)
    hook.remove()
    normalise_at(model, "layer1", InstanceNorm)
    norm = unsettle_affine(block.after_addition.norm)
    expected = F.instance_norm(seen[0] + inputs, weight=norm.weight, bias=norm.bias).relu()
    torch.testing.assert_close(block(inputs), expected)
    torch.testing.assert_close(block(inputs), expected)  # nothing is left over from the first pass
    assert not hasattr(model.layer1[0], "after_addition")


def unsettle_affine(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.weight.mul_(1.7)
        norm.bias.add_(0.2)
    return norm


def test_the_stem_of_variant_b_inherits_gamma_and_beta_and_new_layers_begin_at_1_and_0():
    source = make_small()
    model = modified("ibn b", copy.deepcopy(source))
    assert torch.equal(model.bn1.weight, source.bn1.weight)
    assert torch.equal(model.bn1.bias, source.bn1.bias)
    for name in ("layer1.1.after_addition.norm", "layer2.0.after_addition.norm"):
        assert (model.get_submodule(name).weight == 1).all()
        assert (model.get_submodule(name).bias == 0).all()


def test_variant_a_leaves_what_it_does_not_replace_and_inherits_the_rest():
    source = make_small()
    model = modified("ibn a", copy.deepcopy(source))
    replaced = kinds(model, InstanceBatchNorm)
    assert replaced == ["layer1.0.bn1", "layer1.1.bn1", "layer2.0.bn1", "layer3.0.bn1", "layer3.1.bn1"]
    for name in replaced:
        layer, old = model.get_submodule(name), source.get_submodule(name)
        assert torch.equal(torch.cat([layer.instance.weight, layer.batch.weight]), old.weight)
        assert torch.equal(layer.batch.running_var, old.running_var[4:])
    kept = {name: tensor for name, tensor in model.state_dict().items() if name in source.state_dict()}
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in kept.items())


@cache
def without_values(name: str) -> nn.Module:
    """A network of which only the shapes are there."""
    return libraries.load(name, "random", classes=list("abc")).to("meta")


@pytest.mark.parametrize(
    "name", ["timm:resnet18d", "torchvision:resnet18", "smp:deeplabv3plus/resnet18", "smp:unet/tu-resnet18"]
)
@pytest.mark.parametrize("case", ["ibn a", "ibn b", "isw"])
def test_libraries_resnets_are_known_by_name(name, case):
    if name.startswith("smp"):
        pytest.importorskip("segmentation_models_pytorch")
    model = copy.deepcopy(without_values(name))
    with torch.device("meta"):
        count = sum(map(is_batchnorm, model.modules()))
        modified(case, model)
        expected = {"ibn a": count, "ibn b": count - 1, "isw": count - 1}[case]
        assert sum(map(is_batchnorm, model.modules())) == expected
        assert len(kinds(model, InstanceNorm)) == {"ibn a": 6, "ibn b": 3, "isw": 3}[case]
        model(torch.zeros(2, 3, 64, 64))


def test_layers_may_be_named():
    model = algorithm_of("iternorm", {"group": 4, "layers": "layer2.0.bn2, layer3.1"}).modify(make_small())
    kind = fewshift.core.normalisation.IterNormLayer
    assert kinds(model, kind) == ["layer2.0.bn2", "layer3.1.after_addition.norm"]
    model = algorithm_of("ibn", {"variant": "a", "share": 0.25, "layers": "bn1,layer4,layer1.1"}).modify(make_small())
    assert kinds(model, InstanceBatchNorm) == ["bn1", "layer1.1.bn1", "layer4.0.bn1"]
    assert model.bn1.instance.num_features == 2


def test_an_activation_that_is_part_of_a_batchnorm_layer_is_kept():
    from timm.layers import BatchNormAct2d

    model = nn.Sequential(unsettle(BatchNormAct2d(8)))
    images = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = model(images)
    algorithm_of("iternorm", {"group": 4, "layers": "0"}).modify(model)
    torch.testing.assert_close(model(images), expected)  # as it begins, it is the BatchNorm layer
    assert (expected >= 0).all()


@pytest.mark.parametrize(
    ("case", "model", "settings", "facts"),
    [
        ("iternorm", Small, {}, "'bn1': 8 channels .*groups of 64"),
        ("isw", Small, {"layers": "bn1,layer9"}, "Small .*'layer9'"),
        ("isw", Small, {"layers": ""}, "Small .*layer ''"),
        ("isw", Small, {"layers": "layer1,layer1.1"}, r"'layer1\.1' .*named already"),
        ("isw", Small, {"layers": "layer1,layer1"}, "'layer1' .*twice"),
        ("isw", Small, {"layers": "fc"}, "'fc' is a Linear.*BatchNorm"),
        ("ibn", Small, {"variant": "a", "layers": "conv1"}, "'conv1' is a Conv2d.*BatchNorm"),
        ("ibn", Small, {"variant": "a", "share": 0.1}, r"'layer1\.0\.bn1': .*0\.1 of 8 channels"),
        ("ibn", lambda: nn.Sequential(nn.BatchNorm2d(4)), {}, "Sequential .*layer1 to layer4"),
        ("iternorm", lambda: Small(stem="norm"), {}, "Small .*BatchNorm layer 'bn1'"),
    ],
)
def test_places_that_cannot_be_are_named(case, model, settings, facts):
    with pytest.raises(FewshiftError, match=facts):
        algorithm_of(case, settings).modify(model())


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("ibn", {"variant": "c"}, "variant='c' is unknown: choose one of a, b"),
        ("ibn", {"variant": "a", "share": 1.0}, r"share=1.0 leaves one side empty: give a number between 0 and 1"),
        ("ibn", {"share": 0.25}, "share is of variant a, and variant b normalises all channels: leave it out"),
        ("iternorm", {"group": 0}, "group=0 is too small: give at least 1"),
        ("iternorm", {"decay": 1.5}, "decay=1.5 is no share: give a number from 0 to 1"),
        ("switchable-whitening", {"decay": 1.5}, "decay=1.5 is no share: give a number from 0 to 1"),
        ("switchable-whitening", {"tied": 1}, "tied=1 cannot be: give true or false"),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(name, settings, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        algorithm_of(name, settings)


# --- networks with such layers are ordinary networks


@pytest.mark.parametrize("case", CASES)
def test_the_same_settings_build_the_network_its_weights_fit(case):
    trained = unsettle_norms(modified(case, make_small(seed=3)))
    again = modified(case, make_small(seed=4)).eval()
    again.load_state_dict(trained.state_dict(), strict=True)
    assert torch.equal(again(make_images()), trained(make_images()))
    for same in (copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert torch.equal(same(make_images()), trained(make_images()))


def unsettle_norms(model: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.train()(make_images(8, seed=5))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def test_a_copy_has_hooks_of_its_own():
    model = modified("ibn b", make_small())
    other = copy.deepcopy(model)
    before = model(make_images())
    unsettle_affine(other.layer1[1].after_addition.norm)
    assert not torch.equal(other(make_images()), before)
    assert torch.equal(model(make_images()), before)


def test_a_pass_that_was_broken_off_leaves_nothing_behind():
    model = modified("ibn b", make_small())
    expected = model(make_images())

    def stop(*_: object) -> None:
        raise StoppedError

    hook = model.layer1[1].bn2.register_forward_hook(stop)  # after it the addition is due
    with pytest.raises(StoppedError):
        model(make_images())
    hook.remove()
    assert torch.equal(model(make_images()), expected)


def test_threads_that_share_a_network_do_not_disturb_each_other():
    model = modified("ibn b", make_small())
    images = [make_images(seed=seed) for seed in range(2)]
    expected = [model(image) for image in images]
    meeting, answers = threading.Barrier(2), {}
    model.layer1[1].bn2.register_forward_hook(lambda *_: (meeting.wait(10), None)[1])  # both between norm and sum

    threads = [threading.Thread(target=lambda n=n: answers.update({n: model(images[n])})) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(torch.equal(answers[n], expected[n]) for n in range(2))


# --- training


@pytest.mark.parametrize("case", ["ibn a", "switchable-whitening"])
def test_a_training_that_is_stopped_and_resumed_has_the_bits_of_one_that_was_not(case, tmp_path):
    name, settings = CASES[case]
    recipe, algorithm = replace(RECIPE, lr=0.02), algorithm_of(name, settings)
    sources, model = make_sources(), make_small()
    whole = train(model, sources, recipe, algorithm)
    with pytest.raises(StoppedError):
        train(model, sources, recipe, algorithm, checkpoint=make_checkpoint(tmp_path), hear=stop_in_epoch(2))
    checkpoint = make_checkpoint(tmp_path)
    resumed = train(model, sources, recipe, algorithm, checkpoint=checkpoint, resume=True)
    assert same_state(state(resumed.model), state(whole.model))
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]
    fresh = algorithm_of(name, settings).modify(make_small(seed=9)).eval()
    fresh.load_state_dict(checkpoint.weights(), strict=True)
    torch.testing.assert_close(fresh(make_images()), whole.model(make_images()))
    assert same_state(state(model), state(make_small()))
    begun = algorithm.modify(copy.deepcopy(model)).state_dict()
    for key in begun:  # every parameter and running moment has learned
        assert not torch.equal(whole.model.state_dict()[key], begun[key]), key


@pytest.mark.parametrize("case", ["ibn b", "isw"])
def test_maps_of_one_pixel_are_told_before_training(case):
    name, settings = CASES[case]

    class Shrinking(Small):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(F.adaptive_avg_pool2d(images, 1))

    with pytest.raises(FewshiftError, match=r"the maps of layer 'bn1' have one pixel, and instance normalisation"):
        train(Shrinking(), make_sources(), RECIPE, algorithm_of(name, settings))


def test_all_four_are_listed():
    assert {"ibn", "switchable-whitening", "iternorm", "isw"} <= ALGORITHMS.keys()


# --- adaptation of what was trained


@pytest.fixture(scope="module")
def trained() -> dict[str, nn.Module]:
    sources, recipe = make_sources(), replace(RECIPE, epochs=2, lr=0.02)
    return {
        case: train(make_small(), sources, recipe, algorithm_of(name, settings)).model
        for case, (name, settings) in CASES.items()
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["lccs", "finetune-bn", "adabn"])
def test_batchnorm_is_adapted_and_the_new_layers_are_left_alone(case, method, trained):
    model, target = trained[case], Target(make_support(size=8))
    before, logits = state(model), model(make_images())
    adapted = METHODS[method]().adapt(model, target)
    assert same_state(state(model), before)
    assert adapted.state_dict().keys() == before.keys()
    layers = {layer.name for layer in list_layers(model).layers}
    changed = {key for key in before if not torch.equal(before[key], adapted.state_dict()[key])}
    assert {key.rpartition(".")[0] for key in changed} - {"fc"} == layers
    assert adapted(make_images()).isfinite().all()
    assert not torch.equal(adapted(make_images()), logits)


@pytest.mark.parametrize("case", CASES)
def test_lccs_without_steps_is_the_source_network(case, trained):
    images = make_images()
    adapted = LCCS(epochs=0, init=0.0, classifier="source").adapt(trained[case], Target(make_support(size=8)))
    torch.testing.assert_close(adapted(images), trained[case](images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_images_read_one_after_the_other_give_what_they_give_together(case, trained):
    # passes are broken off in the middle for every layer: a norm after an addition must not notice
    support = make_support(size=8, shots=2)
    together = METHODS["adabn"]().adapt(trained[case], Target(support))
    apart = METHODS["adabn"]().adapt(trained[case], Target(replace(support, at_once=2)))
    for name, tensor in together.state_dict().items():
        torch.testing.assert_close(apart.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_timm_networks_train_too():
    torch.manual_seed(0)
    model = timm.models.resnet.ResNet(timm_resnet.BasicBlock, (1, 1, 1, 1), num_classes=3, channels=(16,) * 4)
    done = train(model, make_sources(), replace(RECIPE, epochs=1), algorithm_of("ibn", {"layers": "bn1,layer1"}))
    assert kinds(done.model, InstanceNorm) == ["bn1", "layer1.0.after_addition.norm"]

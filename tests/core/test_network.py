"""The view: which layers, which head, which logits; on strange networks too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import fewshift
from fewshift import LCCS, FewshiftError, Network, Target
from fewshift.core.network import logits_of
from tests.helpers.networks import Shared, make_support, make_tiny, unsettle


def sequential(*norms: nn.Module, after: nn.Module | None = None, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    body = [layer for norm in norms for layer in (nn.LazyConv2d(6, 3, padding=1), norm)]
    model = nn.Sequential(
        *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes), *([after] if after else [])
    )
    model(torch.zeros(2, 3, 8, 8))
    return unsettle(model)


QUICK = LCCS(grid=3, epochs=1, classifier="ncc")
NORMS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(6),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "BatchNormAct2d": lambda: BatchNormAct2d(6, act_layer=nn.SiLU),
    "FrozenBatchNorm2d": lambda: FrozenBatchNorm2d(6),
    "without affine": lambda: nn.BatchNorm2d(6, affine=False),
}


@pytest.mark.parametrize("kind", NORMS)
def test_every_kind_of_batchnorm_is_blended_exactly(kind):
    """Merging v = 0.5 equals the average of the two normalisations' inverse maps, written out by hand."""
    if kind == "SyncBatchNorm":
        model = sequential(nn.BatchNorm2d(6))
        layer = nn.SyncBatchNorm(6)
        layer.load_state_dict(model[1].state_dict())
        model[1] = layer.eval()
    else:
        model = sequential(NORMS[kind]())
    support = make_support()
    predictor = LCCS(init=0.5, epochs=0, classifier="source").adapt(model, Target(support))
    z = model[0](support.images)
    flat, norm = z.transpose(0, 1).flatten(1), model[1]
    mean = 0.5 * flat.mean(1) + 0.5 * norm.running_mean
    std = 0.5 * (flat.var(1, correction=0) + norm.eps).sqrt() + 0.5 * (norm.running_var + norm.eps).sqrt()
    shape = (1, -1, 1, 1)
    gamma = 1.0 if norm.weight is None else norm.weight.view(shape)
    beta = 0.0 if norm.bias is None else norm.bias.view(shape)
    hidden = gamma * (z - mean.view(shape)) / std.view(shape) + beta
    hidden = nn.functional.silu(hidden) if kind == "BatchNormAct2d" else hidden
    assert torch.allclose(predictor(support.images), model[2:](hidden), atol=1e-5)
    assert type(predictor[1]) is type(norm)


@pytest.mark.parametrize("kind", NORMS)
def test_every_kind_of_batchnorm_learns(kind):
    model = sequential(NORMS[kind]()) if kind != "SyncBatchNorm" else sequential(nn.BatchNorm2d(6))
    result = LCCS(init=0.5, epochs=3, n=2, classifier="source").fit(model, Target(make_support()))
    (layer,) = result.layers.values()
    assert all(value not in (0.0, 0.5) for value in layer["eta"] + layer["rho"])


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.BatchNorm1d, (15, 5)), (nn.BatchNorm1d, (15, 5, 9)), (nn.BatchNorm3d, (15, 5, 2, 4, 4))]
)
def test_other_dimensions_work(norm, shape):
    torch.manual_seed(0)
    model = unsettle(nn.Sequential(norm(5), nn.Flatten(), nn.Linear(torch.Size(shape[1:]).numel(), 3)))
    images = torch.randn(shape) * 2 + 1
    result = LCCS(epochs=2).fit(model, Target(fewshift.Support(images, torch.arange(15) % 3)))
    assert torch.isfinite(result.predictor(images)).all()


def test_layers_are_listed_in_order_of_execution_and_unused_ones_with_the_reason():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.BatchNorm2d(3)
            self.second, self.first = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.style = nn.InstanceNorm2d(3)
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.style(self.second(self.first(x))).mean((2, 3)))

    network = Network.of(Backwards(), torch.zeros(2, 3, 4, 4))
    assert [layer.name for layer in network.layers] == ["first", "second"]
    reasons = {layer.name: layer.reason for layer in network.skipped}
    assert reasons["unused"] == "never executed"
    assert "instance normalisation" in reasons["style"]
    assert network.head == "head"


def test_layers_without_running_statistics_are_refused_by_name():
    model = sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6, track_running_stats=False))
    with pytest.raises(FewshiftError, match="'3' keeps no running statistics"):
        fewshift.adapt(model, make_support())


def test_a_network_without_batchnorm_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    with pytest.raises(FewshiftError, match=r"no BatchNorm layer.*before fusing"):
        fewshift.adapt(model, make_support())


def test_a_fused_network_is_refused():
    model = sequential(nn.BatchNorm2d(6))
    fused = torch.nn.utils.fuse_conv_bn_eval(model[0], model[1])
    with pytest.raises(FewshiftError, match="start from the weights before fusing"):
        fewshift.adapt(nn.Sequential(fused, *model[2:]), make_support())


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = make_tiny(), wrap

    def forward(self, x):
        return self.wrap(self.net(x))


WRAPS = {
    "logits attribute": lambda out: SimpleNamespace(logits=out, hidden=None),
    "dict": lambda out: {"aux": out * 0, "out": out},
    "dict of logits": lambda out: {"logits": out},
    "tuple": lambda out: (out, None),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_logits_are_found_in_what_networks_return(kind):
    model, target = Wrapped(WRAPS[kind]), Target(make_support())
    plain, wrapped = (QUICK.adapt(net, target) for net in (make_tiny(), model))
    images = make_support(seed=2).images
    assert torch.equal(logits_of(wrapped(images)), plain(images))


def test_an_answer_without_logits_is_refused():
    with pytest.raises(FewshiftError, match="contains no logits"):
        fewshift.adapt(Wrapped(lambda out: "cat"), make_support())


def test_a_transformers_model_adapts():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    torch.manual_seed(0)
    model = unsettle(transformers.ResNetForImageClassification(config))
    adapted = QUICK.adapt(model, Target(make_support(size=32)))
    assert adapted(make_support(size=32).images).logits.shape == (15, 3)


@pytest.mark.parametrize(
    ("after", "head"),
    [(nn.Identity(), "4"), (nn.Dropout(), "4"), (nn.Softmax(1), None)],
    ids=["id", "dropout", "softmax"],
)
def test_the_head_is_the_layer_whose_output_is_the_networks(after, head):
    model = sequential(nn.BatchNorm2d(6), after=after)
    assert Network.of(model, make_support().images).head == head


def test_a_1x1_convolution_can_be_the_head():
    torch.manual_seed(0)
    model = unsettle(
        nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 3, 1), nn.Flatten()
        )
    )
    support = make_support()
    for classifier in ("ncc", "finetuned"):
        result = LCCS(classifier=classifier, epochs=1).fit(model, Target(support))
        assert result.predictor(support.images).shape == (15, 3)
        assert not torch.equal(result.predictor[4].weight, model[4].weight)


def test_a_network_without_a_head_still_adapts_with_its_own_classifier():
    model = sequential(nn.BatchNorm2d(6), after=nn.Softmax(1))
    assert LCCS(epochs=1).fit(model, Target(make_support())).notes["classifier"] == "source"
    with pytest.raises(FewshiftError, match="pass head='name'"):
        fewshift.adapt(model, make_support(), method=LCCS(classifier="ncc"))
    named = fewshift.adapt(model, make_support(), method=QUICK, head="4", validate=None)
    assert named.notes["classifier"] == "ncc"
    with pytest.raises(FewshiftError, match="head 'fc' is not a linear layer"):
        fewshift.adapt(model, make_support(), head="fc")


def test_a_layer_called_twice_adapts():
    torch.manual_seed(0)
    assert torch.isfinite(QUICK.adapt(unsettle(Shared()), Target(make_support()))(make_support().images)).all()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("fc.weight", float("nan"), "'fc.weight' contains NaN"),
        ("bn1.running_var", -1.0, "'bn1.running_var' contains a negative"),
    ],
)
def test_broken_weights_are_named(name, value, sentence):
    model = make_tiny()
    model.state_dict()[name].view(-1)[0] = value
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.adapt(model, make_support())


def test_images_the_network_cannot_take_are_one_sentence():
    with pytest.raises(FewshiftError, match=r"cannot run on images of shape \(2, 1, 8, 8\)"):
        fewshift.adapt(make_tiny(), make_support(channels=1))


def test_scripted_networks_and_other_things_are_refused():
    with pytest.raises(FewshiftError, match=r"expected an nn\.Module"):
        Network.of("resnet18", torch.zeros(1, 3, 4, 4))


def test_inspection_before_any_data_and_with_it(tiny):
    bare = fewshift.inspect(tiny)
    assert [layer.name for layer in bare.layers] == ["bn1", "bn2"]
    assert bare.layers[0].calls is None
    seen = fewshift.inspect(tiny, make_support().images)
    assert (seen.head, seen.classes, seen.layers[0].calls) == ("fc", 3, 1)
    assert seen.coefficients == 8
    assert seen.affine_parameters == 24

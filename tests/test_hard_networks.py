"""Networks of other kinds than most: what works gives what the plain twin gives, the rest gets one sentence."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import fewshift
from fewshift import LCCS, METHODS, AdaBN, Delta, FewshiftError, Network, Sites, Support, Target, Tent
from fewshift.core.delta import Fingerprint
from fewshift.core.method import Needs
from fewshift.core.support import Unlabelled
from tests.helpers.hard_networks import NoGradients, Remembering, made, twin
from tests.helpers.methods import quick
from tests.helpers.networks import Street, Tiny, make_support, make_tiny, same_state, scenes, state, unsettle

BATCHWISE = [name for name in METHODS if METHODS[name].needs is not Needs.STREAM]
FORWARD_ONLY = ["source", "adabn", "blend", "blend-head", "testtime-bn", "alpha-bn"]  # none learns by gradients
HEAD_ALONE = ["finetune-head", "late-fusion"]


def said(call):
    """The one sentence with which the call is refused."""
    with pytest.raises(FewshiftError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def target_of(support):
    return Target(support, Unlabelled(make_support(seed=3).images))


# --- torch.compile


@pytest.fixture
def compiled():
    network = make_tiny()
    return network, torch.compile(network, backend="eager")


@pytest.mark.parametrize("name", ["auto", "adabn", "lccs", "finetune-head", "source"])
def test_a_compiled_network_is_adapted_like_the_network_in_it(compiled, name, support):
    network, wrapped = compiled
    ours, expected = (fewshift.adapt(m, support, method=quick(name), accept="always") for m in (wrapped, network))
    assert type(ours.model) is Tiny
    assert same_state(state(ours.model), state(expected.model))
    assert ours.delta.source == Fingerprint.of(network)
    assert same_state(state(fewshift.apply(wrapped, ours.delta)), state(expected.model))


def test_a_compiled_network_is_the_network_in_it_everywhere(compiled, support, tmp_path):
    network, wrapped = compiled
    delta = fewshift.adapt(network, support, method="adabn", accept="always").delta
    delta.save(tmp_path / "one.safetensors")
    assert fewshift.inspect(wrapped, support.images) == fewshift.inspect(network, support.images)
    assert fewshift.inspect(wrapped) == fewshift.inspect(network)
    assert fewshift.shift(wrapped, support.images).score == fewshift.shift(network, support.images).score
    assert (
        fewshift.evaluate(wrapped, support, delta=delta).to_json()
        == fewshift.evaluate(network, support, delta=delta).to_json()
    )
    sites = [Sites(model, tmp_path)(support.images, of=["one"] * len(support)) for model in (wrapped, network)]
    assert torch.equal(*sites)
    assert Delta.between(wrapped, wrapped).bits == {}


def test_a_compiled_network_keeps_its_card():
    network = fewshift.load("timm:test_resnet", "random", classes=[f"c{n}" for n in range(10)])
    assert fewshift.api.known_card(torch.compile(network, backend="eager")) is fewshift.api.known_card(network)


def test_a_compiled_layer_inside_a_network_is_named(support):
    network = make_tiny()
    network.bn1 = torch.compile(network.bn1, backend="eager")
    assert "layer 'bn1' of the network is compiled" in said(lambda: fewshift.adapt(network, support))


# --- weights without values


def test_meta_tensors_are_refused_everywhere(support, tmp_path):
    fewshift.adapt(make_tiny(), support, method="adabn", validate=None).delta.save(tmp_path / "one.safetensors")
    network = make_tiny().to("meta")
    for call in (
        lambda: fewshift.adapt(network, support),
        lambda: AdaBN().adapt(network, Target(support)),
        lambda: fewshift.evaluate(network, support),
        lambda: fewshift.shift(network, support.images),
        lambda: fewshift.inspect(network, support.images),
        lambda: fewshift.compare(network, support),
        lambda: fewshift.apply(network, tmp_path / "one.safetensors"),
        lambda: fewshift.export(network, tmp_path / "one.onnx"),
        lambda: Sites(network, tmp_path),
    ):
        assert "is on the meta device and has no values" in said(call)


def test_weights_without_a_shape_are_refused(support):
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3)).eval()
    assert "'0.weight' has no shape yet" in said(lambda: fewshift.adapt(network, support))


# --- inference mode


@pytest.mark.parametrize("name", BATCHWISE)
def test_parameters_made_in_inference_mode_are_adapted_like_others(name, support):
    with torch.inference_mode():
        network = make_tiny()
    ours, expected = (quick(name).adapt(model, target_of(support)) for model in (network, make_tiny()))
    if METHODS[name]().plain:
        assert same_state(state(ours), state(expected))
    else:
        assert torch.equal(ours(support.images), expected(support.images))


def test_a_network_made_in_inference_mode_has_a_delta(support):
    with torch.inference_mode():
        network = make_tiny()
    ours, expected = (fewshift.adapt(model, support, accept="always") for model in (network, make_tiny()))
    assert ours.delta.adapted == expected.delta.adapted
    assert ours.gain == expected.gain


# --- gradients


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_methods_without_gradients_do_not_miss_them(name, support):
    network = made(NoGradients)
    ours, expected = (quick(name).adapt(model, Target(support)) for model in (network, twin(network, Tiny)))
    assert torch.equal(ours(support.images), expected(support.images))


def test_auto_leaves_out_the_candidate_that_needs_gradients(support):
    network = made(NoGradients)
    result = fewshift.adapt(network, support)
    assert "blend + all" not in result.choice.answers
    plain = fewshift.adapt(twin(network, Tiny), support, size="small")
    assert result.choice.answers["blend + head"].losses.equal(plain.choice.answers["blend + head"].losses)


def test_auto_adapts_a_network_without_gradients_that_labels_pixels():
    class Scene(Street):
        @torch.no_grad()
        def forward(self, images):
            return super().forward(images)

    torch.manual_seed(0)
    assert list(fewshift.adapt(unsettle(Scene()), scenes(3)).choice.answers) == ["blend"]


@pytest.mark.parametrize("name", [name for name in BATCHWISE if name not in (*FORWARD_ONLY, *HEAD_ALONE, "auto")])
def test_methods_that_need_gradients_say_so(name, support):
    call = partial(quick(name).adapt, made(NoGradients), target_of(support))
    assert "lets no gradients through" in said(call)


@pytest.mark.parametrize("name", HEAD_ALONE)
def test_a_head_is_trained_on_features_and_needs_no_gradients_of_the_network(name, support):
    network = made(NoGradients)
    method = replace(quick(name), bn="source_frozen")
    ours, expected = (method.adapt(model, Target(support)) for model in (network, twin(network, Tiny)))
    assert torch.equal(ours(support.images), expected(support.images))


@pytest.mark.parametrize("method", [LCCS(), Tent(), METHODS["blend-all"]()])
def test_they_say_so_before_any_work(method, support, monkeypatch):
    network = made(NoGradients)
    monkeypatch.setattr(fewshift.core.reading, "read", lambda *_, **__: pytest.fail("statistics were read"))
    assert "lets no gradients through" in said(lambda: method.adapt(network, Target(support)))


def test_lccs_without_steps_needs_no_gradients(support):
    network = made(NoGradients)
    ours, expected = (LCCS(epochs=0, grid=3).adapt(model, Target(support)) for model in (network, twin(network, Tiny)))
    assert same_state(state(ours), state(expected))


def test_a_detached_feature_is_one_sentence(support):
    class Detached(Tiny):
        def forward(self, images):
            return super().forward(images).detach()

    assert "lets no gradients through" in said(lambda: fewshift.adapt(made(Detached), support, method=quick("lccs")))


def test_probing_keeps_no_activations_and_the_parameters_as_they_are(support):
    network = make_tiny()
    view = Network.of(network, support.images)
    assert view.learns
    assert [id(parameter) for parameter in view.model.parameters()] == [
        id(parameter) for parameter in network.parameters()
    ]
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())


# --- images


@pytest.mark.parametrize("call", ["support", "adapt", "unlabelled", "shift", "evaluate", "inspect", "dataset"])
def test_sparse_images_are_refused(call, tiny, support):
    images = support.images.to_sparse()
    calls = {
        "support": lambda: Support(images, support.labels),
        "adapt": lambda: fewshift.adapt(tiny, (images, support.labels)),
        "unlabelled": lambda: fewshift.adapt(tiny, None, unlabelled=images, method="adabn"),
        "shift": lambda: fewshift.shift(tiny, images),
        "evaluate": lambda: fewshift.evaluate(tiny, (images, support.labels)),
        "inspect": lambda: fewshift.inspect(tiny, images),
        "dataset": lambda: fewshift.shift(tiny, [image.to_sparse() for image in support.images]),
    }
    assert "sparse" in said(calls[call])


STRANGE = {
    "meta": (lambda tensor: tensor.to("meta"), "meta device"),
    "nested": (lambda tensor: torch.nested.nested_tensor(list(tensor)), "nested"),
    "sparse": (lambda tensor: tensor.to_sparse(), "sparse"),
    "quantised": (lambda tensor: torch.quantize_per_tensor(tensor.float(), 1.0, 0, torch.qint8), "qint8"),
    "eight bits": (lambda tensor: tensor.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "one number": (lambda tensor: tensor.flatten()[0], "single number"),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("kind", STRANGE)
def test_images_and_labels_that_are_no_plain_numbers_are_refused(kind, tiny, support):
    change, fact = STRANGE[kind]
    images, labels = support.images, support.labels
    strange = change(images)
    for call in (
        lambda: Support(strange, labels),
        lambda: Support(images, change(labels)),
        lambda: fewshift.adapt(tiny, (strange, labels)),
        lambda: fewshift.adapt(tiny, (images, change(labels))),
        lambda: fewshift.adapt(tiny, (images, labels), unlabelled=strange, method="adabn"),
        lambda: fewshift.evaluate(tiny, (strange, labels)),
        lambda: fewshift.evaluate(tiny, (images, change(labels))),
        lambda: fewshift.shift(tiny, strange),
        lambda: fewshift.inspect(tiny, strange),
    ):
        assert fact in said(call)


def test_no_image_to_look_at_is_one_sentence(tiny, support):
    assert "no images" in said(lambda: fewshift.inspect(tiny, support.images[:0]))


def test_one_unlabelled_image_without_its_first_dimension_is_one_sentence(tiny, support):
    call = lambda: fewshift.adapt(tiny, support, unlabelled=support.images[0], method="adabn")  # noqa: E731
    assert "unlabelled image has shape (8, 8) and a labelled one (3, 8, 8)" in said(call)


def test_images_that_a_network_has_made_do_not_ask_for_gradients(tiny, support):
    made_by = nn.Parameter(support.images.clone())
    ours, expected = (
        fewshift.adapt(tiny, (images, support.labels), unlabelled=images + 0.1, accept="always").model
        for images in (made_by * 1, support.images)
    )
    assert same_state(state(ours), state(expected))
    assert made_by.grad is None


def test_sites_refuse_sparse_images(tiny, support, tmp_path):
    fewshift.adapt(tiny, support, method="adabn", validate=None).delta.save(tmp_path / "one.safetensors")
    sites = Sites(tiny, tmp_path)
    assert "sparse" in said(lambda: sites["one"](support.images.to_sparse()))


# --- states that are no tensors


@pytest.mark.parametrize("name", BATCHWISE)
def test_a_network_with_a_state_of_its_own_is_adapted_like_others(name, support):
    network = made(Remembering)
    ours, expected = (quick(name).adapt(model, target_of(support)) for model in (network, twin(network, Tiny)))
    assert torch.equal(ours(support.images), expected(support.images))


def test_its_delta_applies_and_reverts(support, tmp_path):
    network = made(Remembering)
    result = fewshift.adapt(network, support, accept="always")
    file = result.delta.save(tmp_path / "delta.safetensors")
    adapted = fewshift.apply(network, file)
    assert torch.equal(adapted(support.images), result.model(support.images))
    assert Fingerprint.of(fewshift.revert(adapted, file)) == Fingerprint.of(network)
    sites = Sites(network, tmp_path)
    assert torch.allclose(sites["delta"](support.images), result.model(support.images), atol=1e-6)
    assert "a dict in its state as '_extra_state'" in said(lambda: fewshift.merge(network, file, tmp_path / "m.pt"))


def test_another_state_is_another_network(support):
    network = made(Remembering)
    delta = fewshift.adapt(network, support, method="adabn", accept="always").delta
    other = copy.deepcopy(network)
    other.remembered = {**network.remembered, "epochs": 4}
    assert "other weights" in said(lambda: fewshift.apply(other, delta))


def test_a_state_that_cannot_be_compared_is_named(support):
    network = made(Remembering)
    network.remembered = {"model": object()}
    result = fewshift.adapt(network, support, method="adabn", accept="always")
    assert "keeps a object in its state as '_extra_state'" in said(lambda: result.delta)


def test_complex_numbers_of_any_size_have_a_delta(support):
    for dtype in (torch.complex64, torch.complex128):
        source, adapted = make_tiny(), make_tiny()
        for network, number in ((source, 1 + 2j), (adapted, 3 - 4j)):
            network.register_buffer("phase", torch.full((2, 3), number, dtype=dtype))
        delta = Delta.between(source, adapted)
        assert same_state(state(delta.apply(source)), state(adapted))
        assert same_state(state(delta.revert(adapted)), state(source))


@pytest.fixture
def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(make_tiny(), {nn.Linear})


@pytest.mark.parametrize("method", ["adabn", "blend", "auto"])
def test_a_network_with_quantised_layers_has_a_delta(quantised, method, support, tmp_path):
    result = fewshift.adapt(quantised, support, method=method, accept="always")
    file = result.delta.save(tmp_path / "delta.safetensors")
    assert torch.equal(fewshift.apply(quantised, file)(support.images), result.model(support.images))
    assert Fingerprint.of(fewshift.revert(result.model, file)) == Fingerprint.of(quantised)
    expected = fewshift.adapt(make_tiny(), support, method="adabn", accept="always")
    if method == "adabn":
        assert torch.equal(result.model.bn2.weight, expected.model.bn2.weight)


@pytest.mark.parametrize("name", ["lccs", "finetune-bn", "tent"])
def test_gradients_do_not_pass_quantised_layers(quantised, name, support):
    def call():
        predictor = quick(name).adapt(quantised, Target(support))
        predictor(support.images)

    assert "lets no gradients through" in said(call)

"""Weights that no network can compute with are refused when they are loaded, and wherever a network comes in."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fewshift
from fewshift import Delta, FewshiftError, Preprocess, Sites
from fewshift.core.delta import Fingerprint
from fewshift.models.weights import begin_from
from tests.helpers.models import NAME, refused
from tests.helpers.networks import make_support, make_tiny, same_state, state

STEPS = Preprocess(None, 8, (0.5,) * 3, (0.5,) * 3)


def spoilt(name, value):
    """A spoilt tensor of the tiny network of the library, in a file of all its weights."""
    tensors = {key: tensor.clone() for key, tensor in fewshift.load(NAME, "random").state_dict().items()}
    tensors[name] = value(tensors[name])
    return tensors


def filled(number):
    def fill(tensor):
        tensor.view(-1)[1] = number
        return tensor

    return fill


CASES = [
    ("fc.weight", filled(math.inf), "'fc.weight' contains NaN or infinity"),
    ("fc.bias", filled(-math.inf), "'fc.bias' contains NaN or infinity"),
    ("conv1.1.running_mean", filled(math.inf), "'conv1.1.running_mean' contains NaN or infinity"),
    ("conv1.1.running_var", filled(-0.5), "'conv1.1.running_var' contains a negative variance"),
    ("conv1.0.weight", lambda tensor: tensor.mul(100).long(), "conv1.0.weight is int64, not float32"),
    ("conv1.0.weight", lambda tensor: tensor.mul(100).to(torch.int8), "conv1.0.weight is int8, not float32"),
    ("fc.bias", lambda tensor: tensor > 0, "fc.bias is bool, not float32"),
    ("fc.weight", lambda tensor: torch.complex(tensor, tensor), "fc.weight is complex64, not float32"),
    ("fc.weight", lambda tensor: tensor.double().add(1e300), "'fc.weight' contains NaN or infinity"),
    ("conv1.1.num_batches_tracked", lambda tensor: tensor + 0.5, "conv1.1.num_batches_tracked is float32, not int64"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), CASES, ids=[sentence for *_, sentence in CASES])
def test_load_refuses(name, value, sentence, tmp_path):
    torch.save(spoilt(name, value), tmp_path / "broken.pt")
    refused(sentence, NAME, tmp_path / "broken.pt")


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "photos"),
        ("evaluate", "photos"),
        ("shift", "photos"),
        ("inspect",),
        ("adapt", "--support", "photos"),
        ("compare", "--support", "photos"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_refuses_in_one_sentence(words, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(spoilt("fc.weight", filled(math.inf)), "broken.pt")
    for label in ("a", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "photos" / label / "1.png")
    result = command(words[0], "--model", NAME, "--weights", "broken.pt", *words[1:])
    assert result.code == 1
    assert "'fc.weight' contains NaN or infinity" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_training_from_such_weights_is_refused():
    network = fewshift.load(NAME, "random")
    with pytest.raises(FewshiftError, match=r"fc\.weight is int64, not float32"):
        begin_from(network, spoilt("fc.weight", lambda tensor: tensor.long()), 1000, "w.pt", NAME)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_other_floating_types_and_counters_as_floats_load(dtype, tmp_path):
    network = fewshift.load(NAME, "random")
    tensors = {name: tensor.to(dtype) for name, tensor in network.state_dict().items()}
    save_file(tensors, tmp_path / "w.safetensors")
    loaded = fewshift.load(NAME, tmp_path / "w.safetensors")
    assert same_state(state(loaded), {name: tensor.to(state(network)[name].dtype) for name, tensor in tensors.items()})


@pytest.fixture(params=["infinite", "negative"])
def sick(request):
    network = make_tiny()
    if request.param == "infinite":
        with torch.no_grad():
            network.fc.weight[0, 0] = math.inf
        return network, "'fc.weight' contains NaN or infinity"
    network.bn2.running_var[1] = -1.0
    return network, "'bn2.running_var' contains a negative variance"


def test_python_calls_refuse_a_network_with_such_weights(sick, tmp_path):
    network, sentence = sick
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    support = make_support()
    healthy = make_tiny()
    fewshift.adapt(healthy, support, method="adabn", validate=None).delta.save(tmp_path / "site.safetensors")
    for call in (
        lambda: fewshift.adapt(network, support),
        lambda: fewshift.evaluate(network, support),
        lambda: fewshift.predict(network, tmp_path / "1.png", preprocess=STEPS),
        lambda: fewshift.shift(network, support.images),
        lambda: fewshift.export(network, tmp_path / "network.onnx", preprocess=STEPS),
        lambda: Sites(network, tmp_path),
    ):
        with pytest.raises(FewshiftError, match=sentence):
            call()


def test_a_delta_that_would_make_such_weights_is_refused(sick):
    network, sentence = sick
    healthy = make_tiny()
    delta = Delta.between(healthy, network)
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.apply(healthy, delta)
    assert Fingerprint.of(healthy) == delta.source


def test_a_site_that_would_make_such_weights_is_refused(sick, tmp_path):
    network, sentence = sick
    healthy = make_tiny()
    Delta.between(healthy, network).save(tmp_path / "forged.safetensors")
    images = make_support().images[:2]
    for call in (
        lambda: Sites(healthy, tmp_path)["forged"](images),
        lambda: Sites(healthy, tmp_path)(images, of=["forged", None]),
    ):
        with pytest.raises(FewshiftError, match=f"site 'forged': weight {sentence}"):
            call()


def test_infinity_in_a_mask_is_no_fault(support):
    network = make_tiny()
    network.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    assert fewshift.evaluate(network, support).to_json()

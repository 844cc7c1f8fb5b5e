"""Files become tables of tensors, and tables fill networks; nothing in a file is ever run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshift.core.randomness import private_randomness
from fewshift.errors import FewshiftError
from fewshift.models import libraries as models
from fewshift.models.cards import known_card
from fewshift.models.weights import begin_from
from tests.helpers.models import NAME, refused, same
from tests.helpers.networks import make_tiny, same_state, state


def test_a_seven_class_checkpoint_loads_with_no_further_word(weights: Path, network: nn.Module) -> None:
    loaded = models.load(NAME, weights)
    assert same(loaded, network)
    assert not loaded.training
    assert (known_card(loaded).arch, known_card(loaded).classes) == (NAME, None)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {"state_dict": state}, "optimizer": {}},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
    ],
    ids=["bare", "state_dict", "nested twice", "DataParallel", "DataParallel nested"],
)
def test_weights_are_found_however_the_trainer_wrapped_them(
    tmp_path: Path, network: nn.Module, wrap: Callable[[dict[str, Tensor]], object]
) -> None:
    torch.save(wrap(network.state_dict()), tmp_path / "w.pt")
    assert same(models.load(NAME, tmp_path / "w.pt"), network)


def test_weights_from_before_batches_were_counted_are_whole(tmp_path: Path, network: nn.Module) -> None:
    state = {name: tensor for name, tensor in network.state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "w.safetensors")
    ours = models.load(NAME, tmp_path / "w.safetensors").state_dict()
    assert all(torch.equal(ours[name], state[name]) for name in state)


@pytest.mark.parametrize("how", [pickle.dump, torch.save])
def test_code_inside_a_checkpoint_is_not_run(tmp_path: Path, how: Callable[..., None]) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    with (tmp_path / "w.pt").open("wb") as file:
        how({"state_dict": Trap()}, file)
    refused(
        r"w\.pt holds more than tensors .* never done: .*save its state_dict as \.safetensors", NAME, tmp_path / "w.pt"
    )
    assert not (tmp_path / "sprung").exists()
    with (tmp_path / "w.pt").open("rb") as file:  # it is a trap indeed
        torch.load(file, weights_only=False) if how is torch.save else pickle.load(file)
    assert (tmp_path / "sprung").exists()


def test_a_whole_pickled_network_is_refused(tmp_path: Path, network: nn.Module) -> None:
    torch.save(network, tmp_path / "w.pt")
    refused("holds more than tensors", NAME, tmp_path / "w.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, network: nn.Module, suffix: str, kept: float) -> None:
    path = tmp_path / f"w{suffix}"
    save_file(network.state_dict(), path) if suffix == ".safetensors" else torch.save(network.state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    refused(rf"w\{suffix} is truncated or not .*: copy it again", NAME, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(r"no weights at .*w\.pt: check the path", NAME, tmp_path / "w.pt")


@pytest.mark.parametrize("content", [[torch.ones(2)], {}, {1: torch.ones(2)}])
def test_a_file_without_a_table_of_tensors_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pt")
    refused("holds no table of tensors", NAME, tmp_path / "w.pt")


def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(2), "epoch": 3}, tmp_path / "w.pt")
    refused("holds int 'epoch' among its weights", NAME, tmp_path / "w.pt")


def test_a_tensor_that_is_not_a_number_is_named(tmp_path: Path, network: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state["bn1.running_var"][3] = float("nan")
    save_file(state, tmp_path / "w.safetensors")
    refused(r"bn1\.running_var in .*w\.safetensors is not a number", NAME, tmp_path / "w.safetensors")


def test_weights_that_do_not_fit_are_told_by_name_and_shape(tmp_path: Path, network: nn.Module) -> None:
    state = dict(network.state_dict())
    state["extra.weight"] = state.pop("bn1.weight")
    save_file(state, tmp_path / "w.safetensors")
    sentence = refused(
        r"w\.safetensors does not fit timm:test_resnet", NAME, tmp_path / "w.safetensors", classes=list("abcde")
    )
    width = network.get_submodule("fc").in_features
    assert f"fc.weight is (7, {width}), not (5, {width}); fc.bias is (7,), not (5,)" in sentence
    assert "1 missing (bn1.weight)" in sentence
    assert "1 unexpected (extra.weight)" in sentence


def test_weights_of_another_architecture_are_told_in_short(weights: Path) -> None:
    sentence = refused("does not fit torchvision:squeezenet1_1: .* missing", "torchvision:squeezenet1_1", weights)
    assert len(sentence) < 600


# --- to begin a training with


def test_weights_for_other_classes_fill_everything_but_the_head():
    model, other = make_tiny(3), make_tiny(5, seed=7)
    head = model.fc.weight.clone()
    begin_from(model, other.state_dict(), 3, "w", "tiny")
    assert torch.equal(model.fc.weight, head)
    assert torch.equal(model.conv1.weight, other.conv1.weight)
    assert torch.equal(model.bn2.running_var, other.bn2.running_var)
    begin_from(model, make_tiny(3, seed=8).state_dict(), 3, "w", "tiny")
    assert same_state(state(model), state(make_tiny(3, seed=8)))


def test_weights_without_a_head_leave_the_head_as_it_was_made():
    model, other = make_tiny(3), make_tiny(3, seed=7)
    head = state(model.fc)
    features = {key: tensor.half() for key, tensor in other.state_dict().items() if not key.startswith("fc.")}
    begin_from(model, features, 3, "w", "tiny")
    assert same_state(state(model.fc), head)
    assert all(
        torch.equal(model.state_dict()[key], tensor.to(model.state_dict()[key])) for key, tensor in features.items()
    )
    with pytest.raises(FewshiftError, match=r"fc.bias is missing, \(3,\) expected"):
        begin_from(model, features | {"fc.weight": torch.zeros(3, 6)}, 3, "w", "tiny")


def test_weights_of_a_classifier_fill_the_encoder_of_a_segmentation_network():
    pytest.importorskip("segmentation_models_pytorch")
    segmenter = models.load("smp:unet/resnet18", "random", classes=list("abcd"))
    before = state(segmenter)
    with private_randomness(7):
        classifier = models.load("torchvision:resnet18", "random", classes=list("abc"))
        larger = models.load("torchvision:resnet34", "random", classes=list("abc"))
    with pytest.raises(FewshiftError, match=r"another architecture than unet: layer1\.2\..* is not known there"):
        begin_from(segmenter, larger.state_dict(), 4, "w", "unet")
    begin_from(segmenter, classifier.state_dict(), 4, "w", "unet")
    assert not torch.equal(segmenter.encoder.layer3[1].conv2.weight, before["encoder.layer3.1.conv2.weight"])
    for name, tensor in segmenter.state_dict().items():
        known = classifier.state_dict().get(name.removeprefix("encoder."), before[name])
        assert torch.equal(tensor, known)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            lambda state: {**state, "conv2.weight": torch.zeros(6, 6, 1, 1)},
            r"conv2.weight is \(6, 6, 1, 1\), \(6, 6, 3, 3\)",
        ),
        (
            lambda state: {**state, "conv1.weight": torch.zeros(9, 3, 3, 3)},
            r"conv1.weight is \(9, 3, 3, 3\), \(6, 3, 3, 3\)",
        ),
        (
            lambda state: {key: state[key] for key in state if key != "bn1.bias"},
            r"bn1.bias is missing, \(6,\) expected",
        ),
        (lambda state: {**state, "conv9.weight": torch.zeros(1)}, r"conv9.weight is not known there"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_one_sentence(change, fact):
    model = make_tiny(3)
    before = state(model)
    with pytest.raises(FewshiftError, match=rf"w is a checkpoint of another architecture than tiny: {fact}"):
        begin_from(model, change(make_tiny(3, seed=7).state_dict()), 3, "w", "tiny")
    assert same_state(state(model), before)

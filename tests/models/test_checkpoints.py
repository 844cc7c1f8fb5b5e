"""Weights are read as trainers leave them, and nothing in their files is run."""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.models import libraries as models
from fewshift.models.cards import Origin, known_card
from tests.helpers.models import NAME, refused, same

OPTIONS = {
    "options": argparse.Namespace(lr=0.1, data=pathlib.PurePosixPath("/data"), windows=pathlib.PureWindowsPath("d:/")),
    "best": np.float64(0.9),
    "class_weights": np.ones(3),
    "counts": collections.defaultdict(list, a=[1], b=[2]),
    "history": collections.deque([1.0, 2.0]),
    "milestones": collections.Counter([1, 2]),
    "folder": Path("runs"),
}


@pytest.mark.parametrize(
    "prefix",
    ["model.", "module.", "_orig_mod.", "net.", "backbone.", "_orig_mod.module.", "model._orig_mod.", "a.b_c.d."],
)
def test_what_trainers_put_before_names_is_removed(tmp_path: Path, network: nn.Module, prefix: str) -> None:
    save_file({prefix + name: tensor for name, tensor in network.state_dict().items()}, tmp_path / "w.safetensors")
    assert same(models.load(NAME, tmp_path / "w.safetensors"), network)


def test_parts_that_were_compiled_alone_are_found(tmp_path: Path, network: nn.Module) -> None:
    state = network.state_dict()
    save_file(
        {name.replace("layer1.", "layer1._orig_mod."): tensor for name, tensor in state.items()}, tmp_path / "w.pt"
    )
    assert same(models.load(NAME, tmp_path / "w.pt"), network)


def test_a_lightning_checkpoint_is_read_and_the_loss_in_it_left_out(tmp_path: Path, network: nn.Module) -> None:
    state = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    content = {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {**state, "criterion.weight": torch.ones(7)},
        "hyper_parameters": OPTIONS,
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}],
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.1)}},
    }
    torch.save(content, tmp_path / "last.ckpt")
    loaded = models.load(NAME, tmp_path / "last.ckpt")
    assert same(loaded, network)
    assert known_card(loaded).origin == Origin("state_dict", "model.", ("criterion.weight",))


@pytest.fixture
def timm_run(tmp_path: Path, network: nn.Module) -> tuple[Path, nn.Module, nn.Module]:
    """What timm's own training script leaves: the file, the last weights and the averaged ones."""
    last = timm.create_model("test_resnet", num_classes=7)
    averaged = timm.utils.ModelEmaV3(network)
    timm.utils.CheckpointSaver(
        last,
        torch.optim.SGD(last.parameters(), 0.1),
        args=argparse.Namespace(model="test_resnet", data_dir=Path("data"), lr=np.float64(0.1)),
        model_ema=averaged,
        checkpoint_dir=str(tmp_path),
    ).save_checkpoint(0, 50.0)
    return tmp_path / "last.pth.tar", last, averaged.module


def test_of_a_timm_run_the_averaged_weights_are_read_and_its_name_is_known(
    timm_run: tuple[Path, nn.Module, nn.Module],
) -> None:
    file, _, averaged = timm_run
    loaded = models.load(None, file)
    assert same(loaded, averaged)
    assert (known_card(loaded).arch, known_card(loaded).origin) == (NAME, Origin("state_dict_ema"))


def test_the_last_weights_of_a_timm_run_are_read_on_request(timm_run: tuple[Path, nn.Module, nn.Module]) -> None:
    file, last, _ = timm_run
    loaded = models.load(NAME, file, ema=False)
    assert same(loaded, last)
    assert known_card(loaded).origin == Origin("state_dict")


def test_averaged_weights_may_be_the_state_of_torchs_averaged_model(tmp_path: Path, network: nn.Module) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(network)
    other = timm.create_model("test_resnet", num_classes=7).state_dict()
    torch.save({"model": other, "model_ema": averaged.state_dict(), "args": OPTIONS["options"]}, tmp_path / "w.pth")
    loaded = models.load(NAME, tmp_path / "w.pth")
    assert same(loaded, network)
    assert known_card(loaded).origin == Origin("model_ema", "module.", ("n_averaged",))


@pytest.mark.parametrize("ema", [True, False])
def test_of_a_network_and_its_average_in_one_table_either_is_read(
    tmp_path: Path, network: nn.Module, ema: bool
) -> None:
    other = timm.create_model("test_resnet", num_classes=7)
    tables = {"ema_model.": network.state_dict(), "model.": other.state_dict()}
    state = {prefix + name: tensor for prefix, table in tables.items() for name, tensor in table.items()}
    save_file(state, tmp_path / "w.safetensors")
    assert same(models.load(NAME, tmp_path / "w.safetensors", ema=ema), network if ema else other)


def test_two_networks_in_one_table_are_refused_with_their_prefixes(tmp_path: Path, network: nn.Module) -> None:
    state = {
        prefix + name: tensor.clone() for prefix in ("one.", "two.") for name, tensor in network.state_dict().items()
    }
    save_file(state, tmp_path / "w.safetensors")
    refused(r"several networks, under 'one\.', 'two\.'", NAME, tmp_path / "w.safetensors")


def test_of_a_prefixed_network_without_its_head_only_the_head_is_missing(tmp_path: Path, network: nn.Module) -> None:
    state = {f"backbone.{name}": tensor for name, tensor in network.state_dict().items() if not name.startswith("fc.")}
    save_file({**state, "head.weight": torch.ones(7, 4)}, tmp_path / "w.safetensors")
    sentence = refused(r"2 missing \(fc\.weight, fc\.bias\)", NAME, tmp_path / "w.safetensors")
    assert "1 unexpected (head.weight)" in sentence


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(
    "hide",
    [
        lambda trap: {"hyper_parameters": {"lr": trap}},
        lambda trap: {"args": argparse.Namespace(lr=trap)},
        lambda trap: {"counts": collections.defaultdict(list, a=trap)},
        lambda trap: {"history": collections.deque([trap])},
        lambda trap: {"array": np.array([trap], dtype=object)},
    ],
    ids=["hyper_parameters", "Namespace", "defaultdict", "deque", "array"],
)
def test_a_payload_inside_a_harmless_type_is_not_run(
    tmp_path: Path, network: nn.Module, hide: Callable[[Trap], dict[str, object]]
) -> None:
    content = {"state_dict": network.state_dict(), **hide(Trap(tmp_path / "sprung"))}
    torch.save(content, tmp_path / "w.ckpt")
    refused(r"holds more than tensors \(the first is posix\.mkdir\)", NAME, tmp_path / "w.ckpt")
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "w.ckpt", weights_only=False)  # it is a trap indeed
    assert (tmp_path / "sprung").exists()


class Unwanted:
    """Fails the test when it is made."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Never a thing of this kind."""
        pytest.fail("made")


def test_no_class_of_a_checkpoint_is_made(tmp_path: Path, network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": network.state_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "w.ckpt")
    monkeypatch.setattr(argparse, "Namespace", Unwanted)
    assert same(models.load(NAME, tmp_path / "w.ckpt"), network)


def test_reading_leaves_no_type_allowed_for_others(tmp_path: Path, network: nn.Module) -> None:
    before = set(torch.serialization.get_safe_globals())
    torch.save(network.state_dict(), tmp_path / "w.pt")
    models.load(NAME, tmp_path / "w.pt")
    assert set(torch.serialization.get_safe_globals()) == before


# --- other formats, whatever their names


def test_safetensors_are_recognised_under_any_name(tmp_path: Path, network: nn.Module) -> None:
    save_file(network.state_dict(), tmp_path / "w.bin")
    assert same(models.load(NAME, tmp_path / "w.bin"), network)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_torchscript_archive_is_refused_by_its_kind(tmp_path: Path, name: str) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / name)
    refused(r"is a TorchScript archive, .*: pass the state_dict of the network", NAME, tmp_path / name)


def test_an_archive_that_says_it_spans_several_disks_is_one_sentence(tmp_path: Path, network: nn.Module) -> None:
    torch.save(network.state_dict(), tmp_path / "w.pt")
    content = bytearray((tmp_path / "w.pt").read_bytes())
    end, locator = content.rfind(b"PK\x05\x06"), content.rfind(b"PK\x06\x07")
    if locator < 0:  # torch writes one for large files alone, depending on its version
        locator, end = end, end + 20
        content[locator:locator] = b"PK\x06\x07" + bytes(16)
    content[locator + 16 : locator + 20] = (7).to_bytes(4, "little")  # disks
    (tmp_path / "w.pt").write_bytes(content)
    refused("is truncated or not a table of weights", NAME, tmp_path / "w.pt")


def test_a_program_that_torch_exported_is_refused_by_its_kind(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)), tmp_path / "w.pt2")
    refused("torch.export wrote", NAME, tmp_path / "w.pt2")


@pytest.mark.parametrize("name", ["w.onnx", "w.pth"])
def test_an_onnx_file_is_refused_by_its_kind(tmp_path: Path, name: str) -> None:
    # ir_version 8, producer "pytorch", a graph of four bytes, the opset: the fields 1, 2, 7 and 8 of ModelProto
    (tmp_path / name).write_bytes(b"\x08\x08\x12\x07pytorch\x3a\x04\x12\x02ab\x42\x02\x10\x11")
    refused(r"is an ONNX graph, .*: pass the PyTorch weights", NAME, tmp_path / name)


def test_a_length_without_end_is_no_onnx_file(tmp_path: Path) -> None:
    length = bytes([255] * 8 + [127])  # 2**63 - 1 bytes, as protobuf writes it
    (tmp_path / "w.pt").write_bytes(b"\x08\x07\x12" + length + b"rest")
    refused("is truncated or not a table of weights|holds more than tensors", NAME, tmp_path / "w.pt")


def test_what_was_not_renamed_has_no_origin(weights: Path) -> None:
    assert not known_card(models.load(NAME, weights)).origin


def test_weights_that_begin_a_training_may_have_a_prefix(network: nn.Module) -> None:
    from fewshift.models.weights import begin_from

    model = timm.create_model("test_resnet", num_classes=7)
    state: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    begin_from(model, state, 7, "w", NAME)
    learned = dict(model.named_parameters())
    assert all(torch.equal(learned[name], tensor) for name, tensor in network.named_parameters())


@pytest.mark.parametrize(("change", "what"), [("meta", "has no values"), ("sparse", "is sparse")])
def test_tensors_without_values_or_places_are_refused_by_name(
    tmp_path: Path, network: nn.Module, change: str, what: str
) -> None:
    state = dict(network.state_dict())
    name = "fc.weight"
    state[name] = state[name].to("meta") if change == "meta" else state[name].to_sparse()
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(FewshiftError, match=f"{name} in .*w.pt {what}: save the weights as dense tensors"):
        models.read_weights(tmp_path / "w.pt")

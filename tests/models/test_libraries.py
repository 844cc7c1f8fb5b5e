"""A name and a file become a network, or the user is told why not; nothing in the file is ever run."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fewshift.core.randomness import private_randomness
from fewshift.errors import FewshiftError
from fewshift.images import IMAGENET, Preprocess
from fewshift.lab.training import ALGORITHMS, algorithm_of
from fewshift.models import libraries as models
from fewshift.models.cards import Card, known_card, with_card
from fewshift.models.layers import CHANGES

NAME = "timm:test_resnet"
SEVEN = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
HALF = Preprocess(144, 128, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic")


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A tiny seven-class network whose every tensor differs from a fresh one's."""
    model: nn.Module = timm.create_model("test_resnet", num_classes=7).eval()
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.add_(number + 1 if tensor.dtype == torch.int64 else 0.01)
    return model


@pytest.fixture
def weights(tmp_path: Path, network: nn.Module) -> Path:
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def refused(told: str, *arguments: object, **keywords: object) -> str:
    """The one sentence with which `load` refuses."""
    with pytest.raises(FewshiftError, match=told) as caught:
        models.load(*arguments, **keywords)  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# --- weights


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
    told = refused(r"w\.safetensors does not fit timm:test_resnet", NAME, tmp_path / "w.safetensors", classes="abcde")
    width = network.get_submodule("fc").in_features
    assert f"fc.weight is (7, {width}), not (5, {width}); fc.bias is (7,), not (5,)" in told
    assert "1 missing (bn1.weight)" in told
    assert "1 unexpected (extra.weight)" in told


def test_weights_of_another_architecture_are_told_in_short(weights: Path) -> None:
    told = refused("does not fit torchvision:squeezenet1_1: .* missing", "torchvision:squeezenet1_1", weights)
    assert len(told) < 600


# --- the card


def card(weights: Path, **content: object) -> None:
    weights.with_suffix(".json").write_text(json.dumps(content))


def test_with_a_card_the_path_says_it_all(weights: Path, network: nn.Module) -> None:
    card(weights, arch=NAME, classes=list(SEVEN), target="sketch", epochs=2, **HALF.to_json())
    loaded = models.load(None, weights)
    assert same(loaded, network)
    assert (known_card(loaded).arch, known_card(loaded).classes, known_card(loaded).preprocess) == (NAME, SEVEN, HALF)


def test_what_the_card_leaves_out_is_the_librarys(weights: Path) -> None:
    card(weights, arch=NAME, crop=96)
    own = known_card(models.load(NAME, "random")).preprocess
    assert own is not None
    assert known_card(models.load(None, weights)).preprocess == Preprocess(
        own.resize, 96, own.mean, own.std, own.interpolation
    )


def test_an_argument_is_stronger_than_the_card(weights: Path) -> None:
    card(weights, arch="timm:resnet18", classes=list(SEVEN), crop=96)
    loaded = models.load(NAME, weights, classes="gfedcba", preprocess=HALF)
    assert (known_card(loaded).arch, known_card(loaded).classes, known_card(loaded).preprocess) == (
        NAME,
        tuple("gfedcba"),
        HALF,
    )


def test_without_name_and_card_the_user_is_asked_for_a_name(weights: Path) -> None:
    refused("no card beside its weights gives one: pass --model", None, weights)
    refused("pass --model", None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"arch": 3}', "has arch 3"),
        ('{"classes": "dog"}', "not a list of different names"),
        ('{"classes": ["dog", "dog"]}', "not a list of different names"),
        ('{"crop": "wide"}', "crop as whole numbers"),
        ('{"std": [0, 0, 0]}', "positive deviations"),
    ],
)
def test_a_broken_card_is_named(weights: Path, text: str, told: str) -> None:
    weights.with_suffix(".json").write_text(text)
    assert "w.json" in refused(told, NAME, weights)


def test_a_card_does_not_choose_code_to_run(weights: Path, here: Path) -> None:
    (here / "trap.py").write_text("import pathlib\npathlib.Path('sprung').touch()\n")
    card(weights, arch="trap:make")
    refused("arch 'trap:make', which is of none of timm, torchvision, smp", None, weights)
    assert not (here / "sprung").exists()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ibn", "variant": "a", "share": 0.25, "layers": "layer1"},
        {"name": "isw", "layers": "bn1", "weight": 0.3, "trials": 2},
        {"name": "iternorm", "group": 8, "layers": "bn1"},
        {"name": "switchable-whitening", "group": 8, "decay": 0.5, "layers": "bn1"},
        {"name": "csg", "hidden": 5, "queue": 9},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_the_layers_that_an_algorithm_changed_are_changed_again_before_weights_are_filled_in(
    tmp_path: Path, network: nn.Module, algorithm: dict[str, object]
) -> None:
    settings = {key: value for key, value in algorithm.items() if key != "name"}
    trained = algorithm_of(str(algorithm["name"]), settings).modify(copy.deepcopy(network)).eval()
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    if algorithm["name"] != "isw":  # whose layers have no tensors
        refused("missing|unexpected", NAME, tmp_path / "w.safetensors")
    card(tmp_path / "w.safetensors", arch=NAME, algorithm=algorithm)
    for name in (None, NAME):
        loaded = models.load(name, tmp_path / "w.safetensors")
        assert same(loaded, trained)
        assert known_card(loaded).algorithm == algorithm
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(images), trained(images))


def test_a_card_can_name_every_algorithm() -> None:
    assert all(issubclass(ALGORITHMS[name], CHANGES[name]) for name in ALGORITHMS)


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ({"name": "magic"}, r"w\.json: unknown algorithm 'magic': use one of erm"),
        ({"name": "ibn", "variant": "c"}, r"w\.json: unknown variant 'c'"),
    ],
)
def test_an_algorithm_that_is_not_known_here_is_told(weights: Path, algorithm: object, told: str) -> None:
    card(weights, arch=NAME, algorithm=algorithm)
    refused(told, None, weights)


@pytest.mark.parametrize("algorithm", ["mixstyle", {"name": None}, {"lr": 3}, ["erm"], {"name": "erm"}, None])
def test_other_words_on_the_algorithm_are_notes(weights: Path, network: nn.Module, algorithm: object) -> None:
    card(weights, arch=NAME, algorithm=algorithm)
    assert same(models.load(None, weights), network)


# --- libraries


def test_random_weights_have_as_many_classes_as_named() -> None:
    assert models.load(NAME, "random", classes="abc")(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    assert models.load(NAME, "random")(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)


def test_loading_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    models.load(NAME, "random")
    assert torch.equal(before, torch.random.get_rng_state())


def test_timm_networks_get_timms_own_preprocessing() -> None:
    from torchvision.transforms import CenterCrop, Normalize, Resize

    loaded = models.load(NAME, "random")
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(loaded))
    resize, crop, normalise = (
        next(step for step in theirs.transforms if isinstance(step, kind)) for kind in (Resize, CenterCrop, Normalize)
    )
    ours = known_card(loaded).preprocess
    assert ours is not None
    assert (ours.resize, ours.interpolation) == (resize.size, resize.interpolation.value)
    assert (ours.crop, ours.crop) == tuple(crop.size)
    assert (list(ours.mean), list(ours.std)) == (pytest.approx(normalise.mean), pytest.approx(normalise.std))


def test_torchvision_networks_get_the_preprocessing_of_their_weights(tmp_path: Path) -> None:
    loaded = models.load("torchvision:squeezenet1_1", "random", classes="abc")
    assert loaded.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert known_card(loaded).preprocess == IMAGENET
    torch.save(loaded.state_dict(), tmp_path / "w.pth")
    assert same(models.load("torchvision:squeezenet1_1", tmp_path / "w.pth"), loaded)


def test_a_segmenter_of_torchvision_is_made_without_fetching_its_backbone() -> None:
    loaded = models.load("torchvision:lraspp_mobilenet_v3_large", "random", classes="abc")
    assert known_card(loaded).preprocess == Preprocess(520, None, IMAGENET.mean, IMAGENET.std)
    assert loaded(torch.zeros(1, 3, 32, 32))["out"].shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "fetch"),
    [(NAME, "timm.create_model"), ("torchvision:squeezenet1_1", "torchvision.models._api.load_state_dict_from_url")],
)
def test_where_no_hub_answers_the_user_is_asked_for_weights(
    monkeypatch: pytest.MonkeyPatch, name: str, fetch: str
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("name or service not known\nand much more")

    monkeypatch.setattr(fetch, unreachable)
    refused(rf"weights of {name} cannot be fetched \(OSError\): pass --weights FILE", name)


@pytest.mark.parametrize("name", [NAME, "torchvision:resnet18"])
def test_pretrained_weights_are_not_given_a_head_that_never_saw_training(name: str) -> None:
    refused("has 1000 classes, 2 class names given: pass --weights FILE", name, classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("timm:resnet_18", "timm:resnet18"),
        ("timm:resnet18.a1_in2k", "timm:resnet18.a1_in1k"),
        ("torchvision:mobilenetv2", "torchvision:mobilenet_v2"),
        ("resnet18", "timm:resnet18 or torchvision:resnet18"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_closest(name: str, meant: str) -> None:
    assert meant in refused(f"unknown model '{name}': did you mean .*\\?", name, "random")


@pytest.mark.parametrize("name", ["qqqqqqqqq", "timm:", ":make", ""])
def test_what_is_no_name_is_answered_with_the_forms_a_name_can_have(name: str) -> None:
    refused("timm:NAME", name, "random")


def test_names_are_those_of_both_libraries_or_of_one() -> None:
    import torchvision

    ours = {f"torchvision:{name}" for name in torchvision.models.list_models()}
    assert set(models.names("torchvision")) == ours
    assert set(models.names()) == ours | {f"timm:{name}" for name in timm.list_models()}
    with pytest.raises(FewshiftError, match="use one of timm, torchvision"):
        models.names("keras")


# --- what is known about any network


def test_a_network_carries_its_card_wherever_it_goes(weights: Path) -> None:
    card(weights, arch=NAME, classes=list(SEVEN), **HALF.to_json())
    loaded = copy.deepcopy(models.load(None, weights))
    assert loaded.fewshift_card == known_card(loaded)
    assert known_card(loaded).weights == str(weights)


def test_a_timm_model_is_known_by_its_own_data_config() -> None:
    assert known_card(timm.create_model("test_resnet")) == Card(
        preprocess=known_card(models.load(NAME, "random")).preprocess
    )


def test_nothing_is_known_of_other_networks() -> None:
    assert known_card(nn.Linear(2, 2)) == Card()
    assert known_card(timm.create_model("test_resnet", in_chans=1)) == Card()  # timm's steps are for colours


def test_a_card_that_was_given_is_stronger_than_timms() -> None:
    own = Card(preprocess=HALF)
    assert known_card(with_card(timm.create_model("test_resnet"), own)) == own


# --- segmentation_models_pytorch, which need not be installed


def test_a_missing_segmentation_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    refused("pip install segmentation-models-pytorch", "smp:unet/resnet18", "random")


def test_a_segmentation_network_is_asked_for_by_architecture_and_encoder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def create_model(arch: str, encoder_name: str, encoder_weights: None, classes: int = 1) -> nn.Module:
        if (arch, encoder_name) != ("unet", "resnet18"):
            raise KeyError(arch)
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, classes, 1))

    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", SimpleNamespace(create_model=create_model))
    made = models.load("smp:unet/resnet18", "random", classes="abc")
    assert made(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 8, 8)
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    assert same(models.load("smp:unet/resnet18", tmp_path / "w.safetensors"), made)
    refused("write smp:ARCH/ENCODER, such as", "smp:unet", "random")
    refused("without a trained decoder: pass --weights FILE", "smp:unet/resnet18")


# --- factories

FACTORIES = """
from torch import nn

def plain():
    return nn.Linear(4, 3)

def counted(num_classes=5):
    return nn.Linear(4, num_classes)

class Classed(nn.Linear):
    def __init__(self, num_classes=5):
        super().__init__(4, num_classes)

def broken():
    raise RuntimeError("out of ideas\\nand lines")

def number():
    return 3

constant = 3
"""


@pytest.fixture
def factories(here: Path) -> Path:
    (here / "ours").mkdir()
    (here / "ours" / "nets.py").write_text(FACTORIES)
    return here


def rows(loaded: nn.Module) -> int:
    assert isinstance(loaded, nn.Linear)
    return loaded.out_features


def test_a_factory_in_the_current_directory_is_called(factories: Path) -> None:
    path = list(sys.path)
    loaded = models.load("ours.nets:plain")
    assert (rows(loaded), known_card(loaded).preprocess, known_card(loaded).classes) == (3, None, None)
    assert sys.path == path


@pytest.mark.parametrize("factory", ["counted", "Classed"])
def test_a_factory_is_told_the_number_of_classes_where_it_asks_and_we_know(factories: Path, factory: str) -> None:
    assert rows(models.load(f"ours.nets:{factory}")) == 5
    assert rows(models.load(f"ours.nets:{factory}", classes="ab")) == 2
    save_file(nn.Linear(4, 7).state_dict(), factories / "w.safetensors")
    assert rows(models.load(f"ours.nets:{factory}", factories / "w.safetensors")) == 7


def test_the_digits_are_a_factory_like_any_other() -> None:
    from fewshift.lab.datasets import digits

    assert same(models.load("fewshift.lab.datasets.digits:source_network"), digits.source_network())


def test_the_digits_network_has_a_name_that_a_card_may_give(tmp_path: Path) -> None:
    from fewshift.lab.datasets import digits

    trained = digits.source_network("uci")
    save_file(trained.state_dict(), tmp_path / "d.safetensors")
    card(tmp_path / "d.safetensors", arch="digits", classes=list("0123456789"))
    loaded = models.load(None, tmp_path / "d.safetensors")
    assert same(loaded, trained)
    assert (known_card(loaded).arch, known_card(loaded).preprocess, known_card(loaded).classes) == (
        "digits",
        digits.PREPROCESS,
        tuple("0123456789"),
    )
    assert same(models.load("digits"), digits.source_network())
    refused("the digits network has 10 classes, not 3", "digits", "random", classes="abc")


def test_untrained_digits_networks_follow_the_seed() -> None:
    def made(seed: int) -> nn.Module:
        with private_randomness(seed):
            return models.load("digits", "random")

    assert same(made(1), made(1))
    assert not same(made(1), made(2))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ours.nots:plain", r"no module 'ours\.nots'"),
        ("nowhere.nets:plain", r"no module 'nowhere\.nets'"),
        ("ours.nets:plane", r"has no function 'plane': did you mean ours\.nets:plain\?"),
        ("ours.nets:constant", "has no function 'constant'"),
        ("ours.nets:broken", r"ours\.nets:broken failed \(RuntimeError: out of ideas\): mend it"),
        ("ours.nets:number", r"ours\.nets:number returned int: return a torch\.nn\.Module"),
        ("ours.typo:plain", r"ours\.typo cannot be imported \(SyntaxError"),
        ("ours.needy:plain", r"ours\.needy cannot be imported \(ModuleNotFoundError: No module named 'not_installed'"),
    ],
)
def test_a_factory_that_fails_is_told_in_one_sentence(factories: Path, name: str, told: str) -> None:
    (factories / "ours" / "typo.py").write_text("def plain(:")
    (factories / "ours" / "needy.py").write_text("import not_installed")
    refused(told, name)

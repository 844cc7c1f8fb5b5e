"""A name becomes a network, or the user is told why not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from fewshift.core.randomness import private_randomness
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.models import libraries as models
from fewshift.models.cards import known_card
from tests.helpers.models import NAME, card, refused, same


def test_random_weights_have_as_many_classes_as_named() -> None:
    assert models.load(NAME, "random", classes=list("abc"))(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
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
    loaded = models.load("torchvision:squeezenet1_1", "random", classes=list("abc"))
    assert loaded.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert known_card(loaded).preprocess == IMAGENET
    torch.save(loaded.state_dict(), tmp_path / "w.pth")
    assert same(models.load("torchvision:squeezenet1_1", tmp_path / "w.pth"), loaded)


def test_a_segmenter_of_torchvision_is_made_without_fetching_its_backbone() -> None:
    loaded = models.load("torchvision:lraspp_mobilenet_v3_large", "random", classes=list("abc"))
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
    made = models.load("smp:unet/resnet18", "random", classes=list("abc"))
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
    assert rows(models.load(f"ours.nets:{factory}", classes=list("ab"))) == 2
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
    refused("the digits network has 10 classes, not 3", "digits", "random", classes=list("abc"))


def test_untrained_digits_networks_follow_the_seed() -> None:
    def made(seed: int) -> nn.Module:
        with private_randomness(seed):
            return models.load("digits", "random")

    assert same(made(1), made(1))
    assert not same(made(1), made(2))


@pytest.mark.parametrize(
    ("name", "fact"),
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
def test_a_factory_that_fails_is_told_in_one_sentence(factories: Path, name: str, fact: str) -> None:
    (factories / "ours" / "typo.py").write_text("def plain(:")
    (factories / "ours" / "needy.py").write_text("import not_installed")
    refused(fact, name)

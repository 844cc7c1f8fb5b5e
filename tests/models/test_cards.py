"""What is known about a network, from the card beside its weights or from its library."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from fewshift.images.preprocess import Preprocess
from fewshift.lab.training import ALGORITHMS, algorithm_of
from fewshift.models import libraries as models
from fewshift.models.cards import Card, known_card, with_card
from fewshift.models.layers.changes import CHANGES
from tests.helpers.models import HALF, NAME, SEVEN, card, refused, same


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
    loaded = models.load(NAME, weights, classes=list("gfedcba"), preprocess=HALF)
    assert (known_card(loaded).arch, known_card(loaded).classes, known_card(loaded).preprocess) == (
        NAME,
        tuple("gfedcba"),
        HALF,
    )


def test_the_cards_classes_in_another_order_are_refused(weights: Path) -> None:
    card(weights, arch=NAME, classes=list(SEVEN))
    refused("output 0 is 'dog' there and 'person' here", None, weights, classes=SEVEN[::-1])


def test_misspelt_keys_are_found_and_notes_are_left_alone(weights: Path) -> None:
    card(weights, arch=NAME, class_names=list(SEVEN), resise=96, target="sketch", epochs=2, target_accuracy=56.3)
    assert dict(known_card(models.load(None, weights)).misspelt) == {"class_names": "classes", "resise": "resize"}


def test_without_name_and_card_the_user_is_asked_for_a_name(weights: Path) -> None:
    refused("no card beside its weights gives one: pass --model", None, weights)
    refused("pass --model", None)


@pytest.mark.parametrize(
    ("text", "fact"),
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
def test_a_broken_card_is_named(weights: Path, text: str, fact: str) -> None:
    weights.with_suffix(".json").write_text(text)
    assert "w.json" in refused(fact, NAME, weights)


def test_a_card_does_not_choose_code_to_run(weights: Path, here: Path) -> None:
    (here / "trap.py").write_text("import pathlib\npathlib.Path('sprung').touch()\n")
    card(weights, arch="trap:make")
    refused("arch 'trap:make', which is of none of timm, torchvision, smp", None, weights)
    assert not (here / "sprung").exists()


def test_the_advice_about_a_factory_helps(weights: Path) -> None:
    """Whoever takes "arch" out of the card, and names the network, gets it."""
    card(weights, arch="tests.helpers.commands:small_network", classes=["ant", "bee"])
    said = refused('take "arch" out of the card, and pass --model', NAME, weights)
    assert "w.json" in said
    card(weights, classes=list(SEVEN))
    assert models.load(NAME, weights)


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
    ("algorithm", "fact"),
    [
        ({"name": "magic"}, r"w\.json: unknown algorithm 'magic': use one of erm"),
        ({"name": "ibn", "variant": "c"}, r"w\.json: variant='c' is unknown"),
    ],
)
def test_an_algorithm_that_is_not_known_here_is_told(weights: Path, algorithm: object, fact: str) -> None:
    card(weights, arch=NAME, algorithm=algorithm)
    refused(fact, None, weights)


@pytest.mark.parametrize("algorithm", ["mixstyle", {"name": None}, {"lr": 3}, ["erm"], {"name": "erm"}, None])
def test_other_words_on_the_algorithm_are_notes(weights: Path, network: nn.Module, algorithm: object) -> None:
    card(weights, arch=NAME, algorithm=algorithm)
    assert same(models.load(None, weights), network)


# --- config.json of timm; that of Hugging Face is in test_hugging_face.py


def test_what_timm_saved_for_a_hub_is_a_card(tmp_path: Path, network: nn.Module) -> None:
    from timm.models import save_for_hf

    network = copy.deepcopy(network)
    network.pretrained_cfg = {**network.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    save_for_hf(network, str(tmp_path), model_config={"label_names": list(SEVEN)}, safe_serialization=True)
    loaded = models.load(None, tmp_path / "model.safetensors")
    assert same(loaded, network)
    own = timm.data.resolve_model_data_config(network)
    steps = known_card(loaded).preprocess
    assert steps is not None
    assert (known_card(loaded).arch, known_card(loaded).classes) == (NAME, SEVEN)
    assert (steps.crop, steps.mean, steps.interpolation) == (
        own["input_size"][1],
        (0.1, 0.2, 0.3),
        own["interpolation"],
    )
    assert steps.resize == int(own["input_size"][1] / own["crop_pct"])


def test_a_card_of_its_own_is_stronger_than_a_config_in_the_folder(weights: Path) -> None:
    weights.with_name("config.json").write_text('{"architecture": "test_resnet", "label_names": ["a", "b", "c"]}')
    card(weights, arch=NAME, classes=list(SEVEN))
    assert known_card(models.load(None, weights)).classes == SEVEN


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"lr": 3}', '{"architectures": ["BertModel"]}'])
def test_a_config_of_something_else_is_no_card(weights: Path, network: nn.Module, text: str) -> None:
    weights.with_name("config.json").write_text(text)
    loaded = models.load(NAME, weights)
    assert same(loaded, network)
    assert (known_card(loaded).classes, known_card(loaded).path) == (None, None)


# --- any network


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

"""Image classifiers that transformers saved, and what their folders say about classes and images."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fewshift
from fewshift.images.preprocess import Preprocess
from fewshift.models import libraries as models
from fewshift.models.cards import Card, known_card
from tests.helpers.models import refused, same
from tests.helpers.networks import unsettle

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
THREE = {0: "cat", 1: "dog", 2: "eel"}
KINDS: dict[str, dict[str, Any]] = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "MobileNetV2": {"depth_multiplier": 0.1},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ConvNext": {"size": {"shortest_edge": 32}},
    "ConvNext squeezing": {"size": {"shortest_edge": 384}},
    "MobileNetV2": {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
    "ViT": {"size": {"height": 32, "width": 32}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.1, 0.2, 0.3]},
    "ViT scaling otherwise": {"size": {"height": 32, "width": 32}, "rescale_factor": 1 / 127.5},
    "ViT without normalisation": {"size": {"height": 32, "width": 32}, "do_normalize": False},
    "EfficientNet": {"size": {"height": 32, "width": 32}},
    "EfficientNet with an offset": {
        "size": {"height": 32, "width": 32},
        "rescale_factor": 1 / 127.5,
        "rescale_offset": True,
    },
}


def named(name: str) -> Any:
    """What transformers calls so; imported late, because that takes a second."""
    return getattr(import_module("transformers"), name)


def saved(folder: Path, kind: str = "ResNet", names: dict[int, str] | None = THREE) -> nn.Module:
    """A tiny network as `save_pretrained` leaves it."""
    labels = {"num_labels": 3} if names is None else {"id2label": names}
    config = named(f"{kind}Config")(**KINDS[kind], **labels)
    torch.manual_seed(0)
    model: nn.Module = unsettle(named(f"{kind}ForImageClassification")(config)).eval()
    model.save_pretrained(folder)
    return model


def processor(kind: str) -> Any:
    return named(f"{kind.split(maxsplit=1)[0]}ImageProcessor")(**PROCESSORS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_says_it_all(tmp_path: Path, kind: str) -> None:
    trained = saved(tmp_path, kind)
    processor("MobileNetV2").save_pretrained(tmp_path)
    half = Preprocess(40, 32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    for arguments in ((f"hf:{tmp_path}",), (None, tmp_path / "model.safetensors")):
        loaded = models.load(*arguments)
        assert same(loaded, trained)
        assert not loaded.training
        assert known_card(loaded) == Card(
            arch=f"hf:{tmp_path}",
            classes=("cat", "dog", "eel"),
            preprocess=half,
            weights=str(tmp_path / "model.safetensors"),
            path=tmp_path / "config.json",
            steps=known_card(loaded).steps,
        )


@pytest.mark.parametrize("kind", PROCESSORS)
def test_images_are_prepared_as_transformers_prepares_them(tmp_path: Path, kind: str) -> None:
    saved(tmp_path)
    theirs = processor(kind)
    theirs.save_pretrained(tmp_path)
    waves = np.sin(np.linspace(0, 5, 60))[:, None, None] * np.cos(np.linspace(0, 7, 90))[None, :, None]
    picture = Image.fromarray((127.5 + 100 * waves * [1, 0.5, -1]).astype(np.uint8))
    steps = known_card(models.load(f"hf:{tmp_path}")).preprocess
    assert steps is not None
    expected = theirs(picture, return_tensors="pt")["pixel_values"][0]
    # they resize tensors, we resize pictures: two levels of 255 may differ
    torch.testing.assert_close(steps(picture), expected, atol=2.5 / 255 / min(steps.std), rtol=0)


def test_a_folder_adapts_and_its_delta_applies(tmp_path: Path) -> None:
    saved(tmp_path)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(12, 3, 32, 32, generator=generator), torch.arange(12) % 3
    network = fewshift.load(f"hf:{tmp_path}")
    result = fewshift.adapt(network, (images, labels), method="adabn", accept="always")
    assert same(fewshift.apply(network, result.delta), result.model)
    fewshift.merge(network, result.delta, tmp_path / "merged.safetensors")
    assert same(models.load(None, tmp_path / "merged.safetensors"), result.model)


def test_names_that_say_nothing_are_no_names(tmp_path: Path) -> None:
    saved(tmp_path, names=None)
    assert known_card(models.load(f"hf:{tmp_path}")).classes is None


def test_equal_names_get_their_numbers(tmp_path: Path) -> None:
    saved(tmp_path, names={0: "crane", 1: "dog", 2: "crane"})
    assert known_card(models.load(f"hf:{tmp_path}")).classes == ("crane (0)", "dog", "crane (2)")


def test_weights_in_half_precision_fill_a_network_in_single(tmp_path: Path) -> None:
    trained = saved(tmp_path)
    trained.half().save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in models.load(f"hf:{tmp_path}").parameters()} == {torch.float32}


def test_a_folder_without_weights_can_be_inspected(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert known_card(models.load(f"hf:{tmp_path}", "random")).classes == ("cat", "dog", "eel")
    refused(r"has no model\.safetensors: .*save_pretrained", f"hf:{tmp_path}")


def test_a_name_on_the_hub_is_no_folder() -> None:
    refused(r"hf:microsoft/resnet-18 is no folder with a config\.json", "hf:microsoft/resnet-18")


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "NoSuchForImageClassification", "ForImageClassification"])
def test_what_is_no_image_classifier_is_refused(tmp_path: Path, kind: str) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind], "model_type": "resnet"}))
    refused("names no image classifier", f"hf:{tmp_path}")


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    trained = saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForImageClassification": "trap.Net", "AutoConfig": "trap.Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "trap.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'sprung')!r}).touch()\n")
    assert same(models.load(f"hf:{tmp_path}"), trained)
    assert not (tmp_path / "sprung").exists()


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    trained = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(trained.state_dict(), tmp_path / "pytorch_model.bin")
    refused("other files are not read", f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"do_flip_channel_order": True}, "blue before red"),
        ({"size": {"height": 32, "width": 40}}, "32x40 is not square"),
        ({"image_mean": None}, "cannot be read"),
    ],
)
def test_steps_that_cannot_be_followed_are_named(tmp_path: Path, change: dict[str, Any], fact: str) -> None:
    saved(tmp_path)
    processor("ViT").save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(fact, f"hf:{tmp_path}")


def test_a_missing_transformers_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(r"needs transformers: pip install 'fewshift\[hf\]'", f"hf:{tmp_path}")

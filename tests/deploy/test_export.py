"""Export: the file says what PyTorch says, keeps what sites change, and appears only if both agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import fewshift
from fewshift import Adaptation, FewshiftError, Preprocess
from fewshift.deploy import agreement, exported_programs, exporting, onnx_files
from fewshift.deploy.agreement import ComparedOn
from fewshift.deploy.edge import Session
from fewshift.deploy.site_format import BaseFile, SiteFile
from tests.helpers.commands import CLASSES, network_options, small_network
from tests.helpers.disk import room_for
from tests.helpers.networks import make_support, make_tiny, scenes, street

STEPS = Preprocess(None, 16, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))


@dataclass(frozen=True)
class Made:
    """A network, what adaptation made of it, and both as files."""

    folder: Path
    network: nn.Module
    result: Adaptation
    base: fewshift.Export
    site: fewshift.Export


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    network, support = small_network(), make_support(size=16)
    support = replace(support, classes=tuple(CLASSES))
    result = fewshift.adapt(network, support, method="adabn", accept="always", preprocess=STEPS)
    base = fewshift.export(network, folder / "base.onnx", preprocess=STEPS, classes=CLASSES)
    site = fewshift.export(result, folder / "camera-7.site", base=base.path)
    return Made(folder, network, result, base, site)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A network fresh from its constructor, with the bytes of images as its input: many of its tensors are equal."""
    network = make_tiny()
    for layer in (network.bn1, network.bn2):
        layer.reset_parameters()
    nn.init.zeros_(network.fc.bias)
    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    fewshift.export(network, path, preprocess=STEPS, with_preprocessing=True)
    return network, path


def photographs(count: int = 3, side: int = 16) -> Tensor:
    """Small pictures of real photographs, as bytes (N, height, width, 3)."""
    pictures = [Image.fromarray(image).resize((side, side)) for image in load_sample_images().images]
    turned = [picture.rotate(90 * turn) for turn in range(count) for picture in pictures][:count]
    return torch.stack([torch.from_numpy(np.array(picture)) for picture in turned])


def normalised(pixels: Tensor) -> Tensor:
    return STEPS.normalise(pixels.permute(0, 3, 1, 2))


def run(path: Path, images: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"images": images.numpy()})[0]


def answers(network: nn.Module, images: Tensor) -> np.ndarray:
    with torch.no_grad():
        output = network(images)
    return (output["out"] if isinstance(output, dict) else output).numpy()


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}


def used(network: nn.Module) -> dict[str, np.ndarray]:
    """What a forward pass reads: all but the counters of batches."""
    return {name: value.numpy() for name, value in network.state_dict().items() if "num_batches" not in name}


def nothing_in(folder: Path, *but: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(but)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_file_takes_batches_of_any_size(made: Made, count: int) -> None:
    images = normalised(photographs(count))
    np.testing.assert_allclose(run(made.base.path, images), answers(made.network, images), atol=1e-5)


def test_the_network_keeps_every_tensor_under_its_name(made: Made, plain: tuple[nn.Module, Path]) -> None:
    for network, path in ((made.network, made.base.path), plain):
        tensors = initializers(path)
        for name, value in used(network).items():
            np.testing.assert_array_equal(tensors[name], value, err_msg=name)
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        assert kinds.count("BatchNormalization") == 2


def test_the_runtime_folds_batchnorm_at_load(made: Made, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "folded.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(str(made.base.path), options, providers=["CPUExecutionProvider"])
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(tmp_path / "folded.onnx").graph.node}


def test_names_preprocessing_and_opset_are_in_the_file(made: Made) -> None:
    session = onnxruntime.InferenceSession(str(made.base.path), providers=["CPUExecutionProvider"])
    facts = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert facts["classes"] == CLASSES
    assert Preprocess.from_json(facts["preprocess"]) == STEPS
    assert facts["input"] == {"type": "float32", "layout": "NCHW", "channels": 3, "size": [16, 16]}
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    assert session.get_outputs()[0].shape == ["batch", 3]
    assert {entry.domain: entry.version for entry in onnx.load(made.base.path).opset_import}[""] == made.base.opset


def test_files_name_no_place_on_the_machine(made: Made, tmp_path: Path) -> None:
    program = fewshift.export(made.result, tmp_path / "camera-7.pt2")
    for path in (made.base.path, made.site.path, program.path):
        content = path.read_bytes()
        assert str(Path(__file__).parents[2]).encode() not in content
        assert b".py" not in content


def test_with_preprocessing_the_file_takes_bytes(plain: tuple[nn.Module, Path]) -> None:
    network, path = plain
    pixels = photographs(4)
    np.testing.assert_allclose(run(path, pixels), answers(network, normalised(pixels)), atol=1e-5)
    np.testing.assert_allclose(Session(path).run(pixels.numpy()), run(path, pixels), atol=1e-6)
    with pytest.raises(FewshiftError, match=r"give uint8 \(N, 16, 16, 3\)"):
        Session(path).run(normalised(pixels).numpy())


def test_a_site_on_its_base_says_what_the_adapted_network_says(made: Made) -> None:
    images = normalised(photographs(5))
    session = Session(made.base.path, site=made.site.path)
    np.testing.assert_allclose(session.run(images.numpy()), answers(made.result.model, images), atol=1e-5)
    assert session.classes == tuple(CLASSES)
    assert not np.allclose(session.run(images.numpy()), answers(made.network, images), atol=1e-3)


def test_a_switched_session_opens_the_graph_that_a_separate_export_has(made: Made, tmp_path: Path) -> None:
    own = onnx.load(fewshift.export(made.result, tmp_path / "own.onnx").path)
    content = BaseFile(made.base.path).at(SiteFile.read(made.site.path), made.site.path)
    assert onnx.load_from_string(content).graph == own.graph  # hence the same speed


def test_a_site_holds_what_changed_and_nothing_else(made: Made) -> None:
    from safetensors.numpy import load_file

    before, after = used(made.network), used(made.result.model)
    changed = {name: value for name, value in after.items() if not np.array_equal(value, before[name])}
    tensors = load_file(made.site.path)
    assert tensors.keys() == changed.keys() != before.keys()
    assert all(np.array_equal(tensors[name], changed[name]) for name in tensors)
    assert made.site.changed == len(changed)


def test_a_site_may_change_everything_zeros_and_equal_tensors_too(
    plain: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    network, path = plain
    other = make_tiny(seed=3)
    delta = fewshift.Delta.between(network, other, preprocess=replace(STEPS, mean=(0.1, 0.2, 0.3)).to_json())
    done = fewshift.export(network, tmp_path / "all.site", delta=delta, base=path)
    assert done.changed == len(used(network)) + 1  # and the mean that is in the graph
    pixels = photographs(3)
    images = replace(STEPS, mean=(0.1, 0.2, 0.3)).normalise(pixels.permute(0, 3, 1, 2))
    session = Session(path, site=done.path)
    np.testing.assert_allclose(session.run(pixels.numpy()), answers(other, images), atol=1e-5)


def test_tensors_that_layers_share_change_for_all_of_them_in_another_opset_too(tmp_path: Path) -> None:
    from tests.helpers.networks import Shared, unsettle

    torch.manual_seed(0)
    network, other = unsettle(Shared(), 1), unsettle(Shared(), 2)
    other.load_state_dict(network.state_dict() | {name: other.state_dict()[name] for name in ("bn.weight", "bn.bias")})
    base = fewshift.export(network, tmp_path / "base.onnx", preprocess=STEPS, opset=18)
    assert base.opset == onnx.load(base.path).opset_import[0].version == 18
    delta = fewshift.Delta.between(network, other, preprocess=STEPS.to_json())
    done = fewshift.export(network, tmp_path / "s.site", delta=delta, base=base.path)
    images = normalised(photographs(2))
    np.testing.assert_allclose(Session(base.path, done.path).run(images.numpy()), answers(other, images), atol=1e-5)


def test_scenes_may_have_any_size(tmp_path: Path) -> None:
    network = street()
    done = fewshift.export(network, tmp_path / "street.onnx", images=scenes().images)
    assert done.size == (None, None)
    for size in ((16, 24), (40, 32), (8, 8)):
        images = scenes(3, size).images
        np.testing.assert_allclose(run(done.path, images), answers(network, images), atol=1e-5)
        assert Session(done.path).predict(images.numpy()).shape == (3, *size)


def test_a_network_that_fixes_the_size_of_scenes_says_so(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 2, 1)
            self.places = nn.Parameter(torch.randn(1, 3, 16, 24))

        def forward(self, images: Tensor) -> Tensor:
            return self.head(images + self.places)

    done = fewshift.export(Fixed(), tmp_path / "fixed.onnx", images=scenes().images)
    assert done.size == (16, 24)
    assert Session(done.path).input["size"] == [16, 24]


def test_torch_and_openvino_files_say_the_same(made: Made, tmp_path: Path) -> None:
    import openvino

    images = normalised(photographs(3))
    expected = answers(made.result.model, images)
    program = fewshift.export(made.result, tmp_path / "camera-7.pt2")
    module = torch.export.load(program.path).module()
    np.testing.assert_allclose(module(images).detach().numpy(), expected, atol=1e-5)
    network = fewshift.export(made.result, tmp_path / "camera-7.xml")
    assert [file.name for file in network.files] == ["camera-7.xml", "camera-7.bin"]
    model = openvino.Core().read_model(network.path)
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    np.testing.assert_allclose(compiled(images.numpy())[0], expected, atol=1e-5)
    assert json.loads(model.get_rt_info(["fewshift", "classes"]).astype(str)) == CLASSES
    assert nothing_in(tmp_path, "camera-7.pt2", "camera-7.xml", "camera-7.bin")


def test_what_was_compared_is_told(made: Made, tmp_path: Path) -> None:
    agreed = made.site.agreement
    assert (agreed.source, agreed.images, agreed.batch_sizes) == (ComparedOn.SUPPORT, 15, (1, 8))
    assert made.base.agreement.source is ComparedOn.MADE
    given = fewshift.export(made.network, tmp_path / "given.pt2", images=normalised(photographs(3)))
    assert (given.agreement.source, given.agreement.images) == (ComparedOn.GIVEN, 3)
    assert agreed.equal == 1
    assert agreed.difference < 1e-5
    assert json.loads(json.dumps(made.site.to_json()))["largest_difference"] == agreed.difference


def test_the_comparison_counts_differences_and_flipped_answers() -> None:
    images = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 4.0]])[:, :, None, None]
    sample = agreement.ImageSample(tuple(images), ComparedOn.GIVEN)

    def swapped(batch: np.ndarray) -> np.ndarray:
        logits = batch[:, :, 0, 0].copy()
        return np.where(logits.max(1, keepdims=True) == 4, logits[:, ::-1], logits)

    agreed = agreement.compare_runs(nn.Flatten(), swapped, sample)
    assert (agreed.difference, agreed.largest, agreed.equal, agreed.good) == (4, 4, 0.75, False)
    same = agreement.compare_runs(nn.Flatten(), lambda batch: batch[:, :, 0, 0], sample)
    assert (same.difference, same.equal, same.good) == (0, 1, True)
    lost = agreement.compare_runs(nn.Flatten(), lambda batch: batch[:, :, 0, 0] * np.nan, sample)
    assert not lost.good


def test_a_file_that_differs_is_an_error_and_leaves_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = exported_programs.as_program

    def wrong(program: Any, facts: Any) -> bytes:
        with torch.no_grad():
            program.state_dict["network.fc.weight"].mul_(1.01)
        return write(program, facts)

    monkeypatch.setattr(exported_programs, "as_program", wrong)
    with pytest.raises(FewshiftError, match=r"differs: by .* for logits up to .*nothing was written"):
        fewshift.export(made.network, tmp_path / "wrong.pt2", preprocess=STEPS)
    assert nothing_in(tmp_path)


class Branching(nn.Module):
    """Decides by the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean((2, 3))
        return self.fc(means) if means.sum() > 0 else self.fc(-means)


class Counting(Branching):
    """Knows how many images come."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self.fc(image.mean((1, 2))) for image in images])


class Foreign(Branching):
    """Leaves PyTorch on the way."""

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(torch.from_numpy(images.mean((2, 3)).numpy()))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Branching, r"Branching cannot be exported: its forward decides in Python by values of a tensor"),
        (Counting, "Counting cannot be exported: its forward fixes the number of images"),
        (Foreign, "Foreign cannot be exported: torch.export cannot trace its forward"),
    ],
)
def test_what_cannot_be_traced_says_why(
    kind: type[nn.Module], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FewshiftError, match=sentence) as caught:
        fewshift.export(kind(), tmp_path / "network.pt2", preprocess=STEPS)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert nothing_in(tmp_path)


def test_a_rejected_adaptation_is_not_exported_unless_asked_for(made: Made, tmp_path: Path) -> None:
    rejected = fewshift.adapt(
        made.network, made.result.support, method="adabn", accept=lambda gain: False, preprocess=STEPS
    )
    with pytest.raises(FewshiftError, match=r"rejected.*result\.model.*result\.candidate"):
        fewshift.export(rejected, tmp_path / "camera-7.pt2")
    fewshift.export(rejected.model, tmp_path / "camera-7.pt2", preprocess=STEPS)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("camera-7", {}, r"does not say its format: end it in one of \.onnx, \.pt2, \.xml, \.site"),
        ("camera-7.txt", {"format": "onnx"}, r"does not end in \.onnx"),
        ("camera-7.onnx", {"format": "coreml"}, "format 'coreml' is not known"),
        ("camera-7.site", {}, "pass base="),
        ("camera-7.onnx", {"base": "base.onnx"}, "only a site file has a base"),
        ("camera-7.pt2", {"opset": 20}, "format torch has no opset"),
        ("camera-7.onnx", {"opset": 5}, "opset 5 cannot be written: choose one from 18 to 23"),
        ("none/camera-7.pt2", {}, "cannot write .*: No such file or directory"),
        ("camera-7.pt2", {"classes": ["a", "b"]}, "2 class names for a network with 3 outputs"),
        ("camera-7.pt2", {"images": torch.zeros(2, 4, 8, 8)}, r"cannot run on images of shape \(4, 8, 8\)"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    name: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.export(make_tiny(), tmp_path / name, **{"preprocess": STEPS, **options})
    assert nothing_in(tmp_path)


def test_what_is_not_known_about_a_network_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match="how the Tiny wants its images is not known: pass preprocess="):
        fewshift.export(make_tiny(), tmp_path / "tiny.pt2")
    images = normalised(photographs(2))
    with pytest.raises(FewshiftError, match="how images of the Tiny are scaled and normalised is not known"):
        fewshift.export(make_tiny(), tmp_path / "tiny.pt2", images=images, with_preprocessing=True)
    with pytest.raises(FewshiftError, match=r"float16 weights.*model\.float\(\)"):
        fewshift.export(make_tiny().half(), tmp_path / "tiny.pt2", preprocess=STEPS)
    with pytest.raises(FewshiftError, match=r"expected an nn\.Module, got str"):
        fewshift.export("timm:resnet18", tmp_path / "tiny.pt2")


def test_deltas_and_bases_of_other_networks_are_refused(made: Made, tmp_path: Path) -> None:
    other = make_tiny(seed=5)
    with pytest.raises(FewshiftError, match="other weights than the one this delta was made for"):
        fewshift.export(other, tmp_path / "s.pt2", delta=made.result.delta)
    delta = fewshift.Delta.between(other, make_tiny(seed=6), preprocess=STEPS.to_json())
    with pytest.raises(FewshiftError, match=r"base\.onnx has the same network with other weights"):
        fewshift.export(other, tmp_path / "s.site", delta=delta, base=made.base.path)
    wide = make_tiny(classes=4)
    with pytest.raises(FewshiftError, match=r"base\.onnx has another network"):
        fewshift.export(wide, tmp_path / "s.site", base=made.base.path, preprocess=STEPS)
    with pytest.raises(FewshiftError, match="has its own delta"):
        fewshift.export(made.result, tmp_path / "s.pt2", delta=made.result.delta)
    assert nothing_in(tmp_path)


def test_no_file_that_is_read_is_written_over(made: Made, tmp_path: Path) -> None:
    weights = tmp_path / "w.site"
    save_file(made.network.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").rename(weights)
    made.result.delta.save(tmp_path / "delta.site")
    for read, options in (
        (tmp_path / "delta.site", {"delta": tmp_path / "delta.site", "base": made.base.path}),
        (tmp_path / "base.site", {"delta": made.result.delta, "base": tmp_path / "base.site"}),
    ):
        (tmp_path / "base.site").write_bytes(made.base.path.read_bytes())
        before = read.read_bytes()
        with pytest.raises(FewshiftError, match="is read for this export"):
            fewshift.export(made.network, read, **options)
        assert read.read_bytes() == before


def test_a_full_disk_is_one_sentence_and_leaves_nothing(made: Made, tmp_path: Path) -> None:
    for name, options in (("camera-7.pt2", {}), ("camera-7.site", {"base": made.base.path})):
        sentence = r"cannot write .*camera-7.*: File too large: nothing is left there"
        with pytest.raises(FewshiftError, match=sentence), room_for(500):
            fewshift.export(made.result, tmp_path / name, **options)
    assert nothing_in(tmp_path)


@pytest.mark.parametrize(("name", "extra"), [("camera-7.onnx", "onnx"), ("camera-7.xml", "openvino")])
def test_a_missing_extra_is_named_with_its_command(
    name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"onnx": "onnxscript", "openvino": "openvino"}[extra]
    find = onnx_files.find_spec
    monkeypatch.setattr(onnx_files, "find_spec", lambda package: None if package == missing else find(package))
    with pytest.raises(FewshiftError, match=rf'{missing}: pip install "fewshift\[{extra}\]"'):
        fewshift.export(make_tiny(), tmp_path / name, preprocess=STEPS)


def test_the_command_does_what_python_does(made: Made, command: Callable[..., Any], tmp_path: Path) -> None:
    save_file(made.network.state_dict(), tmp_path / "w.safetensors")
    made.result.delta.save(tmp_path / "delta.safetensors")
    words = ["export", *network_options(tmp_path)[:4], "--delta", tmp_path / "delta.safetensors"]
    done = command(*words, "--base", made.base.path, "--out", tmp_path / "camera-7.site")
    assert (done.code, done.stderr) == (0, "")
    for fact in ("camera-7.site", "8 made images", "largest difference", "equal answers", "100.00 %"):
        assert fact in done.stdout
    session = Session(made.base.path, tmp_path / "camera-7.site")
    images = normalised(photographs(2))
    np.testing.assert_allclose(session.run(images.numpy()), answers(made.result.model, images), atol=1e-5)
    told = json.loads(command(*words, "--out", tmp_path / "camera-7.pt2", "--json").stdout)
    assert (told["format"], told["equal_answers"], told["classes"]) == ("torch", 1.0, CLASSES)


def test_mistakes_in_the_command_end_with_two_and_others_with_one(
    made: Made, command: Callable[..., Any], tmp_path: Path
) -> None:
    save_file(made.network.state_dict(), tmp_path / "w.safetensors")
    words = ["export", *network_options(tmp_path)]
    over = command(*words, "--out", tmp_path / "w.safetensors")
    assert (over.code, "is read as well" in over.stderr) == (2, True)
    unwritable = command(*words, "--out", tmp_path / "none" / "x.pt2")
    assert (unwritable.code, "cannot write" in unwritable.stderr) == (2, True)
    lost = command(*words, "--base", tmp_path / "none.onnx", "--out", tmp_path / "x.site")
    assert (lost.code, "does not exist" in lost.stderr) == (2, True)
    suffix = command(*words, "--out", tmp_path / "x.bin")
    assert (suffix.code, "does not say its format" in suffix.stderr) == (1, True)
    assert nothing_in(tmp_path, "w.safetensors")


def test_every_format_has_its_runtime() -> None:
    assert exporting.SUFFIXES.keys() == exporting.RUNTIMES.keys()

"""A device without PyTorch: a base network in ONNX, site files, and the session that puts them together."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from fewshift import FewshiftError, Preprocess
from fewshift.deploy.edge import Session
from fewshift.deploy.onnx_bytes import OnnxLayout
from fewshift.deploy.site_format import BaseFile, SiteFile, SiteTensor

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
STEPS = Preprocess(None, 4, MEAN, STD)
CLASSES = ("ant", "bee")


def facts(**more: Any) -> dict[str, Any]:
    """What a base network says about itself."""
    takes = {"type": "float32", "layout": "NCHW", "channels": 3, "size": [None, None]}
    known = {"classes": CLASSES, "preprocess": STEPS.to_json(), "input": takes, "fewshift": {"weights": "w"}}
    return {key: more.get(key, value) for key, value in known.items()}


def base(path: Path, outputs: int = 2, seed: int = 0, pooled: bool = True, **more: Any) -> Path:
    """A 1x1 convolution and BatchNorm, averaged over pixels or not, made without our exporter."""
    draw = np.random.default_rng(seed)
    tensors = {
        "conv.weight": draw.normal(size=(outputs, 3, 1, 1)),
        "bn.weight": draw.uniform(0.5, 1.5, outputs),
        "bn.bias": draw.normal(size=outputs),
        "bn.running_mean": draw.normal(size=outputs),
        "bn.running_var": draw.uniform(0.5, 1.5, outputs),
    }
    nodes = [
        helper.make_node("Conv", ["images", "conv.weight"], ["hidden"]),
        helper.make_node("BatchNormalization", ["hidden", *list(tensors)[1:]], ["normal"], epsilon=1e-5),
        helper.make_node("GlobalAveragePool" if pooled else "Identity", ["normal"], ["pooled"]),
        helper.make_node("Flatten" if pooled else "Identity", ["pooled"], ["logits"]),
    ]
    sides = ["N", outputs] if pooled else ["N", outputs, "H", "W"]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3, "H", "W"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, sides)],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {key: json.dumps(value) for key, value in facts(**more).items()})
    path.write_bytes(model.SerializeToString())
    return path


def site(path: Path, of: Path, **more: Any) -> Path:
    """A site with another BatchNorm."""
    values = {"bn.bias": np.array([1, -1], np.float32), "bn.running_mean": np.array([0.5, 2], np.float32)}
    tensors = {name: SiteTensor("F32", value.shape, value.tobytes()) for name, value in values.items()}
    made = SiteFile(tensors, BaseFile(of).digest, "w", CLASSES, STEPS.to_json(), {"method": "adabn"})
    path.write_bytes(replace(made, **more).to_bytes())
    return path


def arrays(path: Path) -> dict[str, np.ndarray]:
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}


def by_hand(images: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The logits, one formula after the other."""
    hidden = np.einsum("oc,nchw->nohw", tensors["conv.weight"][:, :, 0, 0], images)
    mean, var, weight, bias = (
        tensors[f"bn.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
    )
    return ((hidden - mean) / np.sqrt(var + 1e-5) * weight + bias).mean((2, 3))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    base(tmp_path / "base.onnx")
    site(tmp_path / "camera-7.site", tmp_path / "base.onnx")
    return tmp_path


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(5, 3, 4, 4)).astype(np.float32)


def test_tensors_lie_where_the_onnx_package_says(place: Path) -> None:
    content = (place / "base.onnx").read_bytes()
    layout = OnnxLayout.of(content, "base.onnx")
    model = onnx.load_from_string(content)
    assert set(layout.tensors) == {each.name for each in model.graph.initializer}
    for each in model.graph.initializer:
        found = layout.tensors[each.name]
        assert (found.type, found.shape) == ("F32", tuple(each.dims))
        assert content[found.start : found.stop] == each.raw_data
    assert dict(layout.metadata) == {entry.key: entry.value for entry in model.metadata_props}


def test_sizes_that_are_packed_together_are_read_too() -> None:
    values = np.arange(6, dtype=np.float32).tobytes()
    tensor = b"\x0a\x02\x02\x03" + b"\x10\x01" + b"\x42\x01w" + b"\x4a\x18" + values  # dims packed, type, name, raw
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    content = b"\x3a" + bytes([len(graph)]) + graph
    assert onnx.load_from_string(content).graph.initializer[0].dims == [2, 3]
    assert OnnxLayout.of(content, "").tensors["w"].shape == (2, 3)


def test_a_site_on_its_base_is_the_file_that_the_onnx_package_would_write(place: Path) -> None:
    model = onnx.load(place / "base.onnx")
    changed = SiteFile.read(place / "camera-7.site")
    for each in model.graph.initializer:
        if each.name in changed.tensors:
            each.raw_data = changed.tensors[each.name].values
    assert BaseFile(place / "base.onnx").at(changed, "") == model.SerializeToString()


def test_a_session_computes_what_the_formulas_say(place: Path, images: np.ndarray) -> None:
    tensors = arrays(place / "base.onnx")
    session = Session(place / "base.onnx", threads=1)
    np.testing.assert_allclose(session.run(images), by_hand(images, tensors), atol=1e-5)
    session.switch(place / "camera-7.site")
    tensors |= {"bn.bias": np.array([1.0, -1.0]), "bn.running_mean": np.array([0.5, 2.0])}
    for count in (1, 2, 5):
        np.testing.assert_allclose(session.run(images[:count]), by_hand(images[:count], tensors), atol=1e-5)
    assert (session.predict(images) == by_hand(images, tensors).argmax(1)).all()
    session.switch(None)
    np.testing.assert_allclose(session.run(images), by_hand(images, arrays(place / "base.onnx")), atol=1e-5)


def test_a_site_brings_its_own_classes_and_preprocessing(place: Path) -> None:
    other = Preprocess(None, 4, (0.1,) * 3, (0.9,) * 3).to_json()
    site(place / "other.site", place / "base.onnx", classes=("x", "y"), preprocess=other)
    session = Session(place / "base.onnx")
    assert (session.classes, session.preprocess) == (CLASSES, STEPS.to_json())
    session.switch(place / "other.site")
    assert (session.classes, session.preprocess) == (("x", "y"), other)


def test_bytes_are_normalised_as_in_adaptation(place: Path) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (3, 4, 4, 3), np.uint8)
    steps = STEPS.normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy()
    session = Session(place / "base.onnx")
    np.testing.assert_array_equal(session.run(pixels), session.run(steps))


def test_one_logit_means_two_classes_and_pixels_have_classes_each(tmp_path: Path, images: np.ndarray) -> None:
    single = Session(base(tmp_path / "one.onnx", outputs=1))
    logits = single.run(images)
    assert logits.shape == (5, 1)
    assert (single.predict(images) == [int(z > 0) for z in logits[:, 0]]).all()
    scenes = Session(base(tmp_path / "scenes.onnx", pooled=False))
    assert scenes.predict(images).shape == (5, 4, 4)


def test_other_programs_can_read_a_site(place: Path) -> None:
    tensors = load_file(place / "camera-7.site")
    assert set(tensors) == {"bn.bias", "bn.running_mean"}
    np.testing.assert_array_equal(tensors["bn.running_mean"], np.array([0.5, 2], np.float32))


def test_a_site_file_in_which_any_byte_was_altered_is_refused(place: Path) -> None:
    whole = (place / "camera-7.site").read_bytes()
    assert len(whole) < 1500
    for position in [*range(120), *range(120, len(whole), 9)]:
        (place / "bad.site").write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(FewshiftError, match=r"bad\.site (was altered|is not a site file)"):
            SiteFile.read(place / "bad.site")
    for length in (0, 5, 100, len(whole) - 1):
        (place / "bad.site").write_bytes(whole[:length])
        with pytest.raises(FewshiftError, match=r"bad\.site"):
            SiteFile.read(place / "bad.site")


def test_the_site_of_another_base_is_refused(place: Path) -> None:
    other = base(place / "other.onnx", seed=1, fewshift={"weights": "others"})
    with pytest.raises(FewshiftError, match=r"camera-7\.site was made for another network than that in .*other\.onnx"):
        Session(other, place / "camera-7.site")
    again = base(place / "again.onnx", classes=("a", "b"))
    with pytest.raises(FewshiftError, match="another export of the network"):
        Session(again, place / "camera-7.site")


def test_a_base_in_which_a_weight_was_altered_takes_no_site(place: Path) -> None:
    content = bytearray((place / "base.onnx").read_bytes())
    content[OnnxLayout.of(bytes(content), "").tensors["conv.weight"].start] ^= 1
    (place / "base.onnx").write_bytes(content)
    with pytest.raises(FewshiftError, match="another export"):
        Session(place / "base.onnx", place / "camera-7.site")


def test_a_switch_that_fails_changes_nothing(place: Path, images: np.ndarray) -> None:
    session = Session(place / "base.onnx", place / "camera-7.site")
    before = session.run(images)
    (place / "bad.site").write_bytes(b"x" * 400)
    for bad in (place / "bad.site", place / "none.site"):
        with pytest.raises(FewshiftError):
            session.switch(bad)
    np.testing.assert_array_equal(session.run(images), before)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not an ONNX file"),
        (b"no network at all", "ONNX file"),
        (b"\x3a\xff\xff\xff\x0f", "is not a whole ONNX file"),
        (b"\x3a\x02\x2a\x00", "was not written by `fewshift export`"),
    ],
)
def test_what_is_no_base_network_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "base.onnx").write_bytes(content)
    with pytest.raises(FewshiftError, match=sentence):
        Session(tmp_path / "base.onnx")
    with pytest.raises(FewshiftError, match=r"cannot read the network .*none\.onnx"):
        Session(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((3, 4, 4), np.float32),
        np.zeros((1, 4, 4, 4), np.float32),
        np.zeros((1, 3, 4, 4)),
        np.zeros((1, 3, 5, 4), np.float32),
        np.zeros((1, 5, 4, 3), np.uint8),
    ],
)
def test_images_that_do_not_fit_are_one_sentence(tmp_path: Path, images: np.ndarray) -> None:
    takes = {"type": "float32", "layout": "NCHW", "channels": 3, "size": [4, 4]}
    session = Session(base(tmp_path / "base.onnx", input=takes))
    with pytest.raises(FewshiftError, match=r"images are .*: give float32 \(N, 3, 4, 4\)"):
        session.run(images)


def test_bytes_without_a_known_preprocessing_are_refused(tmp_path: Path) -> None:
    session = Session(base(tmp_path / "base.onnx", preprocess=None))
    with pytest.raises(FewshiftError, match="does not say how images are normalised"):
        session.run(np.zeros((1, 4, 4, 3), np.uint8))


def test_a_missing_runtime_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(FewshiftError, match="pip install onnxruntime"):
        Session(place / "base.onnx")


DEVICE = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is not on this device")

sys.meta_path.insert(0, Nothing())
import numpy as np
from fewshift.deploy.edge import Session

images = np.load({images!r})
session = Session({base!r}, site={site!r})
np.save({out!r}, session.run(images))
ours = [name for name in sys.modules if name.startswith("fewshift.")]
print(*sorted(ours))
"""
DEVICE_FILES = {"images": "images.npy", "base": "base.onnx", "site": "camera-7.site", "out": "out.npy"}
NOT_THERE = {"torch", "torchvision", "timm", "safetensors", "PIL", "onnx", "scipy", "matplotlib", "typer", "rich"}


def test_a_device_without_torch_gets_the_same_logits(place: Path, images: np.ndarray) -> None:
    np.save(place / "images.npy", images)
    files = {name: str(place / file) for name, file in DEVICE_FILES.items()}
    program = DEVICE.format(blocked=NOT_THERE, **files)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = Session(place / "base.onnx", place / "camera-7.site").run(images)
    np.testing.assert_array_equal(np.load(place / "out.npy"), expected)
    assert len(done.stdout.split()) <= 8  # modules of ours that a device loads

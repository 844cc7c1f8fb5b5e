"""OpenVINO: the network of an ONNX file as .xml and .bin, with float32 weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGES = ("openvino",)
SECTION = "fewshift"  # of the file's notes


def as_openvino(onnx: bytes, facts: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The contents of the two files."""
    import openvino

    # read_model, not convert_model, which would report its use
    model = openvino.Core().read_model(onnx)
    for key, value in facts.items():
        model.set_rt_info(json.dumps(value), [SECTION, key])
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "network.xml"
        openvino.save_model(model, xml, compress_to_fp16=False)
        return xml.read_bytes(), xml.with_suffix(".bin").read_bytes()


def openvino_runner(xml: bytes, weights: bytes) -> Any:
    """A function from images to logits, by OpenVINO on the CPU in float32."""
    import openvino

    core = openvino.Core()
    model = core.read_model(xml, openvino.Tensor(np.frombuffer(weights, np.uint8)))
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(images: NDArray[Any]) -> NDArray[Any]:
        return np.array(compiled(images)[0])

    return run

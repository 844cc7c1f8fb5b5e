"""ONNX: the file of a traced network, in which every tensor of the network keeps its name and its values.

The optimizer that comes with the exporter would fold BatchNorm into convolutions, merge tensors that happen to be
equal, and drop biases that happen to be zero: then a site could not change them. So it sees the graph with the
network's tensors as inputs, whose values nobody knows, and cleans up everything else. The runtime folds at load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fewshift.deploy.tracing import Exportable, plain_name, quiet
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

OPSETS = (18, 23)  # the first and the last that the exporter is asked for
OPSET = 20
DIMENSIONS = {"N": "batch", "H": "height", "W": "width", "C": "channels"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def need_packages(extra: str, packages: tuple[str, ...]) -> None:
    """One sentence that names the command, when a package is missing."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise FewshiftError(f'this needs {", ".join(missing)}: pip install "fewshift[{extra}]"')


def check_opset(opset: Any) -> int:
    """The opset, or one sentence when it is not one that can be written."""
    first, last = OPSETS
    if not isinstance(opset, int) or not first <= opset <= last:
        raise FewshiftError(f"opset {opset} cannot be written: choose one from {first} to {last}")
    return opset


def as_onnx(
    program: ExportedProgram, module: Exportable, opset: int, facts: Mapping[str, Any], layout: str
) -> tuple[bytes, list[int | None]]:
    """The content of the file, and the sizes that the input is fixed to, None where one is free."""
    import onnx
    import onnxscript.optimizer
    import torch

    with quiet():
        written = torch.onnx.export(
            program, (), dynamo=True, optimize=False, verbose=False, opset_version=opset,
            input_names=["images"], output_names=["logits"],
        )  # fmt: skip
        assert written is not None
        graph = written.model.graph
        values = {}
        for name in [name for name in graph.initializers if plain_name(name) in module.tensors()]:
            tensor = graph.initializers.pop(name)
            tensor.name = plain_name(name)
            values[tensor.name], tensor.const_value = tensor.const_value, None
            graph.inputs.append(tensor)
        onnxscript.optimizer.optimize(written.model)
        for tensor in [tensor for tensor in graph.inputs if tensor.name in values]:
            graph.inputs.remove(tensor)
            tensor.const_value = values[str(tensor.name)]
            graph.register_initializer(tensor)
        proto: onnx.ModelProto = written.model_proto
    sizes = _named_dimensions(proto, layout)
    _without_traces(proto)
    facts = {**facts, "input": {**facts["input"], "size": sizes}}
    onnx.helper.set_model_props(proto, {key: json.dumps(value) for key, value in facts.items()})
    if (got := next(entry.version for entry in proto.opset_import if not entry.domain)) != opset:
        raise FewshiftError(f"the network can only be written in opset {got}, not {opset}: leave out the opset")
    return proto.SerializeToString(deterministic=True), sizes


def onnx_runner(content: bytes) -> Any:
    """A function from images to logits, by onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(images: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(session.run(None, {"images": images})[0])

    return run


def _named_dimensions(proto: Any, layout: str) -> list[int | None]:
    """Give free dimensions the names of what they are; return height and width where they are fixed."""
    values = [*proto.graph.input, *proto.graph.output]
    for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param.isdecimal():  # what the tracer found to be fixed
            dim.dim_value = int(dim.dim_param)
    shape = proto.graph.input[0].type.tensor_type.shape.dim
    names = {dim.dim_param: DIMENSIONS[axis] for axis, dim in zip(layout, shape, strict=True) if dim.dim_param}
    for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param:
            dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), dim.dim_param)
    sizes = {axis: None if dim.dim_param else dim.dim_value for axis, dim in zip(layout, shape, strict=True)}
    return [sizes["H"], sizes["W"]]


def _without_traces(proto: Any) -> None:
    """Leave out where in which Python file each node came from, and sizes that the runtime works out itself."""
    graph = proto.graph
    del graph.value_info[:]
    graph.ClearField("metadata_props")
    for part in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")

"""torch.export: the traced network as .pt2, for programs that have PyTorch and not the network's code."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

NOTES = "fewshift.json"  # beside the network in the file


def as_program(program: ExportedProgram, facts: Mapping[str, Any]) -> bytes:
    """The content of the file."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # which names files of this machine
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, buffer, extra_files={NOTES: json.dumps(facts)})
    return buffer.getvalue()


def program_runner(content: bytes) -> Any:
    """A function from images to logits, by the network that the file has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.export.load(io.BytesIO(content)).module()

    def run(images: NDArray[Any]) -> NDArray[Any]:
        with torch.no_grad():
            return module(torch.from_numpy(images)).numpy()  # type: ignore[no-any-return]

    return run

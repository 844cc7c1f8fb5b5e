"""A network as a graph that can leave Python: traced once, for batches of any size."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from itertools import chain

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fewshift.core.copies import structural_copy
from fewshift.core.outputs import main_output
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess

NETWORK, STEPS = "network", "fewshift_preprocess"  # the two parts of what is traced
OTHER = 32  # pixels by which the sides of a traced image differ, so that none is taken for the other
LONGEST_REASON = 160
CONTROL_FLOW = ("data-dependent", "GuardOnDataDependent", "data_dependent")  # in what torch.export says of a branch
MULTIPLE = 2  # images to trace with: one would be taken for a constant


class Normaliser(nn.Module):
    """uint8 images (N, height, width, channels), scaled to [0, 1] and normalised, as (N, channels, height, width)."""

    def __init__(self, steps: Preprocess) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(steps.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(steps.std).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """The images as the network takes them."""
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std


class Exportable(nn.Module):
    """Images in, one tensor of logits out; with `steps`, bytes in."""

    def __init__(self, network: nn.Module, steps: Preprocess | None = None) -> None:
        super().__init__()
        self.add_module(NETWORK, network)
        if steps is not None:
            self.add_module(STEPS, Normaliser(steps))

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        parts = dict(self.named_children())
        return main_output(parts[NETWORK](parts[STEPS](images) if STEPS in parts else images))

    @property
    def in_bytes(self) -> bool:
        """Whether it takes bytes."""
        return STEPS in dict(self.named_children())

    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by the names they have in the network itself."""
        return {plain_name(name): tensor for name, tensor in self.state_dict().items()}


def plain_name(name: str) -> str:
    """The name that a tensor has in the network itself."""
    return name.removeprefix(f"{NETWORK}.")


def exportable(model: nn.Module, steps: Preprocess | None) -> Exportable:
    """A copy of the network on the CPU, ready to be traced, or one sentence if it is in half precision."""
    network = copy.deepcopy(structural_copy(model)).cpu().requires_grad_(False)
    for tensor in chain(network.parameters(), network.buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise FewshiftError(f"the network has {kind} weights, and float32 is exported: pass model.float()")
    return Exportable(network, steps).eval()


def trace(module: Exportable, image: Tensor, *, any_size: bool) -> ExportedProgram:
    """The graph of a network that was traced on images of the size of `image`, (channels, height, width).

    With `any_size`, height and width are free where the network lets them be.
    """
    try:
        if any_size:
            with suppress(Exception):  # whatever it was, with fixed sides it is said again
                return _traced(module, _of_other_sides(image), free_sides=True)
        return _traced(module, image, free_sides=False)
    except FewshiftError:
        raise
    except Exception as error:  # a user's forward raises whatever it likes, and so does the tracer
        raise FewshiftError(_reason(module, error)) from error


def _traced(module: Exportable, image: Tensor, *, free_sides: bool) -> ExportedProgram:
    sample = torch.zeros(MULTIPLE, *image.shape)
    if module.in_bytes:
        sample = sample.permute(0, 2, 3, 1).byte()
    sides = (1, 2) if module.in_bytes else (2, 3)
    dims = {0: Dim.DYNAMIC} | (dict.fromkeys(sides, Dim.AUTO) if free_sides else {})
    with torch.no_grad(), quiet():
        return torch.export.export(module, (sample,), dynamic_shapes=(dims,), strict=False)


def _of_other_sides(image: Tensor) -> Tensor:
    """An image of different height and width: sides of equal length would be taken for one."""
    channels, height, width = image.shape
    return image if height != width else image.new_zeros(channels, height, width + OTHER)


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, tracer and exporter keep warnings, logs and lines about their own insides to themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # torch.export prints the part of the graph that it has
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(module: Exportable, error: Exception) -> str:
    """Why the network cannot be traced, in one sentence."""
    kind, text = type(module.get_submodule(NETWORK)).__name__, f"{type(error).__name__}: {error}"
    if any(word in text for word in CONTROL_FLOW):
        return (
            f"this {kind} cannot be exported: its forward decides in Python by values of a tensor (an if, .item()), "
            "which a graph cannot: use torch.where, or decide outside of the network"
        )
    if "specialized" in text or "ConstraintViolation" in text:
        return (
            f"this {kind} cannot be exported: its forward fixes the number of images in a batch: "
            "take it from images.shape[0]"
        )
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"this {kind} cannot be exported: torch.export cannot trace its forward ({line[:LONGEST_REASON]}): "
        "rewrite that part in plain tensor operations"
    )

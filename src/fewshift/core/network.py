"""A view of a network: its BatchNorm layers, its head, its logits. The network itself is never edited."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from fewshift.core._arguments import checked_images, checked_model
from fewshift.core.copies import structural_copy, unused
from fewshift.core.hooks import before, keep_input, keeps_input, without_clone
from fewshift.core.layout import fastest_layout, laid_out, with_layout
from fewshift.core.normalisation import Whitening
from fewshift.core.outputs import as_two, give_one_row, give_two_rows, is_single, main_output, refuse_probability
from fewshift.core.outside import AFFINE, STATISTICS
from fewshift.core.probing import find_head, named_head, probed
from fewshift.core.sharing import same_memory
from fewshift.core.soundness import refuse_broken_weights
from fewshift.errors import FewshiftError

LIVE = 6  # activations of the largest size that a pass holds at once: a branch, its shortcut, their moments
FUSED = "convolution and BatchNorm are fused, nothing is left to adapt"  # a reason to skip a layer
UNUSED = "never executed"  # another
COMPUTED = "its tensors are computed, by a parametrisation, by pruning or when they are asked for"  # another
FROZEN_TENSORS = {*AFFINE, *STATISTICS}


@dataclass(frozen=True)
class Layer:
    """A BatchNorm layer whose statistics can be adapted."""

    name: str
    kind: str
    channels: int
    affine: bool  # whether it has a weight and a bias
    calls: int | None  # how often one forward pass executes it; None before the network has been run


@dataclass(frozen=True)
class Skipped:
    """A normalisation layer that is left alone, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Network:
    """A network in evaluation mode, with what adaptation needs to know about it.

    `model` has its own modules and shares its parameters with the user's network: they are read, never written.

    Layers stand in the order in which a forward pass executes them. `head` names the linear layer (or convolution)
    whose output is the network's output, if there is one; pixel logits may be upsampled from it.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    head: str | None
    classes: int | None
    output: tuple[int, ...] = ()  # shape of the logits of one image: (classes,) or (classes, height, width)
    widest: float = 0  # values that enter the widest layer, per value of the image
    single: bool = False  # whether the user's network has one output for two classes; here its head has two rows
    learns: bool = True  # whether its forward lets gradients reach BatchNorm layers
    layout: torch.memory_format = torch.contiguous_format  # how passes over it are fastest
    tied: Mapping[str, str] = field(default_factory=dict)  # layer -> a tensor elsewhere that is its weight or bias too

    @classmethod
    def of(cls, model: nn.Module | Network, images: Tensor, head: str | None = None) -> Network:
        """The view of `model`, found by running it once on two of `images`; a view is returned as it is."""
        if isinstance(model, Network):
            return model
        private = structural_copy(model)
        if not isinstance(images, Tensor):
            raise FewshiftError(f"images are of type {type(images).__name__}: give a tensor of a few images")
        refuse_broken_weights(private)
        listed = list_layers(private)
        images = like(private, checked_images(images)[:2])
        if not images.numel():
            raise FewshiftError("there are no images: give at least one")
        with unused(checked_model(model)):
            seen = probed(private, {layer.name: listed.carries_affine(layer) for layer in listed.layers}, images)
        if not keeps_input(private):
            keep_input(private)  # whether it writes into its images may depend on what they are, and how many
        layout = fastest_layout(private, images)
        logits, calls = seen.logits, seen.calls
        head = named_head(private, head, seen.outputs, logits) if head else find_head(private, seen.outputs, logits)
        if single := is_single(logits):
            refuse_probability(seen.outputs, logits)
            logits, head = as_two(logits), give_two_rows(private, head, images, logits)
        executed = [replace(layer, calls=calls.count(layer.name)) for layer in listed.layers]
        left = seen.unfit | {layer.name: UNUSED for layer in executed if not layer.calls}
        alone = [Skipped(layer.name, layer.kind, left[layer.name]) for layer in executed if layer.name in left]
        return replace(
            listed,
            layers=tuple(
                sorted(
                    (layer for layer in executed if layer.name not in left), key=lambda layer: calls.index(layer.name)
                )
            ),
            skipped=listed.skipped + tuple(alone),
            head=head,
            classes=logits.shape[1],
            output=tuple(logits.shape[1:]),
            widest=seen.widest / images.numel(),
            single=single,
            learns=seen.learns,
            layout=layout,
        )

    def laid_out(self, images: Tensor) -> Tensor:
        """Images as a pass over this network takes them: on its device, in its type and in its layout."""
        return laid_out(like(self.model, images), self.layout)

    def with_layout(self, model: nn.Module) -> nn.Module:
        """`model`, a working copy that passes are made with, in the layout of this network."""
        return with_layout(model, self.layout)

    def bytes_to_pass(self, images: Tensor | Sequence[Tensor]) -> int:
        """About how much memory one pass without gradients over these images takes."""
        values = sum(image.numel() for image in images)
        return int(LIVE * self.widest * values * images[0].element_size())

    def copy(self) -> nn.Module:
        """A working copy that may be hooked, and whose BatchNorm layers and head may be written into.

        It shares all other tensors with this view and costs next to nothing; never change those. Layers without weight
        or bias get 1 and 0, and those that share them get their own.
        """
        own = [self.model.get_submodule(name) for name in (*(layer.name for layer in self.layers), self.head) if name]
        written = {id(tensor) for module in own for tensor in _tensors(module)}
        shared = {
            id(tensor): tensor
            for tensor in _tensors(self.model)
            if id(tensor) not in written and not tensor.requires_grad
        }
        working = copy.deepcopy(self.model, shared).requires_grad_(False)
        for layer in self.layers:
            if self.carries_affine(layer):
                continue
            module = batchnorm(working, layer.name)
            for key, neutral in (("weight", torch.ones_like), ("bias", torch.zeros_like)):
                present = getattr(module, key, None)
                value = neutral(cast(Tensor, module.running_mean)) if present is None else present.clone()
                setattr(module, key, nn.Parameter(value, requires_grad=False))
        return working

    def carries_affine(self, layer: Layer) -> bool:
        """Whether the layer has a weight and a bias of its own, into which new statistics can be written."""
        return layer.affine and layer.name not in self.tied

    def with_tensors(self, changed: Mapping[str, Tensor]) -> nn.Module:
        """A plain copy of the network with some tensors of its state dict replaced."""
        result = copy.deepcopy(self.model)
        state = result.state_dict()
        with torch.no_grad():
            for name, tensor in changed.items():
                if isinstance(tensor, Tensor):  # what else a module keeps is in the copy already
                    state[name].copy_(tensor)
        return result

    def as_given(self, predictor: nn.Module) -> nn.Module:
        """The predictor as the user's network is: with as many outputs, and as careless with its input."""
        one_row = self.single and self.head is not None
        if not one_row and not keeps_input(predictor):
            return predictor
        result = copy.deepcopy(predictor, {} if one_row else {id(tensor): tensor for tensor in _tensors(predictor)})
        without_clone(result)
        if one_row:
            give_one_row(result, str(self.head))
        return result

    def need_head(self, purpose: str) -> str:
        """The head's name, or an error that says what cannot be done without one."""
        if self.head is None:
            raise FewshiftError(
                f"{purpose} needs a last linear layer, and no layer gives this network's output directly: "
                "pass head='name', or keep the source's head (for LCCS classifier='source')"
            )
        return self.head


def list_layers(model: nn.Module) -> Network:
    """The BatchNorm layers of `model` in order of registration, without running it."""
    layers, skipped = [], []
    model = checked_model(model)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if reason := _reason_to_skip(module):
            skipped.append(Skipped(name, kind, reason))
        elif is_batchnorm(module):
            affine = all(getattr(module, key, None) is not None for key in ("weight", "bias"))
            channels = 0 if module.running_mean is None else module.running_mean.numel()
            layers.append(Layer(name, kind, channels, affine, calls=None))
    others = same_memory(model)
    tied = {
        layer.name: others[name][0]
        for layer in layers
        for name in (f"{layer.name}.bias", f"{layer.name}.weight")
        if name in others
    }
    return Network(model, tuple(layers), tuple(skipped), head=None, classes=None, tied=tied)


def is_batchnorm(module: nn.Module) -> bool:
    """BatchNorm of any dimension or subclass, or a frozen one, which keeps its affine parameters as buffers."""
    buffers = dict(module.named_buffers(recurse=False))
    return isinstance(module, _BatchNorm) or buffers.keys() >= FROZEN_TENSORS


def batchnorm(model: nn.Module, name: str) -> _BatchNorm:
    """The BatchNorm layer of that name; a frozen one has the same tensors."""
    return cast(_BatchNorm, model.get_submodule(name))


def linear(model: nn.Module, name: str) -> nn.Linear:
    """The head of that name; a 1x1 convolution has the same tensors, with two more dimensions."""
    return cast(nn.Linear, model.get_submodule(name))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def free_memory(device: torch.device) -> int | None:
    """Bytes that a device can give without swapping; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else None


def like(model: nn.Module, images: Tensor) -> Tensor:
    """`images` on the device and in the floating type of the network's weights."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            return images.to(tensor.device, tensor.dtype)
    return images


def copied_like(model: nn.Module, images: Tensor) -> Tensor:
    """The same in memory of its own: a network may write into its input, and `images` are somebody's."""
    moved = like(model, images)
    return moved.clone() if moved is images else moved


def logits_of(output: Any) -> Tensor:
    """The logits in what a network returns: a tensor, an object with `.logits`, a dict or a tuple.

    A single logit z for each image becomes [0, z]: the second class has the probability sigmoid(z).
    """
    logits = main_output(output)
    if logits.ndim < 2:
        raise FewshiftError(
            f"the network's output for one image has shape {tuple(logits.shape)}, so it drops the dimension of the "
            "batch: let it return one row of logits per image (flatten(1) where it has squeeze())"
        )
    return as_two(logits)


@contextmanager
def head_inputs(model: nn.Module, head: str) -> Iterator[list[Tensor]]:
    """Within the block, collect what enters the head: one tensor per forward pass, in the type of its weights.

    A forward with autocast computes in fewer bits than the weights have.
    """
    seen: list[Tensor] = []
    layer = linear(model, head)
    with before(layer, lambda _, inputs: seen.append(inputs.to(layer.weight.dtype))):
        yield seen


def features(model: nn.Module, head: str, images: Tensor) -> Tensor:
    """What enters the head, without gradient: (N, features), or (N, features, 1, 1) before a 1x1 convolution."""
    with torch.no_grad(), head_inputs(model, head) as seen:
        model(images)
    return seen[-1]


def _reason_to_skip(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return "instance normalisation has no source statistics to blend"
    if isinstance(module, Whitening):
        return "whitening layers are not BatchNorm"
    if is_batchnorm(module) and (parametrize.is_parametrized(module) or _computed(module)):
        return COMPUTED
    if "intrinsic" in type(module).__module__ and "Bn" in type(module).__name__:
        return FUSED
    return None


def _computed(module: nn.Module) -> bool:
    """Whether a tensor of BatchNorm is there without being registered: pruning and `__getattr__` make it anew."""
    own = module._parameters.keys() | module._buffers.keys()
    return any(getattr(module, key, None) is not None for key in FROZEN_TENSORS - own)

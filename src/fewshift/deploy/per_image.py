"""One pass through one network in which every image has BatchNorm tensors and a head of its own.

BatchNorm in evaluation mode treats each image and channel alone. So N images of C channels are one image of N * C
channels to it, whose tensors are those of each image's site, one after the other: the layer's own `forward`, with its
fused activation, does the rest, at the cost of a plain pass. Where the channels of a pixel lie side by side in memory
(channels last), that view would be a copy. There a hook scales and shifts each image, and the layer itself is neutral.

The head runs once for each site, on its images.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewshift.core.hooks import before
from fewshift.core.network import batchnorm

COUNTER = "num_batches_tracked"  # evaluation never reads it
FULL_TYPES = (torch.float32, torch.float64)  # in which scaling and shifting apart loses nothing that counts
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

NEUTRAL = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}

Changes = Mapping[str, Tensor]
"""The tensors of a site that differ from the source network's, by their names."""


class UnmixableError(Exception):
    """A layer's input has not one row for each image."""


@dataclass(frozen=True)
class Mixture:
    """The sites of a batch, each once, and for each image the number of its site."""

    sites: Sequence[Changes]
    of: list[int]

    @classmethod
    def of_images(cls, sites: Sequence[Changes]) -> Mixture:
        """From the site of each image; equal sites are the same object."""
        number: dict[int, int] = {}
        of = [number.setdefault(id(changes), len(number)) for changes in sites]
        return cls([sites[of.index(each)] for each in range(len(number))], of)

    def values(self, name: str, source: Tensor) -> list[Tensor]:
        """A tensor of each site; the source network's where a site does not change it."""
        return [changes.get(name, source) for changes in self.sites]


class PerImage:
    """A private network, whose BatchNorm layers and head can be others for each image of a batch."""

    def __init__(self, model: nn.Module, layers: Sequence[str], head: str | None) -> None:
        self._model = model
        self._layers = frozenset(layers)
        self._head = head
        self._twin = None if head is None else _twin(model.get_submodule(head))
        self._source = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._side_by_side: set[str] = set()  # layers whose input last had the channels of a pixel side by side
        self._scratch = torch.empty(0)  # of one pass: fresh memory costs more than scaling and shifting

    def takes(self, changes: Changes) -> bool:
        """Whether these tensors are all BatchNorm's or the head's."""
        return all(_owner(name) in self._layers or _owner(name) == self._head for name in changes)

    def touched(self, changes: Changes) -> set[str]:
        """The names of the layers that these tensors belong to."""
        return {_owner(name) for name in changes}

    def __call__(self, images: Tensor, sites: Sequence[Changes]) -> Any:
        """The network's output, each image answered with the tensors of its site: `sites` has one entry for each."""
        mixture = Mixture.of_images(sites)
        touched = {_owner(name) for changes in mixture.sites for name in changes if not name.endswith(COUNTER)}
        tensors: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for name in sorted(touched & self._layers):
                tensors |= self._normalise(name, mixture, hooks)
            if self._head in touched:
                tensors |= self._answer(mixture, hooks)
            try:
                # a tensor that layers share has other values in each, for they may have statistics of their own
                return functional_call(self._model, tensors, (images,), tie_weights=False)
            finally:
                self._scratch = torch.empty(0)

    def _normalise(self, name: str, mixture: Mixture, hooks: ExitStack) -> dict[str, Tensor]:
        """Hook a BatchNorm layer; the tensors with which it has to run."""
        layer = batchnorm(self._model, name)
        own = [key for key in NEUTRAL if isinstance(getattr(layer, key, None), Tensor)]
        values = {key: mixture.values(f"{name}.{key}", self._source[f"{name}.{key}"]) for key in own}
        eps = getattr(layer, "eps", None)  # a frozen layer may have none that can be seen
        if name in self._side_by_side and eps is not None and values["running_var"][0].dtype in FULL_TYPES:
            tensors, entering, after = self._apart(name, mixture.of, values, eps)
        else:
            tensors, entering, after = self._as_one(name, mixture.of, values)
        hooks.enter_context(before(layer, entering))
        hooks.enter_context(layer.register_forward_hook(after))
        return {f"{name}.{key}": tensor for key, tensor in tensors.items()}

    def _as_one(
        self, name: str, of: list[int], values: Mapping[str, list[Tensor]]
    ) -> tuple[dict[str, Tensor], Any, Any]:
        """All images as one of many channels."""
        formats: list[torch.memory_format] = []  # of the input, until the layer has run

        def entering(_: nn.Module, maps: Tensor) -> Tensor:
            _check(maps, len(of))
            formats.append(self._note(name, maps))
            return maps.reshape(1, -1, *maps.shape[2:])

        def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return output.reshape(len(of), -1, *output.shape[2:]).contiguous(memory_format=formats.pop())

        return {key: torch.cat([each[site] for site in of]) for key, each in values.items()}, entering, after

    def _apart(
        self, name: str, of: list[int], values: Mapping[str, list[Tensor]], eps: float
    ) -> tuple[dict[str, Tensor], Any, Any]:
        """Scaled and shifted before a layer that is neutral: weight 1, bias 0, mean 0, variance 1."""
        table = {key: torch.stack(each) for key, each in values.items()}
        scale = (table["running_var"] + eps).rsqrt() * table.get("weight", 1)
        shift = (table.get("bias", 0) - table["running_mean"] * scale)[of]
        scale = scale[of]

        def entering(_: nn.Module, maps: Tensor) -> Tensor:
            _check(maps, len(of))
            self._note(name, maps)
            shape = (*scale.shape, *[1] * (maps.ndim - 2))
            return torch.addcmul(shift.view(shape), maps, scale.view(shape), out=self._room_for(maps))

        def after(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.untyped_storage().data_ptr() == self._scratch.untyped_storage().data_ptr():
                self._scratch = torch.empty(0)  # the layer works in place: the memory is now its output's

        tensors = {key: torch.full_like(each[0], NEUTRAL[key]) for key, each in values.items()}
        return tensors | {"running_var": tensors["running_var"] - eps}, entering, after

    def _room_for(self, maps: Tensor) -> Tensor:
        """Memory for as many values, laid out alike; the next layer uses it again."""
        strides = torch.empty_like(maps, device="meta").stride()  # without the gaps that the maps may have
        old = self._scratch
        if maps.numel() > old.numel() or (maps.dtype, maps.device) != (old.dtype, old.device):
            self._scratch = maps.new_empty(maps.numel())
        return self._scratch[: maps.numel()].as_strided(maps.shape, strides)

    def _note(self, name: str, maps: Tensor) -> torch.memory_format:
        """Remember how the input of a layer lies in memory: the next pass takes the faster way."""
        last = FORMATS.get(maps.ndim)
        if last is not None and not maps.is_contiguous() and maps.is_contiguous(memory_format=last):
            self._side_by_side.add(name)
            return last
        self._side_by_side.discard(name)
        return torch.contiguous_format

    def _answer(self, mixture: Mixture, hooks: ExitStack) -> dict[str, Tensor]:
        """Hook the head: it answers for one site, and its twin for each of the others."""
        assert self._head is not None  # or it was not touched
        assert self._twin is not None
        twin, head, count = self._twin, self._head, len(mixture.of)
        values = {key: mixture.values(f"{head}.{key}", tensor) for key, tensor in twin.named_parameters()}
        heads = [{key: each[site] for key, each in values.items()} for site in range(len(mixture.sites))]
        rows: dict[int, list[int]] = {}
        for row, site in enumerate(mixture.of):
            rows.setdefault(site, []).append(row)
        (first, *others), inputs = rows, []

        def entering(_: nn.Module, features: Tensor) -> Tensor:
            _check(features, count)
            inputs.append(features)
            return features[rows[first]]

        def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            features = inputs.pop()
            answers = output.new_empty(count, *output.shape[1:])
            answers[rows[first]] = output
            for site in others:
                answers[rows[site]] = functional_call(twin, heads[site], (features[rows[site]],))
            return answers

        layer = self._model.get_submodule(head)
        hooks.enter_context(before(layer, entering))
        hooks.enter_context(layer.register_forward_hook(after))
        return {f"{head}.{key}": tensor for key, tensor in heads[first].items()}


def _twin(layer: nn.Module) -> nn.Module:
    """The same layer around the same tensors, without hooks."""
    return copy.deepcopy(layer, {id(parameter): parameter for parameter in layer.parameters()})


def _owner(tensor: str) -> str:
    """The name of the module that has this tensor."""
    return tensor.rpartition(".")[0]


def _check(inputs: Tensor, count: int) -> None:
    """A layer's input has to have one row for each image."""
    if inputs.ndim < 2 or len(inputs) != count:
        raise UnmixableError

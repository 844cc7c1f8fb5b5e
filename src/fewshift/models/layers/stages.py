"""The stages of a network: found by their names, read by hooks, whichever library has built it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core.copies import structural_copy
from fewshift.core.network import like
from fewshift.errors import FewshiftError

AUTO = "auto"
FAMILIES = (  # what libraries call their four stages
    ("layer1", "layer2", "layer3", "layer4"),  # ResNets of timm and torchvision
    ("stages.0", "stages.1", "stages.2", "stages.3"),  # timm's later networks
    ("s1", "s2", "s3", "s4"),  # RegNets of timm
    ("block1", "block2", "block3", "block4"),  # and of torchvision
    ("denseblock1", "denseblock2", "denseblock3", "denseblock4"),
)
SHOWN = 6  # names in an error


def chosen_layers(model: nn.Module, wanted: str, stages: Sequence[int]) -> tuple[str, ...]:
    """The layers that a setting chooses: by their names, with commas between, or with "auto" these stages, from 1."""
    if wanted == AUTO:
        own = find_stages(model)
        return tuple(own[stage - 1] for stage in stages)
    names = tuple(name.strip() for name in wanted.split(","))
    known = dict(model.named_modules())
    for name in names:
        if not name or name not in known:
            raise FewshiftError(
                f"this {type(model).__name__} has no layer {name!r}: set layers to some of {_listed(model)}"
            )
        if names.count(name) > 1:
            raise FewshiftError(f"layer {name!r} is named twice: name it once")
    return names


def find_stages(model: nn.Module) -> tuple[str, ...]:
    """The names of the four stages, wherever in the network they stand; one sentence if there are none or several."""
    sets = _stages(model)
    if not sets:
        raise FewshiftError(
            f"this {type(model).__name__} has no stages layer1 to layer4, nor by another name that is known: "
            f"set layers to some of {_listed(model)}"
        )
    if len(sets) > 1:
        first = " and from ".join(stages[0] for stages in sets)
        raise FewshiftError(f"this {type(model).__name__} has stages from {first}: name those that count with layers")
    return sets[0]


def outputs_of(model: nn.Module, layers: Sequence[str], images: Tensor) -> dict[str, Any]:
    """What these layers give on the way of `images` through the network; what is not executed gives nothing."""
    seen: dict[str, Any] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
        for name in layers
    ]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def maps_of(model: nn.Module, layers: Sequence[str], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The maps (2, channels, height, width) that these layers give of two blank images; one sentence if not a map."""
    private = structural_copy(model)
    seen = outputs_of(private, layers, like(private, torch.zeros(2, *shape)))
    for name in layers:
        if name not in seen:
            raise FewshiftError(f"layer {name!r} is never executed: name others with layers")
        if not isinstance(seen[name], Tensor) or seen[name].ndim != 4:
            raise FewshiftError(f"layer {name!r} does not give a map for each channel: name others with layers")
    return {name: seen[name] for name in layers}


def _stages(model: nn.Module) -> list[tuple[str, ...]]:
    """All sets of four stages, by their full names."""
    known = {name for name, _ in model.named_modules()}
    return [
        tuple(before + stage for stage in family)
        for family in FAMILIES
        for before in sorted(name.removesuffix(family[0]) for name in known if f".{name}".endswith(f".{family[0]}"))
        if all(before + stage in known for stage in family)
    ]


def _listed(model: nn.Module) -> str:
    """The stages, or else layers that may be some: the parts of the network, and the parts of those that are lists."""
    names = [stage for stages in _stages(model) for stage in stages]
    for name, part in model.named_children() if not names else ():
        inner = [f"{name}.{child}" for child, _ in part.named_children()]
        names += inner if inner and isinstance(part, (nn.Sequential, nn.ModuleList)) else [name]
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")

"""Where normalisation layers go in a network: in the place of BatchNorm layers, or behind residual additions.

Nothing here knows an architecture: layers are found by name, blocks by what stands in them. What is done follows from
the network and the names alone, so that whoever loads the weights can do the same to an untrained network.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewshift.core.hooks import before
from fewshift.core.normalisation import InstanceNorm
from fewshift.errors import FewshiftError
from fewshift.models.layers.stages import AUTO, chosen_layers, find_stages, maps_of

STEM = "bn1"  # what libraries call the norm before the first stage
ACTIVATIONS = ("relu", "act")  # how they begin the names of activations
ENDS = (1, 2)  # the stages at whose end "auto" normalises
PLACE = "after_addition"

_expected = threading.local()  # the addition that this thread is about to do


Make = Callable[
    [int], nn.Module
]  # channels -> a layer with `begin_as`, which takes over what a BatchNorm layer has learned


class AfterAddition(nn.Module):
    """A layer between the addition at the end of a residual block and the activation that follows.

    The addition is no module, and one activation may serve the whole block: it is the call after the block's last norm
    whose input is normalised. A pass that was broken off leaves nothing behind, and threads do not see each other.
    """

    def __init__(self, norm: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        block.register_forward_pre_hook(self._begin)
        _norms(block)[-1][1].register_forward_hook(self._expect)
        for activation in _activations(block):
            before(activation, self._normalise)

    def forward(self, total: Tensor) -> Tensor:
        """What the activation is given."""
        output: Tensor = self.norm(total)
        return output

    # methods, not closures: a copy of the network has hooks that know the copy
    def _begin(self, *_: Any) -> None:
        _expected.by = None

    def _expect(self, *_: Any) -> None:
        _expected.by = self

    def _normalise(self, _: nn.Module, total: Tensor) -> Tensor | None:
        if getattr(_expected, "by", None) is not self:
            return None
        _expected.by = None
        normalised: Tensor = self(total)
        return normalised


def normalise_at(model: nn.Module, wanted: str, make: Make) -> nn.Module:
    """The network with new layers: a BatchNorm layer is replaced, a residual block or stage normalised at its end.

    "auto" is the stem's BatchNorm and the ends of the first two stages.
    """
    for name in _stem_and_ends(model) if wanted == AUTO else chosen_layers(model, wanted, ENDS):
        module = model.get_submodule(name)
        if isinstance(module, _BatchNorm):
            replace_batchnorm(model, name, make)
        else:
            _normalise_end(name, _last_block(name, module), make)
    return model


def replace_batchnorm(model: nn.Module, name: str, make: Make) -> None:
    """Another layer in the place of a BatchNorm layer, beginning with what that has learned.

    What else a BatchNorm layer does, such as the activation in some of timm's, it still does.
    """
    batchnorm = model.get_submodule(name)
    assert isinstance(batchnorm, _BatchNorm)
    layer = _made(name, make, batchnorm)
    layer.begin_as(batchnorm)
    others = OrderedDict(batchnorm.named_children())
    model.set_submodule(name, nn.Sequential(OrderedDict(norm=layer) | others) if others else layer)


def first_norms(model: nn.Module, wanted: str, stages: tuple[int, ...]) -> Iterator[str]:
    """The first BatchNorm layer of every residual block in these stages, blocks or layers."""
    for name in chosen_layers(model, wanted, stages):
        module = model.get_submodule(name)
        blocks = [(name, module)]
        if isinstance(module, nn.Sequential):
            blocks = [(f"{name}.{part}", block) for part, block in module.named_children()]
        for path, block in blocks:
            yield path if isinstance(block, _BatchNorm) else f"{path}.{_norms(_checked(path, block))[0][0]}"


def instance_norms(model: nn.Module) -> tuple[str, ...]:
    """The names of the layers that normalise by image."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, InstanceNorm))


def check_sizes(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise one sentence when images of `shape` leave a map with one pixel: less its mean, nothing is left of it."""
    for name, features in maps_of(model, instance_norms(model), shape).items():
        if features[0, 0].numel() < 2:
            raise FewshiftError(
                f"the maps of layer {name!r} have one pixel, and instance normalisation would make it 0: "
                "raise size, or name others with layers"
            )


def _stem_and_ends(model: nn.Module) -> tuple[str, ...]:
    stages = find_stages(model)
    stem = f"{stages[0].rpartition('.')[0]}.{STEM}".lstrip(".")
    if not isinstance(dict(model.named_modules()).get(stem), _BatchNorm):
        raise FewshiftError(
            f"this {type(model).__name__} has no BatchNorm layer {stem!r} before its stages: "
            f"set layers to a norm and stages of it, such as {', '.join([*_some_norms(model), stages[0]])}"
        )
    return stem, *(stages[stage - 1] for stage in ENDS)


def _normalise_end(name: str, block: nn.Module, make: Make) -> None:
    if PLACE in dict(block.named_children()):
        raise FewshiftError(f"layer {name!r} ends with a block that is named already: name it once")
    norm = _made(name, make, _norms(block)[-1][1])
    block.add_module(PLACE, AfterAddition(norm, block))


def _last_block(name: str, module: nn.Module) -> nn.Module:
    while isinstance(module, nn.Sequential) and len(module):
        module = module[-1]
    return _checked(name, module)


def _checked(name: str, block: nn.Module) -> nn.Module:
    if not _norms(block) or not _activations(block):
        raise FewshiftError(
            f"layer {name!r} is a {type(block).__name__}, neither a BatchNorm layer nor a residual block with norms "
            "and activations: name others with layers"
        )
    return block


def _norms(block: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The BatchNorm layers of a block itself: those of its shortcut stand deeper."""
    return [(name, child) for name, child in block.named_children() if isinstance(child, _BatchNorm)]


def _activations(block: nn.Module) -> list[nn.Module]:
    return [child for name, child in block.named_children() if name.startswith(ACTIVATIONS)]


def _some_norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)][:1]


def _made(name: str, make: Make, like: _BatchNorm) -> Any:
    """A new layer with as many channels, on the same device, of the same type and in the same mode."""
    try:
        layer = make(like.num_features).train(like.training)
    except FewshiftError as error:
        raise FewshiftError(f"layer {name!r}: {error}") from error
    tensors = [tensor for tensor in chain(like.parameters(), like.buffers()) if tensor.is_floating_point()]
    return layer.to(tensors[0].device, tensors[0].dtype) if tensors else layer

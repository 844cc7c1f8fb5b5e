"""The layers that a training algorithm puts into a network before it is trained.

A card names the algorithm and its settings. Whoever loads the weights makes the same change to an untrained network,
then fills it: how the network was trained does not matter here.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from fewshift.core import normalisation
from fewshift.core.normalisation import InstanceBatchNorm, InstanceNorm
from fewshift.core.settings import Settings
from fewshift.errors import FewshiftError
from fewshift.models.layers.placement import first_norms, normalise_at, replace_batchnorm
from fewshift.models.layers.stages import AUTO

IBN_STAGES = (1, 2, 3)  # of variant a
VARIANTS = ("a", "b")
SHARE = 0.5


@dataclass(frozen=True)
class LayerChange(Settings):
    """A change of layers, as a value. As it is, it changes nothing."""

    def modify(self, model: nn.Module) -> nn.Module:
        """Change `model` and return it.

        A function of the network and the fields alone, so that loading repeats what training did.
        """
        return model


@dataclass(frozen=True)
class IBNChange(LayerChange):
    """Instance normalisation in shallow layers, beside BatchNorm or in its place.

    - variant: a normalises part of the channels by image, after the first convolution of every block; b normalises all
      channels by image, in the stem and after the addition at the end of the first two stages.
    - share: of the channels that variant a normalises by image.
    - layers: where, with commas between: stages, blocks or BatchNorm layers; auto is, for a, the first three of a
      network's four stages; for b, the stem's BatchNorm and the first two stages.
    """

    variant: str = "b"
    share: float = SHARE
    layers: str = AUTO

    def check(self) -> None:
        """A variant that exists, and a share of the channels."""
        self.one_of(variant=VARIANTS)
        if not 0 < self.share < 1:
            raise FewshiftError(f"share={self.share} leaves one side empty: give a number between 0 and 1")
        if self.variant == "b" and self.share != SHARE:
            raise FewshiftError("share is of variant a, and variant b normalises all channels: leave it out")

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the layers in; they begin with what the BatchNorm layers in their place have learned."""
        if self.variant == "b":
            return normalise_at(model, self.layers, InstanceNorm)
        for name in list(first_norms(model, self.layers, IBN_STAGES)):
            replace_batchnorm(model, name, lambda channels: InstanceBatchNorm(channels, self.share))
        return model


@dataclass(frozen=True)
class ISWChange(LayerChange):
    """Instance norms without weights of their own.

    - layers: where, with commas between: a BatchNorm layer is replaced, a stage or block normalised after its last
      addition; auto is the stem's BatchNorm and the first two of a network's four stages.
    """

    layers: str = AUTO

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the instance norms in."""
        return normalise_at(model, self.layers, lambda channels: InstanceNorm(channels, affine=False))


@dataclass(frozen=True)
class WhiteningChange(LayerChange):
    """Layers that whiten shallow features.

    - group: so many channels are whitened together; it divides the channels of every layer.
    - iterations: of Newton's; more whiten better and cost more.
    - decay: running = decay * running + (1 - decay) * batch.
    - layers: where, with commas between: a BatchNorm layer is replaced, a stage or block whitened after its last
      addition; auto is the stem's BatchNorm and the first two of a network's four stages.
    """

    group: int = 16
    iterations: int = 5
    decay: float = 0.9
    layers: str = AUTO

    @abc.abstractmethod
    def layer(self, channels: int) -> normalisation.Whitening:
        """A whitening layer for so many channels."""

    def check(self) -> None:
        """A group, and a share that is kept."""
        self.at_least(group=1)
        if self.decay > 1:
            raise FewshiftError(f"decay={self.decay} is no share: give a number from 0 to 1")

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the layers in; the stem's begins with what the BatchNorm layer in its place has learned."""
        return normalise_at(model, self.layers, self.layer)


@dataclass(frozen=True)
class IterNormChange(WhiteningChange):
    """Whitening by the batch, at test by the running matrix."""

    group: int = 64

    def layer(self, channels: int) -> normalisation.Whitening:
        """A layer of this kind."""
        return normalisation.IterNormLayer(channels, self.group, self.iterations, self.decay)


@dataclass(frozen=True)
class SwitchableWhiteningChange(WhiteningChange):
    """Whitening by statistics of batch and image, mixed.

    - tied: one mixture for means and covariances.
    """

    decay: float = 0.99
    tied: bool = False

    def layer(self, channels: int) -> normalisation.Whitening:
        """A layer of this kind."""
        return normalisation.SwitchableWhiteningLayer(channels, self.group, self.iterations, self.decay, self.tied)


@dataclass(frozen=True)
class HiddenHead(LayerChange):
    """A new head of two layers in the place of the last linear layer.

    - hidden: the width of the first of the two, which ends in a ReLU; 0 keeps the network's own head.
    """

    hidden: int = 512

    def modify(self, model: nn.Module) -> nn.Module:
        """Put the new head in: linear, ReLU, linear."""
        if self.hidden:
            name, head = last_linear(model)
            rows = (nn.Linear(head.in_features, self.hidden), nn.ReLU(), nn.Linear(self.hidden, head.out_features))
            model.set_submodule(name, nn.Sequential(*rows).to(head.weight))
        return model


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The last linear layer and its name, or one sentence."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]
    if not layers:
        raise FewshiftError(
            f"this {type(model).__name__} has no linear layer that a new head could replace: set hidden to 0"
        )
    return layers[-1]


CHANGES: dict[str, type[LayerChange]] = {
    "erm": LayerChange,
    "mixstyle": LayerChange,
    "csg": HiddenHead,
    "ibn": IBNChange,
    "switchable-whitening": SwitchableWhiteningChange,
    "iternorm": IterNormChange,
    "isw": ISWChange,
}


def change_of(algorithm: Mapping[str, Any] | None) -> LayerChange:
    """The change of layers that goes with a card's `algorithm`; what only training needs is left aside."""
    if algorithm is None:
        return LayerChange()
    name = algorithm["name"]
    if name not in CHANGES:
        raise FewshiftError(f"unknown algorithm {name!r}: use one of {', '.join(CHANGES)}")
    own = [field.name for field in fields(CHANGES[name])]
    return CHANGES[name](**{key: algorithm[key] for key in own if key in algorithm})

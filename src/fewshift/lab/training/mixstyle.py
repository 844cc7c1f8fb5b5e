"""MixStyle: train on styles that lie between those of two images.

Zhou et al., "Domain Generalization with MixStyle", ICLR 2021. The style of an image, at some depth, is the mean and the
standard deviation of each channel over its pixels. Nothing is added to the network but hooks, for as long as the
training lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Task, Trainee
from fewshift.models.layers.stages import AUTO, chosen_layers, maps_of

if TYPE_CHECKING:
    from fewshift.lab.training.gather import Sources
    from fewshift.lab.training.recipes import Recipe

STAGES = (1, 2, 3)  # never the fourth: there, style tells the class
EPS = 1e-6


def anyone(domains: Tensor) -> Tensor:
    """Whose style each image is mixed with: a random permutation, whatever the domains."""
    return torch.randperm(len(domains))


def of_another_domain(domains: Tensor) -> Tensor:
    """Whose style each image is mixed with: a random image of another domain.

    Of two domains in equal parts, each image is chosen once; of unequal ones, those of the smaller in turn. An image
    that is with its own domain alone keeps its style.
    """
    partners = torch.arange(len(domains))
    for domain in domains.unique():
        own, others = ((domains == domain).nonzero().flatten(), (domains != domain).nonzero().flatten())
        if len(others):
            shuffled = others[torch.randperm(len(others))]
            partners[own] = shuffled[torch.arange(len(own)) % len(others)]
    return partners


PARTNERS: dict[str, Callable[[Tensor], Tensor]] = {"random": anyone, "crossdomain": of_another_domain}


def mixed(features: Tensor, partners: Tensor, share: Tensor) -> Tensor:
    """s' (x - m) / s + m' of (n, channels, height, width) features x, with m' = share m + (1 - share) m_partner.

    Likewise s'. m and s are the mean and the (unbiased) standard deviation of each channel of each image, through which
    no gradient flows; `share` is one number for each image.
    """
    variance, mean = torch.var_mean(features.detach(), (2, 3), correction=1, keepdim=True)
    deviation = (variance + EPS).sqrt()
    share = share.view(-1, 1, 1, 1)
    new_mean, new_deviation = (share * own + (1 - share) * own[partners] for own in (mean, deviation))
    return (features - mean) * (new_deviation / deviation) + new_mean


class Mixing(Trainee):
    """Mixes styles after each of the layers: each decides anew for every batch, and only while training."""

    def __init__(self, model: nn.Module, task: Task, settings: MixStyle, layers: tuple[str, ...]) -> None:
        super().__init__(model, task)
        self._settings, self._partners = settings, PARTNERS[settings.mix]
        self._share = torch.distributions.Beta(settings.alpha, settings.alpha)
        for layer in layers:
            self.watch(layer, partial(self._mix, layer))

    def _mix(self, name: str, _: nn.Module, __: Any, features: Tensor) -> Tensor | None:
        if not self.model.training or torch.rand(()) >= self._settings.probability:
            return None
        assert self.batch is not None  # loss sets it
        domains = self.batch.domains
        if len(domains) != len(features):
            raise FewshiftError(
                f"layer {name!r} gives {len(features)} maps for {len(domains)} images: name others with layers"
            )
        _check_size(name, features)
        partners = self._partners(domains.cpu()).to(features.device)
        return mixed(features, partners, self._share.sample((len(features),)).to(features))


@dataclass(frozen=True)
class MixStyle(Algorithm):
    """Plain training, in which shallow features take on the style of other images of the batch.

    - mix: crossdomain takes the other style from an image of another source, random from any.
    - probability: how often a batch is mixed after a layer; each layer decides on its own.
    - alpha: an image keeps a share of its style that is drawn from Beta(alpha, alpha).
    - layers: after which layers, with commas between; auto is after the first three of a network's four stages.
    """

    name: ClassVar[str] = "mixstyle"
    paper: ClassVar[str] = "Zhou et al., ICLR 2021"
    verified: ClassVar[str] = (
        "`tests/lab/training/test_mixstyle_naive.py`: every weight after every step, and the statistics at the end, "
        "against the formulas, to 1e-9"
    )

    mix: str = "crossdomain"
    probability: float = 0.5
    alpha: float = 0.1
    layers: str = AUTO

    def check(self) -> None:
        """A way to mix that exists, a share, and a distribution."""
        self.one_of(mix=PARTNERS)
        if self.probability > 1:
            raise FewshiftError(f"probability={self.probability} is no share: give a number from 0 to 1")
        if not self.alpha:
            raise FewshiftError("alpha=0 is no Beta distribution: give a number above 0")

    def check_recipe(self, recipe: Recipe, sources: Sources) -> None:
        """Mixing across domains needs two of them in a batch."""
        if self.mix != "crossdomain":
            return
        if len(sources.names) < 2:
            raise FewshiftError(
                f"crossdomain mixing needs two sources, and {sources.names[0]!r} is alone: "
                "add a source, or set mix to random"
            )
        if recipe.domains_per_batch == 1:
            raise FewshiftError(
                "crossdomain mixing needs two sources in a batch, and domains_per_batch is 1: "
                "raise it, or set mix to random"
            )

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        """The network, with hooks where styles are mixed."""
        layers = chosen_layers(model, self.layers, STAGES)
        for name, features in maps_of(model, layers, task.shape).items():
            _check_size(name, features)
        return Mixing(model, task, self, layers)


def _check_size(name: str, features: Tensor) -> None:
    if features[0, 0].numel() < 2:
        raise FewshiftError(
            f"the maps of layer {name!r} have one pixel, which has no style: raise size, or name others with layers"
        )

"""DELTA: fine-tune everything while the feature maps that matter stay close to the source's on the same images.

Li et al., "DELTA: Deep Learning Transfer using Feature Map with Attention for Convolutional Networks", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.heads import train_head
from fewshift.core.losses import Loss
from fewshift.core.method import Fitted
from fewshift.core.network import Network, like, linear, logits_of
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.support import Support, Target
from fewshift.errors import FewshiftError
from fewshift.methods._finetuning import Penalty, SGDFineTuning, prepare, trainable, tune
from fewshift.methods._replay import resumed

STAGES = 4  # convolutions whose maps are watched
ATTENTION_BATCHES = 4
SOFTNESS = 5.0
HEAD_EPOCHS = 10
HEAD_SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
HEAD_DECAY = 0.1 ** (1 / 6)  # of the rate from one epoch to the next: a tenth after six


@dataclass(frozen=True)
class DeltaReg(SGDFineTuning):
    """cross-entropy + alpha Omega + (beta / 2) |w_head|^2, Omega the attentive distance of feature maps.

    Omega = 1/2 sum over watched layers, images and channels of C a_c |map_c - source map_c|^2 / (H W), summed over
    the minibatch. The attention a of a layer is a softmax over its filters: how much the loss on the support rises
    when a filter is set to zero. For each filter, the layers after it are computed again on up to 128 images.

    - layers: the convolutions to watch, separated by commas. "auto" takes, at each of the last four resolutions, the
      last of the widest convolutions: in a ResNet the one that ends the stage, before its BatchNorm. A network with
      depthwise convolutions is widest inside its blocks. There "auto" takes the last convolution of a block that
      keeps the resolution: in a MobileNetV2 the projection that ends the stage.
    """

    name: ClassVar[str] = "delta-reg"
    paper: ClassVar[str] = "Li et al., ICLR 2019"
    changes: ClassVar[str] = "everything"
    verified: ClassVar[str] = (
        "`tests/methods/test_delta_reg_naive.py`: every weight after every step of the head for the attention and "
        "of the training itself, against the formulas, to 1e-9"
    )

    weight_decay: float = 0.0
    alpha: float = 0.01
    beta: float = 0.01
    layers: str = "auto"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Weigh the channels, then train everything with the penalty."""
        network, support = prepare(network, target, self.name)
        watched = self._watched(network, support)
        weights = self._attention(network, support, target, watched, seed)
        model = trainable(network, self.bn, support)
        with maps(model, watched) as own:
            penalty = partial(self.penalty, network, own=own, weights=weights)
            return tune(network, support, target, "all", self, seed, model=model, penalty=penalty)

    def penalty(
        self, network: Network, model: nn.Module, own: dict[str, Tensor], weights: dict[str, Tensor]
    ) -> Penalty:
        """alpha Omega + (beta / 2) |w_head|^2, with the maps of the model's own forward pass in `own`."""
        source = trainable(network, "source_frozen")
        head = linear(model, network.need_head(self.name))

        def value(images: Tensor) -> Tensor:
            with torch.no_grad(), maps(source, list(weights)) as theirs:
                source(images)
            distance = omega(own, theirs, weights)
            own.clear()  # the maps are as large as the step itself
            size = torch.stack([tensor.square().sum() for tensor in head.parameters()]).sum()
            return self.alpha * distance + self.beta / 2 * size

        return value

    def _attention(
        self, network: Network, support: Support, target: Target, watched: list[str], seed: int
    ) -> dict[str, Tensor]:
        """Channel weights of every watched layer, under a head trained briefly on the support."""
        model = self._probed(network, support, target, seed)
        order = torch.randperm(len(support), generator=torch.Generator().manual_seed(seed))  # of all classes
        part = order[: support.minibatch(None) * ATTENTION_BATCHES]
        rises = filter_importance(model, watched, support.part(part).chunks(support.minibatch(None)), target.cost)
        return {name: attention(rise) for name, rise in rises.items()}

    def _probed(self, network: Network, support: Support, target: Target, seed: int) -> nn.Module:
        """A copy whose head has learned from the support; the rate falls after every epoch.

        It starts from the source's head, as the classes are the same. The body stays in evaluation mode; the released
        code leaves it in training mode, and the statistics drift.
        """
        model, head = trainable(network, "source_frozen"), network.need_head(self.name)
        optimizer = HEAD_SGD(linear(model, head).requires_grad_(True).parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, HEAD_DECAY)
        with private_randomness(seed) as generator:

            def batches() -> Iterator[Tensor]:
                yield from minibatches(len(support), support.minibatch(None), generator)
                schedule.step()

            train_head(model, head, support, target.cost, batches, optimizer, HEAD_EPOCHS)
        return model

    def _watched(self, network: Network, support: Support) -> list[str]:
        convolutions = {
            name: module
            for name, module in network.model.named_modules()
            if isinstance(module, nn.Conv2d) and name != network.head
        }
        with torch.no_grad(), maps(network.model, list(convolutions)) as seen:
            network.model(like(network.model, support.chunks(1)[0][0]))
        if self.layers != "auto":
            names = [name.strip() for name in self.layers.split(",")]
            unknown = [name for name in names if name not in seen]
            if unknown:
                raise FewshiftError(
                    f"layer '{unknown[0]}' is not a 2d convolution that this network executes: name one that is"
                )
            return names
        spatial = {name: value for name, value in seen.items() if value[0, 0].numel() > 1}
        if not spatial:
            raise FewshiftError("delta-reg watches the maps of 2d convolutions, and there are none: use l2-sp")
        separable = any(1 < convolutions[name].groups == convolutions[name].in_channels for name in spatial)
        return stage_ends(spatial, separable)[-STAGES:]


def stage_ends(seen: dict[str, Tensor], separable: bool) -> list[str]:
    """One convolution per resolution, in order of execution: the last of the widest, by their maps (N, C, H, W).

    A network with depthwise convolutions is widest inside its blocks. There it is the last convolution of a block that
    keeps the resolution; a block is the smallest module around it with several convolutions.
    """
    sizes = {name: tuple(value.shape[2:]) for name, value in seen.items()}
    chosen: dict[tuple[int, ...], tuple[int, str]] = {}
    for name, value in seen.items():
        rank = len({sizes[other] for other in block(name, list(seen))}) == 1 if separable else value.shape[1]
        if rank >= chosen.get(sizes[name], (0, ""))[0]:
            chosen[sizes[name]] = rank, name
    return sorted((name for _, name in chosen.values()), key=list(seen).index)


def block(name: str, names: list[str]) -> list[str]:
    """The names in the smallest module around `name` that contains several of them."""
    place = name.split(".")[:-1]
    inside = [other for other in names if other.split(".")[: len(place)] == place]
    return block(".".join(place), names) if len(inside) == 1 and place else inside


def omega(own: dict[str, Tensor], theirs: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    """1/2 sum_layers sum_images sum_c C a_c |map_c - source map_c|^2 / (H W)."""
    total = []
    for name, weight in weights.items():
        distance = (own[name] - theirs[name]).square().flatten(2).mean(2)  # (N, C)
        total.append((distance * weight * len(weight)).sum())
    return torch.stack(total).sum() / 2


def attention(rise: Tensor) -> Tensor:
    """Softmax of the standardised rises of the loss, divided by five: sums to one over the channels."""
    spread = rise.std(correction=0)
    return ((rise - rise.mean()) / (spread if spread > 0 else 1.0) / SOFTNESS).softmax(0)


@torch.no_grad()
def filter_importance(
    model: nn.Module, names: list[str], pairs: list[tuple[Tensor, Tensor]], loss: Loss
) -> dict[str, Tensor]:
    """How much the loss rises when a filter's weights are zero: one number per filter, averaged over batches."""
    base = sum(float(loss(logits_of(model(x)), y)) for x, y in pairs) / len(pairs)
    rises = {}
    for name in names:
        layer = cast(nn.Conv2d, model.get_submodule(name))
        totals = [0.0] * layer.out_channels
        for x, y in pairs:  # the layers before it are remembered for one batch at a time
            with resumed(model, name, x) as run:
                for channel in progress.track(range(layer.out_channels), f"filters of {name}"):
                    totals[channel] += float(loss(logits_of(run(partial(without, layer, channel))), y))
        means = [total / len(pairs) - base for total in totals]
        rises[name] = pairs[0][0].new_tensor(means)
    return rises


def without(layer: nn.Conv2d, channel: int, output: Tensor) -> Tensor:
    """The layer's output with that filter's weights set to zero: its map holds the bias."""
    output[:, channel] = 0 if layer.bias is None else layer.bias[channel]
    return output


@contextmanager
def maps(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Within the block, collect the outputs of these layers, in order of execution."""
    seen: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(lambda *args, name=name: seen.update({name: args[2]})))
        yield seen

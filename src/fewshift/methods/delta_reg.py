"""DELTA: fine-tune everything while the feature maps that matter stay close to the source's on the same images.

Li et al., "DELTA: Deep Learning Transfer using Feature Map with Attention for Convolutional Networks", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fewshift import progress
from fewshift.errors import FewshiftError
from fewshift.losses import Loss
from fewshift.method import Fitted
from fewshift.network import Network, like, linear, logits_of
from fewshift.target import Support, Target
from fewshift.tuning import FineTuning, Penalty, all_parameters, prepare, sgd, trainable, tune_head

STAGES = 4  # convolutions whose maps are watched
ATTENTION_BATCHES = 4
ATTENTION_BATCH = 32
SOFTNESS = 5.0
ATTENTION_HEAD = ((0.01, 6), (0.001, 4))  # rate and epochs: ten epochs, the rate cut to a tenth after six


@dataclass(frozen=True)
class DeltaReg(FineTuning):
    """cross-entropy + alpha Omega + (beta / 2) |w_head|^2, Omega the attentive distance of feature maps.

    Omega = 1/2 sum over watched layers, images and channels of C a_c |map_c - source map_c|^2 / (H W), summed over
    the minibatch. The attention a of a layer is the softmax of how much the loss on the support rises when a filter
    is set to zero, so it costs one forward pass per filter of the watched layers.

    - layers: the convolutions to watch, separated by commas; "auto" takes, at each of the last four resolutions, the
      last of the widest convolutions: in a ResNet the one that ends the stage, before its BatchNorm.
    """

    name: ClassVar[str] = "delta-reg"
    paper: ClassVar[str] = "Li et al., ICLR 2019"
    changes: ClassVar[str] = "everything"

    weight_decay: float = 0.0
    alpha: float = 0.01
    beta: float = 0.01
    layers: str = "auto"

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Weigh the channels, then train everything, held by the penalty."""
        network, support = prepare(network, target, self.name)
        watched = self._watched(network, support)
        weights = self._attention(network, support, target, watched, seed)
        model = trainable(network, self.bn, support)
        with maps(model, watched) as own:
            return self.train(
                network,
                support,
                target,
                seed,
                all_parameters,
                model=model,
                penalty=lambda model: self.penalty(network, model, own, weights),
            )

    def penalty(
        self, network: Network, model: nn.Module, own: dict[str, Tensor], weights: dict[str, Tensor]
    ) -> Penalty:
        """alpha Omega + (beta / 2) |w_head|^2, with the maps that the model's own forward pass left in `own`."""
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
        """Channel weights of every watched layer, under a head trained for a moment on the support."""
        tuned = network
        for lr, epochs in ATTENTION_HEAD:
            model, _ = tune_head(
                tuned,
                support,
                target,
                sgd(lr, weight_decay=1e-4),
                bn="source_frozen",
                epochs=epochs,
                batch_size=ATTENTION_BATCH,
                seed=seed,
            )
            tuned = replace(network, model=model)
        model = trainable(tuned, "source_frozen")
        order = torch.randperm(len(support), generator=torch.Generator().manual_seed(seed))  # of all classes
        part = order[: ATTENTION_BATCH * ATTENTION_BATCHES]
        rises = filter_importance(model, watched, support.images[part], support.labels[part], target.loss)
        return {name: attention(rise) for name, rise in rises.items()}

    def _watched(self, network: Network, support: Support) -> list[str]:
        convolutions = {
            name: module
            for name, module in network.model.named_modules()
            if isinstance(module, nn.Conv2d) and name != network.head
        }
        with torch.no_grad(), maps(network.model, list(convolutions)) as seen:
            network.model(like(network.model, support.images[:1]))
        if self.layers != "auto":
            names = [name.strip() for name in self.layers.split(",")]
            unknown = [name for name in names if name not in seen]
            if unknown:
                raise FewshiftError(
                    f"layer '{unknown[0]}' is not a 2d convolution that this network executes: name one that is"
                )
            return names
        chosen: dict[tuple[int, ...], str] = {}
        for name, value in seen.items():
            size = tuple(value.shape[2:])
            if value[0, 0].numel() > 1 and (size not in chosen or value.shape[1] >= seen[chosen[size]].shape[1]):
                chosen[size] = name
        if not chosen:
            raise FewshiftError("delta-reg watches the maps of 2d convolutions and there are none: use l2-sp")
        return sorted(chosen.values(), key=list(seen).index)[-STAGES:]


def omega(own: dict[str, Tensor], theirs: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    """1/2 sum_layers sum_images sum_c C a_c |map_c - source map_c|^2 / (H W)."""
    total = []
    for name, weight in weights.items():
        distance = (own[name] - theirs[name]).square().flatten(2).mean(2)  # (N, C)
        total.append((distance * weight * len(weight)).sum())
    return torch.stack(total).sum() / 2


def attention(rise: Tensor) -> Tensor:
    """softmax of the standardised rises of the loss, softened by five: sums to one over the channels."""
    spread = rise.std(correction=0)
    return ((rise - rise.mean()) / (spread if spread > 0 else 1.0) / SOFTNESS).softmax(0)


@torch.no_grad()
def filter_importance(
    model: nn.Module, names: list[str], images: Tensor, labels: Tensor, loss: Loss
) -> dict[str, Tensor]:
    """By how much the loss rises when a filter's weights are zero: one number per filter, averaged over batches."""

    def current() -> float:
        pairs = list(zip(images.split(ATTENTION_BATCH), labels.split(ATTENTION_BATCH), strict=True))
        return sum(float(loss(logits_of(model(x)), y)) for x, y in pairs) / len(pairs)

    base = current()
    found = {}
    for name in names:
        weight = cast(nn.Conv2d, model.get_submodule(name)).weight
        rises = []
        for channel in progress.track(range(len(weight)), f"filters of {name}"):
            kept = weight[channel].clone()
            weight[channel] = 0
            rises.append(current() - base)
            weight[channel] = kept
        found[name] = torch.tensor(rises, dtype=torch.float32, device=images.device)
    return found


@contextmanager
def maps(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of these layers during the block, in the order in which they appear."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
        for name in names
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()

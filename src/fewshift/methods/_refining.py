"""What follows a blend: a new head, and gradient steps on the last layers.

The head. It is a mixture of the source's head and the directions of the classes (`_new_head.py`); from two images per
class on its rows are trained a little, held near where they start. With pixel labels it is trained by gradient steps.
The last layers start from the directions alone.

The last layers, which hold three quarters of the weights, are trained with the blend's statistics held; from eight
images per class on, all layers are. That is done once for each fold, without it; the mean of those networks is the
answer, and each has honest predictions for its fold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core import _progress as progress
from fewshift.core.draws import others
from fewshift.core.heads import gives_output, train_head
from fewshift.core.loop import fit
from fewshift.core.losses import Loss, log_losses
from fewshift.core.network import features, linear, logits_of
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.reading import Reading
from fewshift.core.sharing import each_once, same_tensor
from fewshift.core.support import MINIBATCH as AT_ONCE
from fewshift.core.support import Support
from fewshift.errors import DivergedError
from fewshift.methods._blending import Blended
from fewshift.methods._new_head import LEAST_SCALE, HeldOutHeads, LinearHead, MixedHead

ONE_SHOT = 0.5  # share of the source's head that stays where a class has a single image
LEARNT = 0.15  # nats per held-out image: with less, gradient steps have nothing to add to the head
LEAST_MIX = 0.6  # of the support's classes, in effect, that unlabelled images have to show
LAST_PART = 0.75  # of the weights
MANY_SHOTS = 8  # images per class that are enough to train all layers
FROM_EPOCH = 3  # weights are averaged over the steps from here on
CLIP = 5.0
FAIR_SAMPLES = 20
MINIBATCH = 16  # images, where an image has one label


@dataclass(frozen=True)
class Steps:
    """How gradient steps are taken."""

    epochs: int
    lr: float
    loss: Loss
    seed: int


@dataclass(frozen=True)
class Refinement:
    """Heads and tuned networks on top of one blend."""

    blend: Blended
    steps: Steps

    @cached_property
    def folds(self) -> list[Tensor]:
        """The positions that are held out together."""
        return self.blend.support.folds(self.steps.seed)

    @cached_property
    def head(self) -> str | None:
        """The head, if a new one can be made: it is known, its own, nothing follows it, and every class has an image.

        With pixel labels gradient steps go through whatever follows.
        """
        network, support = self.blend.working, self.blend.support
        if network.head is None or len(support.counts) < (network.classes or 0) or _shared(network.model, network.head):
            return None
        if not support.kind.centroids:
            return network.head if network.learns else None
        last = self.blend.features is not None and gives_output(network.model, network.head, support.pictures)
        return network.head if last else None

    # the head

    @cached_property
    def _source_head(self) -> LinearHead:
        assert self.blend.working.head is not None
        return LinearHead.of(linear(self.blend.working.model, self.blend.working.head))

    @cached_property
    def _heads_apart(self) -> HeldOutHeads:
        """The heads that are made without each fold."""
        blend = self.blend
        assert blend.features_apart is not None  # the head was found to be last
        return HeldOutHeads.of(
            self._source_head, blend.features_apart, blend.support.targets, blend.features_beside, self.folds
        )

    @cached_property
    def stays(self) -> float:
        """The share of the source's head that stays; a single image of a class cannot be held out to choose it."""
        return self._heads_apart.share() if self.blend.support.shots > 1 else ONE_SHOT

    def _mixture(self, reading: Reading, kept: Support, scale: float | None = None) -> MixedHead:
        """The parts of a head for these images; in a reading, unlabelled ones come after them."""
        points = reading.features
        assert points is not None  # the head was found to be last
        return MixedHead.of(self._source_head, points[: len(kept)], kept.targets, points[len(kept) :], scale)

    def mix(self) -> float:
        """How many classes the unlabelled images show, in effect, as a share of what a fair sample would show."""
        blend = self.blend
        if blend.beside is None or not blend.support.kind.centroids:
            return 1.0
        if self.head is None:
            answers = torch.cat(blend.reading.logits)[len(blend.support) :]
        else:
            assert blend.features_beside is not None  # a head has features
            answers = self._mixture(blend.reading, blend.support).new.answers(blend.features_beside)
        generator = torch.Generator().manual_seed(0)
        fair = [
            _effective(torch.randint(len(blend.support.counts), (len(answers),), generator=generator))
            for _ in range(FAIR_SAMPLES)
        ]
        return min(1.0, _effective(answers.argmax(1)) * FAIR_SAMPLES / math.fsum(fair))

    def head_tensors(self) -> dict[str, Tensor]:
        """The head that all images give."""
        blend = self.blend
        if not blend.support.kind.centroids:
            return self._trained_head(blend.model, blend.support)
        head = self._mixture(blend.reading, blend.support).at(self.stays)
        if blend.support.shots > 1:
            assert blend.features is not None  # the head was found to be last
            head = head.trained(blend.features, blend.support.targets)
        return self._written(head)

    @cached_property
    def head_notes(self) -> dict[str, Any]:
        """For the result: the share of the source's head that stays."""
        return {"source_head": self.stays} if self.head is not None and self.blend.support.kind.centroids else {}

    @property
    def leaves_something(self) -> bool:
        """Whether held-out labels are so unlikely under the new head that more could be learnt."""
        if not self.blend.support.kind.centroids:
            return True
        answers = torch.cat(self._head_held_out)
        return float(log_losses(answers.cpu(), self.blend.support.targets.cpu()).mean()) > LEARNT

    def head_held_out(self) -> list[Tensor]:
        """For each image, its logits by a head that was made without its fold."""
        return self._head_held_out

    @cached_property
    def _head_held_out(self) -> list[Tensor]:
        if not self.blend.support.kind.centroids:
            return self._asked([self._with_trained_head(fold) for fold in self.folds])
        points, labels = self.blend.features_apart, self.blend.support.targets
        assert points is not None  # the head was found to be last
        answers: list[Tensor] = [torch.empty(0)] * len(points)
        for fold, mixture in zip(self.folds, self._heads_apart.mixtures, strict=True):
            rest = others(fold, len(points))
            head = mixture.at(self._heads_apart.share(rest)).trained(points[rest], labels[rest])
            for place in fold.tolist():
                answers[place] = head.answers(points[place : place + 1])
        return answers

    def _written(self, head: LinearHead) -> dict[str, Tensor]:
        """The head as the network's tensors."""
        assert self.head is not None
        layer = linear(self.blend.working.model, self.head)
        tensors = {f"{self.head}.weight": head.rows.reshape(layer.weight.shape).to(layer.weight.dtype)}
        return tensors | ({} if layer.bias is None else {f"{self.head}.bias": head.bias.to(layer.bias.dtype)})

    def _trained_head(self, model: nn.Module, support: Support) -> dict[str, Tensor]:
        assert self.head is not None
        layer = linear(model, self.head).requires_grad_(True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=10 * self.steps.lr, momentum=0.9)
        with private_randomness(self.steps.seed) as generator:
            batches = partial(minibatches, len(support), support.minibatch(None), generator)
            train_head(model, self.head, support, self.steps.loss, batches, optimizer, self.steps.epochs)
        layer.requires_grad_(False)
        return {f"{self.head}.{name}": tensor.detach() for name, tensor in layer.named_parameters()}

    def _with_trained_head(self, fold: Tensor) -> nn.Module:
        kept, model, _ = self.blend.without(fold)
        self._trained_head(model, kept)
        return model

    # the last layers

    @cached_property
    def tuned(self) -> list[nn.Module]:
        """A network for each fold, trained without it; with single images in a class, one trained on all."""
        if self.blend.support.shots < 2:
            return [self._tuned(self.blend.support, self.blend.model, self.blend.reading)]
        networks = []
        for fold in progress.track(self.folds, "last layers"):
            with progress.silent():
                networks.append(self._tuned(*self.blend.without(fold)))
        return networks

    def tuned_tensors(self) -> dict[str, Tensor]:
        """The mean of the tuned networks."""
        first, *others = [network.state_dict() for network in self.tuned]
        source = self.blend.working.model.state_dict()
        return {
            # around the first, so that equal tensors have exactly that as their mean
            name: tensor + sum(((other[name] - tensor) for other in others), torch.zeros_like(tensor)) / len(self.tuned)
            for name, tensor in first.items()
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.equal(tensor, source[name])
        }

    def tuned_held_out(self) -> list[Tensor]:
        """For each image, its logits by the network that was tuned without its fold."""
        return self._asked(self.tuned)

    def _tuned(self, kept: Support, model: nn.Module, reading: Reading) -> nn.Module:
        """Train the last layers of `model`, in place, and hold its statistics."""
        head = self.blend.working.head
        if kept.kind.centroids and self.head is not None:
            # nothing stays of the source's head: held-out labels have a bold and a careful candidate to choose from
            start = self._mixture(reading, kept, LEAST_SCALE).new
            with torch.no_grad():
                for name, tensor in self._written(start).items():
                    model.get_parameter(name).copy_(tensor)
        many = kept.kind.centroids and self.blend.support.shots >= MANY_SHOTS
        weights = last_weights(model, head, kept, 1.0 if many else LAST_PART)
        means = [torch.zeros_like(weight) for weight in weights]
        taken = 0
        optimizer = torch.optim.SGD([weight.requires_grad_(True) for weight in weights], lr=self.steps.lr, momentum=0.9)
        size = MINIBATCH if kept.kind.centroids else kept.minibatch(None)
        begins = min(FROM_EPOCH, self.steps.epochs)
        per_epoch = math.ceil(len(kept) / size)

        def average() -> None:
            nonlocal taken
            taken += 1
            count = taken - (begins - 1) * per_epoch
            if count > 0:
                for mean, weight in zip(means, weights, strict=True):
                    mean.add_(weight.detach() - mean, alpha=1 / count)

        def cost(indices: Tensor) -> Tensor:
            images, labels = kept.batch(indices)
            return self.steps.loss(logits_of(model(images)), labels)

        with private_randomness(self.steps.seed) as generator:
            batches = partial(minibatches, len(kept), size, generator)
            fit(cost, batches, optimizer, self.steps.epochs, clip=CLIP, after_step=average)
        with torch.no_grad():
            for mean, weight in zip(means, weights, strict=True):
                if taken:
                    weight.copy_(mean)
        model.requires_grad_(False)
        if not all(torch.isfinite(weight).all() for weight in weights):
            raise DivergedError("the weights of the last layers are no longer finite: lower lr")
        if kept.kind.centroids and self.head is not None:
            self._polish(model, self.head, kept)
        return model

    def _polish(self, model: nn.Module, head: str, kept: Support) -> None:
        """Train the rows of the head further, on the features that its layers have learned."""
        layer = linear(model, head)
        points = torch.cat([features(model, head, images) for images, _ in kept.chunks(AT_ONCE)]).flatten(1)
        trained = LinearHead.of(layer).trained(points, kept.targets)
        with torch.no_grad():
            layer.weight.copy_(trained.rows.reshape(layer.weight.shape))

    def _asked(self, networks: Sequence[nn.Module]) -> list[Tensor]:
        """The logits of each image by the network of its fold."""
        answers: list[Tensor] = [torch.empty(0)] * len(self.blend.support)
        with torch.no_grad():
            for network, fold in zip(networks, self.folds, strict=True):
                chunks = self.blend.support.part(fold).chunks(AT_ONCE if self.blend.support.kind.centroids else 1)
                logits = [logits_of(network(images)) for images, _ in chunks]
                rows = (row for part in logits for row in part.split(1))
                for place, row in zip(fold.tolist(), rows, strict=True):
                    answers[place] = row
        return answers


def last_weights(model: nn.Module, head: str | None, support: Support, part: float) -> list[Tensor]:
    """The parameters of the layers that run last and hold this part of all weights but the head's, and the head's."""
    own = {name: list(module.parameters(recurse=False)) for name, module in model.named_modules()}
    order: dict[str, None] = {}

    def note(name: str, *_: Any) -> None:
        order.pop(name, None)
        order[name] = None  # where it ran last

    with ExitStack() as hooks, torch.no_grad():
        for name, weights in own.items():
            if weights and name != head:
                module = model.get_submodule(name)
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        model(support.chunks(1)[0][0])
    total = sum(weight.numel() for name in order for weight in own[name])
    chosen = [] if head is None else list(own[head])
    held = 0
    for name in reversed(order):
        if held >= part * total:
            break
        chosen += own[name]
        held += sum(weight.numel() for weight in own[name])
    return each_once(chosen)


def _shared(model: nn.Module, head: str) -> bool:
    """Whether another layer uses a weight of the head."""
    return any(name.rpartition(".")[0] == head for name in same_tensor(model))


def _effective(classes: Tensor) -> float:
    """How many classes occur, in effect: the exponential of the entropy of their shares."""
    counts = classes.bincount().double()
    shares = counts[counts > 0] / counts.sum()
    return math.exp(float(-(shares * shares.log()).sum()))

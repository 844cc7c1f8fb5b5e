"""SFDA: pseudo-labels from adaptive prototypes take over from those of the source network.

Kim, Cho, Han, Panda and Hong, "Domain Adaptation without Source Data", 2020.

A target network has two heads. One learns what the frozen source network predicts. The other learns, from confident
images only, the class with the nearest prototypes. The weight moves from the first head to the second.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.copies import answering
from fewshift.core.loop import fit
from fewshift.core.losses import entropy
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, head_inputs, like, linear
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.support import Target, Unlabelled
from fewshift.methods._finetuning import MOMENTUM, body_parameters, head_parameters, trainable, use_batches
from fewshift.methods._unlabelled import (
    class_counts,
    in_order,
    inverse_decay,
    predictions,
    prepare_unlabelled,
    ramp,
    shuffled,
)


@dataclass(frozen=True)
class SFDA(Method):
    """Body and two heads are trained, with BatchNorm in training mode, on unlabelled images alone.

    - steps, batch_size: of SGD; lr and head_lr are the rates of body and heads, times (1 + 10 t / T)^-0.75.
    - memory_every: steps until the prototypes are chosen again; max_prototypes: how many a class has at most.
    - memory: the images they are chosen from: "eval" = every plain image, in evaluation mode; "train" = training views
      in full minibatches, in training mode, as in the released code.

    Both heads start from the source's, and the one that learned from prototypes becomes the network's. The source's
    labels are those of the plain images, predicted once. The network after the last step is the result: no labels
    choose it. Minibatches of one image are left out.
    """

    name: ClassVar[str] = "sfda"
    paper: ClassVar[str] = "Kim et al., 2020"
    needs: ClassVar[Needs] = Needs.UNLABELLED
    changes: ClassVar[str] = "everything"
    verified: ClassVar[str] = (
        "`tests/methods/test_sfda_naive.py`: body and both heads after every step, with prototypes chosen anew, "
        "against the formulas, to 1e-9"
    )

    steps: int = 5000
    memory_every: int = 100
    max_prototypes: int = 100
    memory: str = "eval"
    lr: float = 1e-4
    head_lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 32

    def check(self) -> None:
        """Positive numbers, and a known memory."""
        self.at_least(memory_every=1, max_prototypes=1, batch_size=2)
        self.one_of(memory=("eval", "train"))

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Choose prototypes, train `memory_every` steps, choose again."""
        unlabelled = target.need_unlabelled(self.name)
        network, head = prepare_unlabelled(network, unlabelled, self.name)
        model = trainable(network, "source_frozen")
        own = linear(model, head)
        from_source = copy.deepcopy(own)
        plain = in_order(unlabelled, self.batch_size)
        source_labels = predictions(model, head, unlabelled, plain)[1].argmax(1)

        body, own_head = body_parameters(network, model), head_parameters(network, model)
        optimizer = self._optimizer(body, [*own_head, *from_source.parameters()])
        schedule = inverse_decay(optimizer, self.steps)
        rounds: list[Round] = []

        def loss(indices: Tensor) -> Tensor:
            with head_inputs(model, head) as seen:
                model(like(model, unlabelled.batch(indices, augmented=True)))
            labels, confident = nearest(seen[-1].detach().flatten(1), rounds[-1].memory)
            rounds[-1].note(labels, confident)
            return two_heads_loss(
                from_source(seen[-1]).flatten(1),
                own(seen[-1]).flatten(1),
                source_labels[indices],
                labels,
                confident,
                share(schedule.last_epoch, max(self.steps, 1)),
            )

        with private_randomness(seed) as generator:
            stream = _endless(unlabelled, self.batch_size, generator)

            def steps() -> Iterator[Tensor]:
                left = self.steps - self.memory_every * len(rounds)
                rounds.append(self._choose(network, model, head, unlabelled, generator))
                yield from (next(stream) for _ in range(min(left, self.memory_every)))

            turns = math.ceil(self.steps / self.memory_every)
            losses = fit(loss, steps, optimizer, turns, what="sfda", after_step=schedule.step).losses
            _, logits = predictions(answering(model), head, unlabelled, plain)
        return Fitted(
            network.with_tensors(model.state_dict()),
            notes={
                "loss": losses,
                "tau": [stretch.tau for stretch in rounds],
                "prototypes": [stretch.counts for stretch in rounds],
                "confident": [stretch.confident / stretch.seen for stretch in rounds],
                "pseudo_labels": [stretch.labels.tolist() for stretch in rounds],
                "predicted": class_counts(logits),
                "steps": self.steps,
                "parameters": sum(tensor.numel() for tensor in (*body, *own_head)),
            },
        )

    def _optimizer(self, body: list[Tensor], heads: list[Tensor]) -> torch.optim.Optimizer:
        """SGD with a rate for the body and one for both heads."""
        return torch.optim.SGD(
            [
                {"params": [tensor.requires_grad_(True) for tensor in body], "lr": self.lr},
                {"params": [tensor.requires_grad_(True) for tensor in heads], "lr": self.head_lr},
            ],
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
        )

    def _choose(
        self, network: Network, model: nn.Module, head: str, unlabelled: Unlabelled, generator: torch.Generator
    ) -> Round:
        """The prototypes under the present weights; leaves BatchNorm in training mode."""
        if self.memory == "eval":
            features, logits = predictions(answering(model), head, unlabelled, in_order(unlabelled, self.batch_size))
            use_batches(network, model, MOMENTUM)
        else:
            use_batches(network, model, MOMENTUM)
            batches = minibatches(len(unlabelled), self.batch_size, generator, drop_last=True)
            features, logits = predictions(model, head, unlabelled, batches, augmented=True)
        uncertainty = normalised_entropy(logits)
        tau = threshold(logits.argmax(1), uncertainty, logits.shape[1])
        chosen = prototypes(logits.softmax(1), uncertainty, tau, self.max_prototypes)
        return Round(float(tau), chosen, F.normalize(features[chosen], dim=2), chosen.new_zeros(len(chosen)))


@dataclass
class Round:
    """The prototypes of one stretch of steps, and the pseudo-labels they gave."""

    tau: float
    chosen: Tensor  # (classes, P): which images
    memory: Tensor  # (classes, P, features): their features at unit length
    labels: Tensor  # (classes,): how many pseudo-labels
    confident: int = 0
    seen: int = 0

    @property
    def counts(self) -> list[int]:
        """How many different prototypes each class has."""
        return [len(row.unique()) for row in self.chosen]

    def note(self, labels: Tensor, confident: Tensor) -> None:
        """Count the labels of a minibatch, and the confident ones."""
        self.labels += labels.bincount(minlength=len(self.labels))
        self.confident += int(confident.sum())
        self.seen += len(labels)


def share(step: int, total: int) -> float:
    """a = 2 / (1 + exp(-10 t / (T / 2))) - 1: the weight of the prototypes, from 0 to almost 1 at half time."""
    return ramp(2 * step / total)


def two_heads_loss(
    source_head: Tensor, own_head: Tensor, source_labels: Tensor, labels: Tensor, confident: Tensor, a: float
) -> Tensor:
    """(1 - a) CE(source head, source labels) + a mean_b [confident_b CE(own head, labels)].

    The second mean is over all images of the minibatch, not over the confident ones.
    """
    value = (1 - a) * F.cross_entropy(source_head, source_labels)
    if a == 0:  # no gradient for the own head: with a gradient of zeros decay would still act
        return value
    return value + a * (confident * F.cross_entropy(own_head, labels, reduction="none")).mean()


def normalised_entropy(logits: Tensor) -> Tensor:
    """H(p) / log K of every row: from 0 to 1."""
    return entropy(logits) / math.log(logits.shape[1])


def threshold(predicted: Tensor, entropies: Tensor, classes: int) -> Tensor:
    """tau = max over the predicted classes of the smallest entropy in the class."""
    smallest = entropies.new_full((classes,), torch.inf).scatter_reduce(0, predicted, entropies, "amin")
    return smallest[smallest.isfinite()].max()


def prototypes(probabilities: Tensor, entropies: Tensor, tau: Tensor, most: int) -> Tensor:
    """(classes, P): for each class the images predicted to be of it with entropy <= tau, the most certain first.

    P is the size of the largest class, at most `most`; the images of smaller classes repeat from the beginning. A
    class that is never predicted gets the image with its highest probability.
    """
    predicted = probabilities.argmax(1)
    rows = []
    for label in range(probabilities.shape[1]):
        mine = ((predicted == label) & (entropies <= tau)).nonzero().flatten()
        if not len(mine):
            mine = probabilities[:, label].argmax().view(1)
        rows.append(mine[entropies[mine].argsort(stable=True)])
    length = min(max(len(row) for row in rows), most)
    return torch.stack([row[torch.arange(length, device=row.device) % len(row)] for row in rows])


def nearest(features: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """(labels, confident): the class whose prototypes are nearest on average, and whether that is beyond doubt.

    Distances are cosine distances to `memory` (classes, P, features), of unit length. Beyond doubt means: the farthest
    prototype of that class is nearer than the nearest prototype of the second class.
    """
    cosines = torch.einsum("bf,cpf->bcp", F.normalize(features, dim=1), memory)
    first, second = cosines.mean(2).topk(2, dim=1).indices.unbind(1)
    rows = torch.arange(len(features), device=features.device)
    return first, cosines[rows, first].amin(1) > cosines[rows, second].amax(1)


def _endless(unlabelled: Unlabelled, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The minibatches of one epoch after another."""
    while True:
        yield from shuffled(unlabelled, size, generator)

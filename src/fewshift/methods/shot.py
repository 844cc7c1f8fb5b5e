"""SHOT: the features of unlabelled target images move until the frozen source classifier fits them.

Liang, Hu and Feng, "Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised Domain
Adaptation", ICML 2020.

Each prediction becomes certain, and all together stay diverse (information maximisation). They also agree with labels
from clustering the features of the whole target, once per epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.copies import answering
from fewshift.core.loop import fit
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, like, logits_of
from fewshift.core.randomness import private_randomness
from fewshift.core.support import Target
from fewshift.errors import FewshiftError
from fewshift.methods._finetuning import MOMENTUM, body_parameters, trainable, use_batches
from fewshift.methods._unlabelled import (
    class_counts,
    in_order,
    inverse_decay,
    predictions,
    prepare_unlabelled,
    shuffled,
)

EPS = 1e-5  # inside logarithms, as in the original
ROUNDS = 2  # of clustering: soft centroids first, then those of the labels they gave


@dataclass(frozen=True)
class SHOT(Method):
    """Everything but the head is trained, with BatchNorm in training mode, on unlabelled images alone.

    - lr: the original's rate for a pre-trained trunk, times (1 + 10 t / T)^-0.75 in step t of T, from 0 on (the
      released code counts from 1). A plain network has no bottleneck, which the original trains ten times faster.
    - information: the entropy and diversity terms, on or off.
    - pseudo_weight: weight of the cross-entropy with the clustering labels, from `warmup_epochs` on (1 for VisDA).
    - threshold: a class predicted for no more than this many images is never a label.

    The head stays as it is. Minibatches of one image are left out.
    """

    name: ClassVar[str] = "shot"
    paper: ClassVar[str] = "Liang et al., ICML 2020"
    needs: ClassVar[Needs] = Needs.UNLABELLED
    changes: ClassVar[str] = "everything but the head"
    verified: ClassVar[str] = (
        "`tests/methods/test_shot_naive.py`: every weight after every step, with labels clustered anew in every "
        "epoch, against the formulas, to 1e-9"
    )

    epochs: int = 15
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-3
    batch_size: int = 64
    information: bool = True
    pseudo_weight: float = 0.3
    warmup_epochs: int = 0
    threshold: int = 0

    def check(self) -> None:
        """Batch statistics need two images."""
        self.at_least(batch_size=2)

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Label the whole target, train an epoch, label again; the last network is the result."""
        unlabelled = target.need_unlabelled(self.name)
        network, head = prepare_unlabelled(network, unlabelled, self.name)
        model = trainable(network, "train_running")
        tensors = [tensor.requires_grad_(True) for tensor in body_parameters(network, model)]
        if not tensors:
            raise FewshiftError(
                "shot trains everything but the head, and the network has only a head: use another method"
            )
        optimizer = torch.optim.SGD(
            tensors, self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.momentum > 0
        )
        steps = self.epochs * (len(unlabelled) // self.batch_size + (len(unlabelled) % self.batch_size > 1))
        schedule = inverse_decay(optimizer, steps)
        plain = in_order(unlabelled, self.batch_size)
        labels: list[Tensor | None] = []  # for each epoch one label per image, by its index

        def label() -> Tensor:
            features, logits = predictions(answering(model), head, unlabelled, plain)
            use_batches(network, model, MOMENTUM)
            return pseudo_labels(features, logits.softmax(1), self.threshold)

        def loss(indices: Tensor) -> Tensor:
            logits = logits_of(model(like(model, unlabelled.batch(indices, augmented=True))))
            value = logits.new_zeros((), requires_grad=True)  # alone it gives no gradient: only statistics move
            if self.information:
                value = value + information_loss(logits)
            if (current := labels[-1]) is not None:
                value = value + self.pseudo_weight * F.cross_entropy(logits, current[indices])
            return value

        with private_randomness(seed) as generator:

            def epoch() -> Iterator[Tensor]:
                wanted = self.pseudo_weight > 0 and len(labels) >= self.warmup_epochs
                labels.append(label() if wanted else None)
                yield from shuffled(unlabelled, self.batch_size, generator)

            losses = fit(loss, epoch, optimizer, self.epochs, what="shot", after_step=schedule.step).losses
            _, logits = predictions(answering(model), head, unlabelled, plain)
        labellings = [labelling for labelling in labels if labelling is not None]
        return Fitted(
            network.with_tensors(model.state_dict()),
            notes={
                "loss": losses,
                "pseudo_labels": [labelling.bincount(minlength=logits.shape[1]).tolist() for labelling in labellings],
                "relabelled": [(new != old).double().mean().item() for old, new in pairwise(labellings)],
                "predicted": class_counts(logits),
                "steps": steps,
                "parameters": sum(tensor.numel() for tensor in tensors),
            },
        )


def information_loss(logits: Tensor) -> Tensor:
    """mean_x H(p(x)) - H(mean_x p(x)): small if each prediction is certain and all together are diverse."""
    p = logits.softmax(1)
    return _entropy(p).mean() - _entropy(p.mean(0))


def pseudo_labels(features: Tensor, probabilities: Tensor, threshold: int = 0) -> Tensor:
    """The class of the nearest centroid for every row: cosine distance, two rounds, all rows at once.

    Features get a constant 1 and unit length. Centroids are weighted by the probabilities first, then by the labels of
    the first round. A class must be predicted for more than `threshold` rows to be a label.
    """
    points = F.normalize(torch.cat([features, torch.ones_like(features[:, :1])], 1), dim=1)
    classes = probabilities.shape[1]
    common = probabilities.argmax(1).bincount(minlength=classes) > threshold
    if not common.any():
        raise FewshiftError(f"no class has more than {threshold} predicted images: lower threshold")
    weights = probabilities
    for _ in range(ROUNDS):
        centres = F.normalize(weights.T @ points, dim=1)  # the mean's length does not matter to a cosine
        alive = common & (weights.sum(0) > 0)
        labels = (points @ centres.T).masked_fill(~alive, -torch.inf).argmax(1)
        weights = F.one_hot(labels, classes).to(points)
    return labels


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + EPS).log()).sum(-1)

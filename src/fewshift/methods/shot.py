"""SHOT: the features of unlabelled target images move until the frozen source classifier fits them.

Liang, Hu and Feng, "Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised Domain
Adaptation", ICML 2020.

Predictions are to be certain one by one and diverse together (information maximisation), and to agree with labels
found by clustering the features of the whole target, once per epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.loop import fit
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, head_inputs, like, logits_of
from fewshift.core.randomness import minibatches, private_randomness
from fewshift.core.support import Target, Unlabelled
from fewshift.errors import FewshiftError
from fewshift.methods._finetuning import MOMENTUM, body_parameters, prepare_unlabelled, trainable, use_batches

EPS = 1e-5  # inside logarithms, as in the original
ROUNDS = 2  # of clustering: soft centroids first, then those of the labels they gave


@dataclass(frozen=True)
class SHOT(Method):
    """Everything but the head is trained, with BatchNorm in training mode, on unlabelled images alone.

    - lr: the original's rate for a pre-trained trunk, times (1 + 10 t / T)^-0.75. A plain network has no bottleneck
      layer, which the original trains ten times faster.
    - information: the entropy and diversity terms, on or off.
    - pseudo_weight: of the cross-entropy with the clustering labels, from `warmup_epochs` on (1 for VisDA).
    - threshold: classes that at most so many images are predicted to be get no label.

    The head stays as it is. Minibatches of one image are left out.
    """

    name: ClassVar[str] = "shot"
    paper: ClassVar[str] = "Liang et al., ICML 2020"
    needs: ClassVar[Needs] = Needs.UNLABELLED
    changes: ClassVar[str] = "everything but the head"

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
        """Only settings that make sense."""
        self.at_least(batch_size=2)

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Label the whole target, train an epoch, label again; the last network is the result."""
        unlabelled = target.need_unlabelled(self.name)
        network, head = prepare_unlabelled(network, unlabelled, self.name)
        model = trainable(network, "train_running")
        tensors = [tensor.requires_grad_(True) for tensor in body_parameters(network, model)]
        if not tensors:
            raise FewshiftError("the network has no parameters but its head's, which shot holds: choose another method")
        optimizer = torch.optim.SGD(
            tensors, self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.momentum > 0
        )
        steps = self.epochs * (len(unlabelled) // self.batch_size + (len(unlabelled) % self.batch_size > 1))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + 10 * t / max(steps, 1)) ** -0.75)
        labels: list[Tensor | None] = []  # of each epoch: one per image, looked up by its index

        def label() -> Tensor:
            features, probabilities = predictions(model.eval(), head, unlabelled, self.batch_size)
            use_batches(network, model, MOMENTUM)
            return pseudo_labels(features, probabilities, self.threshold)

        def loss(indices: Tensor) -> Tensor:
            logits = logits_of(model(like(model, unlabelled.batch(indices, augmented=True))))
            value = logits.new_zeros((), requires_grad=True)  # alone it gives no gradient: only statistics move
            if self.information:
                value = value + information_loss(logits)
            if (found := labels[-1]) is not None:
                value = value + self.pseudo_weight * F.cross_entropy(logits, found[indices])
            return value

        with private_randomness(seed) as generator:

            def epoch() -> Iterator[Tensor]:
                wanted = self.pseudo_weight > 0 and len(labels) >= self.warmup_epochs
                labels.append(label() if wanted else None)
                batches = minibatches(len(unlabelled), self.batch_size, generator)
                yield from (indices for indices in batches if len(indices) > 1)

            losses = fit(loss, epoch, optimizer, self.epochs, what="shot", after_step=schedule.step).losses
            _, probabilities = predictions(model.eval(), head, unlabelled, self.batch_size)
        given = [found for found in labels if found is not None]
        return Fitted(
            network.with_tensors(model.state_dict()),
            notes={
                "loss": losses,
                "pseudo_labels": [found.bincount(minlength=probabilities.shape[1]).tolist() for found in given],
                "relabelled": _relabelled(given),
                "predicted": probabilities.argmax(1).bincount(minlength=probabilities.shape[1]).tolist(),
                "steps": steps,
                "parameters": sum(tensor.numel() for tensor in tensors),
            },
        )


def information_loss(logits: Tensor) -> Tensor:
    """mean_x H(p(x)) - H(mean_x p(x)): small where predictions are certain one by one and diverse together."""
    p = logits.softmax(1)
    return _entropy(p).mean() - _entropy(p.mean(0))


def pseudo_labels(features: Tensor, probabilities: Tensor, threshold: int = 0) -> Tensor:
    """The class of the nearest centroid for every row: cosine distance, two rounds, all rows at once.

    Features get a constant 1 and unit length. Centroids are weighted by the probabilities first, then by the labels of
    the first round. Only classes that more than `threshold` rows are predicted to be can be given.
    """
    points = F.normalize(torch.cat([features, torch.ones_like(features[:, :1])], 1), dim=1)
    classes = probabilities.shape[1]
    given = probabilities.argmax(1).bincount(minlength=classes) > threshold
    if not given.any():
        raise FewshiftError(f"no class has more than {threshold} predicted images: lower threshold")
    weights = probabilities
    for _ in range(ROUNDS):
        centres = F.normalize(weights.T @ points, dim=1)  # the mean's length does not matter to a cosine
        alive = given & (weights.sum(0) > 0)
        labels = (points @ centres.T).masked_fill(~alive, -torch.inf).argmax(1)
        weights = F.one_hot(labels, classes).to(points)
    return labels


@torch.no_grad()
def predictions(model: nn.Module, head: str, unlabelled: Unlabelled, size: int) -> tuple[Tensor, Tensor]:
    """(features, probabilities) of every image in its plain view, from first to last, read in batches."""
    features, probabilities = [], []
    for _, images in unlabelled.batches(size):
        with head_inputs(model, head) as seen:
            logits = logits_of(model(like(model, images)))
        if not torch.isfinite(logits).all():
            raise FewshiftError("the network's logits became NaN or infinite on the target: lower lr")
        features.append(seen[-1].flatten(1))
        probabilities.append(logits.softmax(1))
    return torch.cat(features), torch.cat(probabilities)


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + EPS).log()).sum(-1)


def _relabelled(labels: list[Tensor]) -> list[float]:
    """From each labelling to the next, the share of images whose label changed."""
    return [(new != old).double().mean().item() for old, new in pairwise(labels)]

"""FLUTE, reduced to one source: learn BatchNorm's weight and bias under a nearest-centroid classifier.

Triantafillou et al., "Learning a Universal Template for Few-shot Dataset Generalization", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.adaptable import refuse_unadaptable, refuse_without_gradients
from fewshift.core.heads import centroids, nearest_centroid_head
from fewshift.core.loop import fit
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.network import Network, head_inputs
from fewshift.core.randomness import private_randomness
from fewshift.core.support import Target
from fewshift.errors import FewshiftError
from fewshift.methods._finetuning import affine_parameters, prepare, trainable, use_batches, write_statistics

FLOOR = 1e-3  # of the squared length of an embedding


@dataclass(frozen=True)
class Flute(Method):
    """Cosine logits, without temperature, to the class means of the minibatch itself.

    - stats: "support" (each minibatch's own moments while training, with gradient; those of the whole support for
      centroids and test) or "source".
    - centroid_grad: "flow" through the class means, as in the original, or "detach".
    """

    name: ClassVar[str] = "flute"
    paper: ClassVar[str] = "Triantafillou et al., ICML 2021"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "BatchNorm weight, bias and statistics; the head (nearest centroids)"
    verified: ClassVar[str] = (
        "`tests/methods/test_flute_naive.py`: weight and bias after every step, the statistics and the centroids, "
        "against the formulas, to 1e-9"
    )

    stats: str = "support"
    centroid_grad: str = "flow"
    epochs: int = 10
    lr: float = 1e-3
    batch_size: int = 32

    def check(self) -> None:
        """Two images per minibatch at least, known words."""
        self.at_least(batch_size=2)
        self.one_of(stats=("support", "source"), centroid_grad=("flow", "detach"))

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Train weight and bias, take the support's statistics, put the centroids into the head."""
        network, support = prepare(network, target, self.name)
        refuse_unadaptable(network)
        refuse_without_gradients(network)
        head = network.need_head(self.name)
        if not support.kind.centroids:
            raise FewshiftError("flute classifies images by centroids, not pixels: use finetune-bn")
        if len(support.counts) != network.classes:
            raise FewshiftError("flute needs an image of every class for its centroids: add some, or use finetune-bn")
        if not any(layer.affine for layer in network.layers):
            raise FewshiftError("flute trains BatchNorm weight and bias, and no layer has them: use adabn")
        model = trainable(network, "source_frozen")
        if self.stats == "support":
            use_batches(network, model, momentum=0.0)
        tensors = [tensor.requires_grad_(True) for tensor in affine_parameters(network, model)]

        def loss(indices: Tensor) -> Tensor:
            with head_inputs(model, head) as seen:
                images, labels = support.batch(indices)
                model(images)
            return centroid_loss(seen[-1].flatten(1), labels, detach=self.centroid_grad == "detach")

        with private_randomness(seed) as generator:
            batches = partial(balanced_minibatches, support.targets, self.batch_size, generator)
            course = fit(loss, batches, torch.optim.Adam(tensors, lr=self.lr), self.epochs)
        model = network.with_tensors(model.state_dict())
        if self.stats == "support":
            write_statistics(network, model, support)
        state = model.state_dict()
        with torch.no_grad():
            for name, tensor in nearest_centroid_head(network, model, support).items():
                state[name].copy_(tensor)
        return Fitted(
            model,
            notes={
                "support_loss": course.losses,
                "epoch_seconds": course.epoch_seconds,
                "parameters": sum(tensor.numel() for tensor in tensors),
            },
        )


def centroid_loss(embeddings: Tensor, labels: Tensor, *, detach: bool = False) -> Tensor:
    """Cross-entropy of cos(embedding, class mean) over the classes that are present."""
    present, compact = labels.unique(return_inverse=True)
    centres = centroids(embeddings, compact, len(present))
    return F.cross_entropy(_unit(embeddings) @ _unit(centres.detach() if detach else centres).T, compact)


def balanced_minibatches(labels: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """One epoch in which classes take turns, so that minibatches mirror the support's class balance."""
    order = torch.randperm(len(labels), generator=generator)
    turn = torch.zeros(len(labels), dtype=torch.long)
    for label in labels.unique().tolist():
        mine = order[labels[order] == label]
        turn[mine] = torch.arange(len(mine))
    batches = list(order[turn[order].argsort(stable=True)].split(size))
    if len(batches) > 1 and len(batches[-1]) < 2:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.square().sum(1, keepdim=True).clamp(min=FLOOR).sqrt()

"""Algorithm: a way to train a source network, as a value. Trainee: one network while it is trained that way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fewshift.core.labels import IMAGES, PIXELS, Labels
from fewshift.core.losses import at_labels, cross_entropy
from fewshift.core.network import logits_of
from fewshift.models.layers.changes import LayerChange

if TYPE_CHECKING:
    from fewshift.lab.training.gather import Sources
    from fewshift.lab.training.recipes import Recipe


NONE = -100  # what torch ignores by default, which is no class


@dataclass(frozen=True)
class Batch:
    """Images of one step, augmented and normalised."""

    views: tuple[Tensor, ...]  # the same images, augmented independently: as many as the algorithm asks for
    labels: Tensor  # (n,), or (n, height, width) of the first view
    domains: Tensor  # (n,): positions in Task.domains

    @property
    def images(self) -> Tensor:
        """The first view: what the network answers."""
        return self.views[0]


@dataclass(frozen=True)
class Task:
    """What is to be learned."""

    classes: tuple[str, ...]
    domains: tuple[str, ...]  # the sources
    labels: Labels  # of each image, or of each pixel
    head: str | None  # the layer that gives the network's output, where there is one
    label_smoothing: float = 0.0
    shape: tuple[int, ...] = ()  # of an image as a step sees it: channels, height, width

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy; smoothed, each label is a distribution with (1 - s) on its class and s on all alike."""
        if self.label_smoothing and self.labels.weight(labels):
            ignored = NONE if self.labels.ignored is None else self.labels.ignored
            return F.cross_entropy(logits, labels, ignore_index=ignored, label_smoothing=self.label_smoothing)
        return cross_entropy(logits, labels)


class Trainee(nn.Module):
    """One network in training, and what an algorithm adds to it. As it is, it adds nothing: plain training.

    An algorithm overrides the steps it has an opinion on: `extra`, `before_epoch`, `after_step`, `after_epoch`. The
    trainee is a module: parameters of its own are trained with the network's, and its buffers (a queue, a mask, a
    momentum copy) survive an interruption. Only `model` is written into the checkpoint.

    Every epoch runs with global random states that follow from the seed and the epoch alone: algorithms may use
    `torch.rand` and the like, and a training that is resumed repeats them.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.batch: Batch | None = None  # the one in work: for hooks, which see no more than features
        self._hooks: list[RemovableHandle] = []

    def extra(self, batch: Batch, logits: Tensor) -> Tensor | float:
        """What is added to the loss of a batch."""
        return 0.0

    def before_epoch(self, epoch: int) -> None:
        """Which layers are in training mode: all, unless an algorithm knows better. Epochs count from 0."""
        self.train()

    def after_step(self) -> None:
        """Called after every step of the optimiser."""

    def after_epoch(self, epoch: int, sources: Sources) -> None:
        """Called after an epoch, before it is saved, with the source images (`sources.train`)."""

    def watch(self, layer: str, hook: Callable[[nn.Module, Any, Any], Any]) -> None:
        """Run `hook(module, inputs, output)` after that layer of the network for as long as the training lasts.

        What it returns, if it is not None, takes the place of the output.
        """
        self._hooks.append(self.model.get_submodule(layer).register_forward_hook(hook))

    def release(self) -> nn.Module:
        """The network as a user gets it: without hooks, in evaluation mode."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return self.model.eval()

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and the logits of its images."""
        self.batch = batch
        logits = at_labels(logits_of(self.model(batch.images)), batch.labels)
        return self.task.loss(logits, batch.labels) + self.extra(batch, logits), logits

    def groups(self, lr: float, head_rate: float) -> list[dict[str, Any]]:
        """The parameters to train: the head and what the algorithm adds learn `head_rate` times as fast."""
        head = set() if self.task.head is None else set(self.model.get_submodule(self.task.head).parameters())
        trunk = [tensor for tensor in self.model.parameters() if tensor.requires_grad and tensor not in head]
        known = set(trunk)
        new = [tensor for tensor in self.parameters() if tensor.requires_grad and tensor not in known]
        rates = ((trunk, lr), (new, lr * head_rate))
        return [{"params": tensors, "lr": rate, "peak": rate} for tensors, rate in rates if tensors]


@dataclass(frozen=True)
class Algorithm(LayerChange):
    """A way to train a source network. Its fields are its hyper-parameters, none with the name of one of a recipe.

    One that changes layers also inherits the change, from `fewshift.models.layers`: `modify` is called on a copy of the
    network that is already filled with the weights it starts from.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    verified: ClassVar[str]  # which test compares it with what, and how closely, in words
    views: ClassVar[int] = 1  # how often each image is augmented in a step
    kinds: ClassVar[tuple[Labels, ...]] = (IMAGES, PIXELS)  # the labels it can learn from

    def check_recipe(self, recipe: Recipe, sources: Sources) -> None:
        """Raise one sentence when this algorithm cannot work with such batches or sources, before any work."""

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        """The network, about to be trained; as it is, training is plain."""
        return Trainee(model, task)

"""CSG: learn from synthetic images without forgetting how ImageNet's network sees them.

Chen et al., "Contrastive Syn-to-Real Generalization", ICLR 2021. The network's features of an image are drawn to those
that the network it began as has of another view of the image, and away from those it has of other images. All layers
stay in evaluation mode, as the authors meant it: BatchNorm's running statistics are ImageNet's to the end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift.core.labels import IMAGES, Labels
from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Batch, Task, Trainee
from fewshift.models.layers.changes import HiddenHead, last_linear
from fewshift.models.layers.stages import AUTO, chosen_layers, maps_of, outputs_of

if TYPE_CHECKING:
    from fewshift.lab.training.gather import Sources
    from fewshift.lab.training.recipes import Recipe

STAGES = (3, 4)


def attention(features: Tensor) -> Tensor:
    """How much each pixel counts, (n, 1, height, width): sum_c x_c mean(x_c), as a share of its sum over the pixels.

    Features are not negative. Where all of an image's are 0, its pixels count alike.
    """
    likeness = (features * features.mean((2, 3), keepdim=True)).sum(1, keepdim=True)
    total = likeness.sum((2, 3), keepdim=True)
    alike = torch.full_like(likeness, 1 / likeness[0].numel())
    return torch.where(total > 0, likeness / torch.where(total > 0, total, 1), alike)


def pooled(features: Tensor, weights: Tensor) -> Tensor:
    """The sum over the pixels, each counting by its weight: (n, channels)."""
    return (features * weights).sum((2, 3))


def contrast_logits(queries: Tensor, keys: Tensor, others: Tensor, temperature: float) -> Tensor:
    """(n, 1 + others): the cosine of each query with its own key, then with all other keys, over the temperature.

    All rows have length 1.
    """
    return torch.cat([(queries * keys).sum(1, keepdim=True), queries @ others.T], 1) / temperature


class Contrast(nn.Module):
    """What one stage is compared by: a projection of queries, its slow copy for keys, and the keys of past steps."""

    def __init__(self, channels: int, dimensions: int, length: int) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, dimensions))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.queue: Tensor
        self.position: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(length, dimensions), dim=1))
        self.register_buffer("position", torch.tensor(0))
        self._waiting: list[Tensor] = []

    def loss(self, queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
        """InfoNCE of pooled features (n, channels): -log of the share that a query gives to its own key."""
        rows = F.normalize(self.query(queries), dim=1)
        with torch.no_grad():
            own = F.normalize(self.key(keys), dim=1)
        self._waiting.append(own)
        logits = contrast_logits(rows, own, self.queue, temperature)
        return F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long))

    @torch.no_grad()
    def advance(self, keep: float) -> None:
        """After a step: its keys take the place of the oldest, and the projection of keys follows that of queries.

        After the step, not before: a batch that is passed in parts is compared as one that is not.
        """
        for keys in self._waiting:
            places = (self.position + torch.arange(len(keys), device=keys.device)) % len(self.queue)
            self.queue[places] = keys
            self.position = (self.position + len(keys)) % len(self.queue)
        self._waiting.clear()
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(keep).add_(query, alpha=1 - keep)


class Contrasting(Trainee):
    """The network, the network it began as, and what its stages are compared by."""

    def __init__(self, model: nn.Module, task: Task, settings: CSG, widths: dict[str, int]) -> None:
        super().__init__(model, task)
        self._settings, self._layers = settings, tuple(widths)
        self._queries: dict[str, Tensor] = {}
        self.began = copy.deepcopy(model).requires_grad_(False)
        self.stages = nn.ModuleList(Contrast(width, settings.dimensions, settings.queue) for width in widths.values())
        for layer in widths:
            self.watch(layer, partial(self._note, layer))

    def before_epoch(self, epoch: int) -> None:
        """Evaluation mode: affine parameters learn, statistics stay."""
        self.eval()

    def extra(self, batch: Batch, logits: Tensor) -> Tensor | float:
        """The weighted sum over the stages. Keys are of the other view, pooled where the network in training looks."""
        queries = dict(self._queries)
        self._queries.clear()  # they hold on to the graph of the step
        if not self._settings.weight:
            return 0.0
        with torch.no_grad():
            seen = outputs_of(self.model, self._layers, batch.views[1])
            keys = outputs_of(self.began, self._layers, batch.views[1])
        total = logits.new_zeros(())
        for layer, stage in self._stages():
            _check_sign(layer, queries[layer], seen[layer])
            of_query = pooled(queries[layer], attention(queries[layer]))
            of_key = pooled(keys[layer], attention(seen[layer]))
            total = total + stage.loss(of_query, of_key, self._settings.temperature)
        return self._settings.weight * total

    def after_step(self) -> None:
        """Queues and projections of keys move on."""
        for _, stage in self._stages():
            stage.advance(self._settings.keep)

    def _stages(self) -> Iterator[tuple[str, Contrast]]:
        return zip(self._layers, cast(Iterable[Contrast], self.stages), strict=True)

    def _note(self, layer: str, _: nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # a step's; those without gradients are read where they are wanted
            self._queries[layer] = output


@dataclass(frozen=True)
class CSG(HiddenHead, Algorithm):
    """Fine-tuning in evaluation mode, plus a contrast of each stage with the network that the training began from.

    - weight: of the contrast, of each stage; 0 is plain fine-tuning in evaluation mode.
    - layers: which are compared, with commas between; auto is the last two of a network's four stages.
    - temperature: by which cosines are divided.
    - queue: keys of past steps, which each query is compared with.
    - dimensions: of a projection.
    - keep: the share that the projection of keys keeps of itself in a step; the rest is that of queries.
    """

    name: ClassVar[str] = "csg"
    paper: ClassVar[str] = "Chen et al., ICLR 2021"
    verified: ClassVar[str] = (
        "`tests/lab/training/test_csg.py`: attention, contrast, queue and optimiser, one by one, against naive "
        "loops, to 1e-4; there is no second implementation of a whole step"
    )
    views: ClassVar[int] = 2
    kinds: ClassVar[tuple[Labels, ...]] = (IMAGES,)

    weight: float = 0.1
    layers: str = AUTO
    temperature: float = 0.07
    queue: int = 65536
    dimensions: int = 128
    keep: float = 0.999

    def check(self) -> None:
        """Numbers that make sense."""
        self.at_least(queue=1, dimensions=1)
        if not self.temperature:
            raise FewshiftError("temperature=0 cannot divide: give a number above 0")
        if self.keep > 1:
            raise FewshiftError(f"keep={self.keep} is no share: give a number from 0 to 1")

    def check_recipe(self, recipe: Recipe, sources: Sources) -> None:
        """A queue holds the keys of a step, and of no image twice."""
        images = len(sources.train)
        if self.queue < recipe.batch_size:
            raise FewshiftError(
                f"a queue of {self.queue} keys is shorter than a batch of {recipe.batch_size}: "
                "raise queue, or lower batch_size"
            )
        if self.weight and self.queue > images:
            raise FewshiftError(
                f"a queue of {self.queue:,} keys would hold all {images:,} training images, so that each is compared "
                f"with itself: set queue to {max(recipe.batch_size, images // 2)}"
            )

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        """The network, with a frozen copy of itself beside it."""
        if self.hidden:
            name, _ = last_linear(model)
            if task.head != name:
                raise FewshiftError(
                    f"this {type(model).__name__} does not answer with its last linear layer, which the new head "
                    "replaces: set hidden to 0"
                )
            task = replace(task, head=name.rpartition(".")[0])  # both of its layers are new, and learn as fast
        maps = maps_of(model, chosen_layers(model, self.layers, STAGES), task.shape)
        for layer, features in maps.items():
            _check_sign(layer, features)
        return Contrasting(model, task, self, {layer: features.shape[1] for layer, features in maps.items()})


def _check_sign(layer: str, *features: Tensor) -> None:
    if any(bool((maps < 0).any()) for maps in features):
        raise FewshiftError(
            f"layer {layer!r} gives negative numbers, which attention cannot weigh: name layers that end in a ReLU"
        )

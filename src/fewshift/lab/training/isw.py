"""ISW: instance normalisation, and whitening of what reacts to colours alone.

Choi et al., "RobustNet: Improving Domain Generalization in Urban-Scene Segmentation via Instance Selective Whitening",
CVPR 2021. After some plain epochs the network is shown source images and copies with other colours: entries of its
features' covariances that differ between the two carry style, and from then on are drawn to 0. The rest is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import center_crop

from fewshift.core import _progress as progress
from fewshift.core.layout import channels_last
from fewshift.core.normalisation import EPS, InstanceNorm, image_moments
from fewshift.errors import FewshiftError
from fewshift.lab.training.algorithm import Algorithm, Batch, Task, Trainee
from fewshift.lab.training.augment import photometric
from fewshift.models.layers.changes import ISWChange
from fewshift.models.layers.placement import check_sizes, instance_norms

if TYPE_CHECKING:
    from fewshift.lab.training.gather import Sources
    from fewshift.lab.training.recipes import Recipe

MULTIPLE = 32  # some networks want such sizes


def covariances(features: Tensor) -> Tensor:
    """f f' / (HW - 1) + 1e-5 of each image, (n, C, C), in single precision at least.

    Of features (n, C, H, W) that are standardised by image: their means are 0.
    """
    maps = features.flatten(2)
    maps = maps.float() if maps.dtype.itemsize < 4 else maps
    channels, positions = maps.shape[1:]
    _, biased = image_moments(maps, channels)
    return biased[:, 0] * (positions / max(1, positions - 1)) + EPS * torch.eye(channels).to(maps)


def selective_loss(matrices: Tensor, mask: Tensor) -> Tensor:
    """The mean over images of sum_ij M_ij |S_ij| / #M, of covariances (n, C, C) and a mask (C, C); 0 if it is empty."""
    return (matrices.abs() * mask).sum((1, 2)).mean() / mask.sum().clamp(min=1)


def style_variances(original: Tensor, changed: Tensor) -> Tensor:
    """The mean over images of the variance of two covariances, (a - b)^2 / 2, above the diagonal; elsewhere 0."""
    return ((original - changed).double().square() / 2).mean(0).triu(1)


def sensitive(variances: Tensor) -> Tensor:
    """Which entries lie outside the lowest of three clusters.

    All entries of the matrix are clustered, with the zeros at and below its diagonal, as the authors do.
    """
    values, counts = (part.numpy() for part in variances.cpu().unique(return_counts=True))
    return variances > top_of_lowest(values, counts)


def top_of_lowest(values: np.ndarray, counts: np.ndarray) -> float:
    """The largest value in the lowest of three clusters: those with the least sum of squares, so there is no seed.

    `values` are sorted and different, each there `counts` times. Clusters are intervals [0, i), [i, j), [j, n). The
    best i does not fall as j grows: of the j on either side of a middle one, it lies on the same side of its i.
    """
    n = len(values)
    if n < 3:
        return float(values[0])
    weight, total = (np.concatenate([[0.0], np.cumsum(terms)]) for terms in (counts, values * counts))

    def gain(begin: Any, end: Any) -> Any:  # the least sum of squares is the greatest sum of these
        return (total[end] - total[begin]) ** 2 / (weight[end] - weight[begin])

    first, reached = np.zeros(n, dtype=np.int64), np.full(n, -np.inf)
    ranges = [(2, n - 1, 1, n - 2)]  # of j, and of the i that may go with them
    while ranges:
        low, high, least, most = ranges.pop()
        if low > high:
            continue
        j = (low + high) // 2
        i = np.arange(least, min(most, j - 1) + 1)
        gains = gain(0, i) + gain(i, j)
        best = int(np.argmax(gains))
        first[j], reached[j] = i[best], gains[best]
        ranges += [(low, j - 1, least, first[j]), (j + 1, high, first[j], most)]
    j = 2 + int(np.argmax(reached[2:] + gain(np.arange(2, n), n)))
    return float(values[first[j] - 1])


class _SeenError(Exception):
    """Everything was seen: what the network would do after it is of no interest."""


class Selective(Trainee):
    """Reads covariances behind the instance norms: to find what carries style, then to draw it to 0."""

    def __init__(self, model: nn.Module, task: Task, settings: ISW) -> None:
        super().__init__(model, task)
        self._settings = settings
        self._points = instance_norms(model)
        self._seen: dict[int, Tensor] = {}
        self._listening = self._briefly = False
        for point, name in enumerate(self._points):
            channels = cast(InstanceNorm, model.get_submodule(name)).num_features
            self.register_buffer(f"mask{point}", torch.zeros(channels, channels, dtype=torch.bool))
            self.watch(name, partial(self._note, point))

    @property
    def masks(self) -> list[Tensor]:
        """For each point which entries carry style; none before they are known."""
        return [self.get_buffer(f"mask{point}") for point in range(len(self._points))]

    def before_epoch(self, epoch: int) -> None:
        """The loss counts when the plain epochs are over."""
        super().before_epoch(epoch)
        self._listening = self._settings.weight > 0 and epoch >= self._settings.plain_epochs

    def extra(self, batch: Batch, logits: Tensor) -> Tensor | float:
        """The mean over the points."""
        if not self._listening:
            return 0.0
        losses = [selective_loss(self._seen.pop(point), mask) for point, mask in enumerate(self.masks)]
        return self._settings.weight * torch.stack(losses).mean()

    def after_epoch(self, epoch: int, sources: Sources) -> None:
        """After the last plain epoch the masks are found, once."""
        self._listening = False
        if self._settings.weight and epoch == self._settings.plain_epochs - 1:
            for mask, new in zip(self.masks, self._find(sources), strict=True):
                mask.copy_(new)

    @torch.no_grad()
    def _find(self, sources: Sources) -> list[Tensor]:
        """What carries style in each of the trials, each with images and colours of its own."""
        self.eval()
        masks = [torch.ones_like(mask) for mask in self.masks]
        for _ in progress.track(range(self._settings.trials), "trials of other colours"):
            chosen = torch.randperm(len(sources.train))[: self._settings.images]
            sums = [torch.zeros_like(mask, dtype=torch.float64) for mask in masks]
            for pixels, _labels in sources.train.batches(chosen.split(sources.labels.minibatch)):
                images = center_crop(pixels, [side - side % MULTIPLE or side for side in pixels.shape[-2:]])
                both = sources.preprocess.normalise(torch.cat([images, photometric(images)]))
                for total, seen in zip(sums, self._look(both), strict=True):
                    total.add_(style_variances(*seen.chunk(2)), alpha=len(images))
            masks = [mask & sensitive(total / len(chosen)) for mask, total in zip(masks, sums, strict=True)]
        return masks

    def _look(self, images: Tensor) -> Sequence[Tensor]:
        """The covariances at each point; the network runs no further than that."""
        self._listening = self._briefly = True
        try:
            self.model(channels_last(images))
        except _SeenError:
            pass
        finally:
            self._listening = self._briefly = False
        return [self._seen.pop(point) for point in range(len(self._points))]

    def _note(self, point: int, _: nn.Module, __: Any, output: Tensor) -> None:
        if not self._listening:
            return
        # of a copy: the activation that follows may write into the output
        self._seen[point] = covariances(output.clone())
        if self._briefly and len(self._seen) == len(self._points):
            raise _SeenError


@dataclass(frozen=True)
class ISW(ISWChange, Algorithm):
    """Plain training of a network with instance norms, then with a loss on covariances that carry style.

    - weight: of that loss; with 0 it is training with instance norms.
    - plain_epochs: epochs before it, after the last of which the entries that carry style are chosen.
    - trials, images: how often they are chosen, and on how many training images; those of every trial count.
    """

    name: ClassVar[str] = "isw"
    paper: ClassVar[str] = "Choi et al., CVPR 2021"
    verified: ClassVar[str] = (
        "`tests/lab/training/test_isw.py`: covariances against NumPy's, to 1e-10, and loss, clusters and masks, one "
        "by one, against naive loops; there is no second implementation of a whole step"
    )

    weight: float = 0.6
    plain_epochs: int = 6
    trials: int = 10
    images: int = 500

    def check(self) -> None:
        """At least one of everything."""
        self.at_least(plain_epochs=1, trials=1, images=1)

    def check_recipe(self, recipe: Recipe, sources: Sources) -> None:
        """The loss has to begin before the training ends."""
        if self.weight and recipe.epochs <= self.plain_epochs:
            raise FewshiftError(
                f"the whitening loss begins after {self.plain_epochs} epochs and the training has {recipe.epochs}: "
                "lower plain_epochs, or raise epochs"
            )

    def trainee(self, model: nn.Module, task: Task) -> Trainee:
        """The network, with hooks that read covariances."""
        check_sizes(model, task.shape)
        return Selective(model, task, self)

"""Recipes: how a source network is trained on each data set.

`paper` is what the paper's source networks were trained with; for data sets it does not have, in the same manner.
`quick` makes, from ImageNet weights, a network worth adapting in minutes on two cores. Both are tables of values:
every field can be set otherwise.

A schedule says which share of its peak the rate has at a step. It is a pure function, so there is nothing to resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import cos, pi
from typing import NamedTuple

import torch

from fewshift.core.labels import IMAGES, PIXELS, Labels
from fewshift.core.settings import Settings
from fewshift.errors import FewshiftError
from fewshift.lab.training.augment import AUGMENTATIONS

DIGITS_HELD_OUT = 0.2  # of the embedded digits: the fifth that the shipped networks never saw
MOMENTUM = 0.9  # of sgd and heavy-ball
OPTIMIZERS = ("sgd", "heavy-ball", "adam")
PRECISIONS = ("float32", "bfloat16")
RISE, BEGIN, END = 0.3, 1 / 25, 1 / 25e4  # of one cycle: how long it rises, and where it begins and ends
POWER = 0.9
WARM, COLD = 100, 0.01  # steps of a warm-up, and where it begins


class Moment(NamedTuple):
    """Where a training is: both counts from 0, with their totals."""

    step: int
    steps: int
    epoch: int
    epochs: int


def constant(now: Moment) -> float:
    """Always the peak."""
    return 1.0


def cosine(now: Moment) -> float:
    """(1 + cos(pi e / E)) / 2 in epoch e of E."""
    return (1 + cos(pi * now.epoch / now.epochs)) / 2


def poly(now: Moment) -> float:
    """(1 - s / S)^0.9 at step s of S."""
    return float((1 - now.step / now.steps) ** POWER)


def warm_poly(now: Moment) -> float:
    """Poly, times 0.01 + 0.99 (s / 100)^2 in the first hundred steps."""
    return poly(now) * min(1.0, COLD + (1 - COLD) * (now.step / WARM) ** 2)


def one_cycle(now: Moment) -> float:
    """From 1/25 to the peak in three tenths of the steps, then to 1/250,000 in the rest, each half a cosine."""
    top, last = RISE * now.steps - 1, now.steps - 1
    if now.step <= top:
        return _half_cosine(BEGIN, 1.0, now.step / top)
    return _half_cosine(1.0, END, (now.step - top) / (last - top))


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + cos(pi * share)) / 2


SCHEDULES: dict[str, Callable[[Moment], float]] = {
    "constant": constant,
    "cosine": cosine,
    "poly": poly,
    "one-cycle": one_cycle,
    "warm-poly": warm_poly,
}


@dataclass(frozen=True)
class Recipe(Settings):
    """All that is chosen in a training but the network, the algorithm and the data.

    - epochs, batch_size: a last batch that is not full is left out.
    - accumulate: a step's batch is passed through the network in so many parts; the step is the same, the memory less.
    - domains_per_batch: equal parts of so many random sources in each batch; none shuffles all images.
    - optimizer: sgd, adam, or heavy-ball: SGD whose momentum gathers gradients times their rates, not gradients alone.
    - lr, schedule: the peak, and its course: cosine by epoch; one-cycle, poly and warm-poly by step; constant.
    - head_rate: the head's rate, as a multiple.
    - size: what the network sees: the side of a square; with pixel labels the shorter side. None is the data set's own.
    - margin: images are resized to so many times `size` first; training and evaluation cut `size` out of that.
    - squeeze: for training, images become square whatever their proportions; otherwise their middle is taken.
    - crop: with pixel labels, the side of the part that a step sees; none for as much as the image has.
    - held_out: the share of each source that is not trained on but validates; of the digits a fixed fifth, or none.
    - precision: bfloat16 computes layers in half as many bits (autocast), about twice as fast on processors that have
      such instructions and slower on others; weights, statistics and steps stay float32.
    - patience: stop after so many epochs without a better score on the held-out source images, and keep the best;
      none trains all epochs and keeps the last.
    """

    epochs: int
    lr: float
    batch_size: int = 32
    accumulate: int = 1
    domains_per_batch: int | None = None
    optimizer: str = "sgd"
    nesterov: bool = False  # of sgd
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    head_rate: float = 1.0
    label_smoothing: float = 0.0
    augment: str = "none"
    size: int | None = None
    margin: float = 1.0
    squeeze: bool = False
    crop: int | None = None
    held_out: float = 0.1
    precision: str = "float32"
    patience: int | None = None

    def check(self) -> None:
        """Words that are in their tables, numbers that make sense."""
        self.one_of(optimizer=OPTIMIZERS, schedule=SCHEDULES, augment=AUGMENTATIONS, precision=PRECISIONS)
        self.at_least(epochs=1, batch_size=2, accumulate=1, domains_per_batch=1, size=1, margin=1, crop=1, patience=1)
        if self.batch_size < 2 * self.accumulate:
            raise FewshiftError(
                f"{self.accumulate} parts of a batch of {self.batch_size} leave single images, and BatchNorm needs "
                "two: lower accumulate"
            )
        for name in ("held_out", "label_smoothing"):
            if getattr(self, name) >= 1:
                raise FewshiftError(f"{name}={getattr(self, name)} is no share: give a number from 0 to below 1")
        if self.nesterov and self.optimizer == "heavy-ball":
            raise FewshiftError("nesterov is not for heavy-ball: set optimizer to sgd, or nesterov to false")
        if self.patience is not None and not self.held_out:
            raise FewshiftError("patience needs images that validate: set held_out above 0")


# the cross-domain recipe of MixStyle
_PACS = Recipe(epochs=150, lr=1e-3, batch_size=128, domains_per_batch=2, augment="enlarge", size=224, squeeze=True)
# all images of the source
_OFFICE = Recipe(epochs=50, lr=1e-3, augment="enlarge+randaugment", size=224, squeeze=True, held_out=0.0)
# 40,000 steps on GTAV's 12,403 training images
_SCENES = Recipe(epochs=52, lr=0.01, batch_size=16, schedule="poly", augment="scenes", crop=768)
# as CSG, but of wide images it sees the middle
_VISDA = Recipe(
    epochs=30, lr=1e-5, optimizer="heavy-ball", schedule="warm-poly", head_rate=10.0, augment="randaugment", size=224
)
# its images are squeezed in evaluation too
_IWILDCAM = Recipe(epochs=12, lr=3e-5, batch_size=16, optimizer="adam", weight_decay=0.0, schedule="constant")

PAPER = {
    "pacs": _PACS,
    "visda": _VISDA,
    "office31": _OFFICE,
    "officehome": replace(_OFFICE, batch_size=64),
    "domainnet": replace(_OFFICE, batch_size=64),
    "camelyon17": Recipe(epochs=10, lr=1e-3, weight_decay=0.01, schedule="constant"),
    "iwildcam": _IWILDCAM,
    "digits": Recipe(
        epochs=12, lr=0.1, batch_size=64, nesterov=True, schedule="one-cycle", augment="shift", held_out=DIGITS_HELD_OUT
    ),
    "camvid": replace(_SCENES, epochs=10, batch_size=8, crop=None, size=192),  # not in the paper: minutes on two cores
}
QUICK = {"digits": replace(PAPER["digits"], epochs=2), "camvid": PAPER["camvid"]}
ARCHITECTURES = {  # what the recipes are for
    "pacs": "timm:resnet18",
    "visda": "timm:resnet101",
    "camelyon17": "torchvision:densenet121",
    "digits": "digits",
    "camvid": "smp:deeplabv3plus/tu-tf_efficientnet_lite0",
}
_QUICK_IMAGES = Recipe(
    epochs=3,
    lr=0.01,
    head_rate=5.0,
    nesterov=True,
    schedule="one-cycle",
    label_smoothing=0.1,
    augment="crop",
    size=128,
    margin=1.125,
)
RECIPES = {"paper": PAPER, "quick": QUICK}
OTHERS: dict[str, dict[Labels, Recipe]] = {  # of data sets without a recipe of their own
    "paper": {IMAGES: replace(_OFFICE, batch_size=64, held_out=0.1), PIXELS: _SCENES},
    "quick": {IMAGES: _QUICK_IMAGES, PIXELS: QUICK["camvid"]},
}
OTHER_ARCHITECTURES: dict[Labels, str] = {IMAGES: "timm:resnet50", PIXELS: "smp:deeplabv3plus/resnet50"}

# where the data set says which domains train; elsewhere all but the target do
OFFICIAL = {
    ("camelyon17", "hospital2"): ("hospital0", "hospital3", "hospital4"),
    ("iwildcam", "test"): ("train",),
    ("visda", "validation"): ("train",),
    **{(name, "val"): ("train",) for name in ("gtav", "cityscapes", "bdd100k", "mapillary", "synthia")},
}


def bfloat16_is_fast(side: int = 512, rounds: int = 3) -> bool:
    """Whether this processor multiplies matrices faster in bfloat16 than in float32; some are several times slower."""
    return _fastest(torch.bfloat16, side, rounds) < _fastest(torch.float32, side, rounds)


def _fastest(dtype: torch.dtype, side: int, rounds: int) -> float:
    matrix = torch.ones(side, side, dtype=dtype)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def default_arch(dataset: str, labels: Labels) -> str:
    """The architecture that a data set's source networks have."""
    return ARCHITECTURES.get(dataset, OTHER_ARCHITECTURES[labels])


def find_recipe(name: str, dataset: str, labels: Labels = IMAGES) -> Recipe:
    """The recipe of that name for a data set, or one sentence with those there are."""
    if name not in RECIPES:
        raise FewshiftError(f"unknown recipe {name!r}: use one of {', '.join(RECIPES)}")
    return RECIPES[name].get(dataset, OTHERS[name][labels])

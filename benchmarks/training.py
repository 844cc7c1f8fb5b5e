"""The trainer's epoch beside a plain PyTorch loop over the same batches, as ratios measured in one run."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import fastest, network, show
from fewshift import Preprocess
from fewshift.lab.datasets import digits
from fewshift.lab.training import ERM
from fewshift.lab.training.augment import augmentation
from fewshift.lab.training.batches import Batches, order
from fewshift.lab.training.gather import ROOM, Sources
from fewshift.lab.training.recipes import Recipe, find_recipe
from fewshift.lab.training.samples import Joined, Pool
from fewshift.lab.training.trainer import train


class Noise:
    """Images of nothing: what a training costs does not depend on what there is to see."""

    def __init__(self, images: int, channels: int, size: int, classes: int) -> None:
        shape, generator = (images, channels, size, size), torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.arange(images) % classes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def sources_of(images: int, steps: Preprocess, size: int, classes: int) -> Sources:
    samples = Joined([Noise(images, steps.channels, size, classes)])
    names = tuple(map(str, range(classes)))
    return Sources(("noise",), names, steps, Pool(samples, ROOM), samples.domains, None)


def plain_epoch(model: nn.Module, sources: Sources, recipe: Recipe, layout: torch.memory_format) -> Callable[[], None]:
    """The loop anyone would write, over batches that are read and augmented as the trainer's are."""

    def loop() -> None:
        ours = copy.deepcopy(model).train().to(memory_format=layout)
        optimizer = torch.optim.SGD(
            ours.parameters(), lr=recipe.lr, momentum=0.9, nesterov=recipe.nesterov, weight_decay=recipe.weight_decay
        )
        side = sources.preprocess.crop
        batches = Batches(
            sources, order(sources, recipe, 0, 0), augmentation(recipe.augment, (side, side), sources.labels)
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=len(batches))
        for batch in batches:
            optimizer.zero_grad()
            images = batch.images.contiguous(memory_format=layout)
            F.cross_entropy(ours(images), batch.labels, label_smoothing=recipe.label_smoothing).backward()
            optimizer.step()
            schedule.step()

    return loop


def compare(what: str, model: nn.Module, sources: Sources, recipe: Recipe, rounds: int) -> None:
    found = fastest(
        rounds,
        ours=lambda: train(model, sources, recipe, ERM()),
        plain=plain_epoch(model, sources, recipe, torch.channels_last),
        usual=plain_epoch(model, sources, recipe, torch.contiguous_format),
    )
    show(f"{what}: an epoch / the same loop in plain PyTorch", found["ours"] / found["plain"], "<= 1.05")
    if sources.preprocess.channels > 1:  # grey images have nothing to interleave
        show(f"{what}: an epoch / the same loop with channels apart", found["ours"] / found["usual"], "< 1")


def main(rounds: int) -> None:
    quick = find_recipe("quick", "pacs")
    steps = Preprocess(144, 128, (0.5,) * 3, (0.5,) * 3)
    compare(
        "ResNet-18, 128 pixels",
        network(),
        sources_of(128, steps, 144, 7),
        Recipe(**quick.settings() | {"epochs": 1}),
        rounds,
    )
    small = find_recipe("quick", "digits")
    compare(
        "digits network",
        digits.digits_network(),
        sources_of(2048, digits.PREPROCESS, 28, 10),
        Recipe(**small.settings() | {"epochs": 1}),
        rounds,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="the fastest of so many counts")
    main(parser.parse_args().rounds)

"""Training steps with other norms beside those with BatchNorm: layer by layer and as a network, as ratios in one run.

A layer's step is its forward and backward pass. Channels lie apart in memory, as torch has them, or side by side, as
the trainer has them, where BatchNorm is two to three times as fast.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from core import fastest, network, show
from fewshift.core.labels import IMAGES
from fewshift.core.normalisation import InstanceBatchNorm, InstanceNorm, IterNormLayer, SwitchableWhiteningLayer
from fewshift.lab.training import ISW, algorithm_of
from fewshift.lab.training.algorithm import Batch, Task

APART, TOGETHER = torch.contiguous_format, torch.channels_last
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "switchable whitening by 16": SwitchableWhiteningLayer,
    "IterNorm by 64": IterNormLayer,
    "IterNorm by 16": lambda channels: IterNormLayer(channels, 16),
    "instance norm": InstanceNorm,
    "IBN": InstanceBatchNorm,
}
ALGORITHMS = {
    "switchable-whitening": {},
    "iternorm": {},
    "ibn": {"variant": "a"},
    "isw": {},  # its instance norms; the loss is shown by itself
}


def layer_step(layer: nn.Module, shape: tuple[int, ...], layout: torch.memory_format) -> Callable[[], None]:
    images, gradient = (torch.randn(shape).contiguous(memory_format=layout) for _ in range(2))
    images.requires_grad_()

    def step() -> None:
        images.grad = None
        layer(images).backward(gradient)

    return step


def layers(rounds: int, shape: tuple[int, ...], layout: torch.memory_format) -> None:
    steps = {name: layer_step(make(shape[1]), shape, layout) for name, make in LAYERS.items()}
    found = fastest(rounds, bn=layer_step(nn.BatchNorm2d(shape[1]), shape, layout), **steps)
    where = f"{'x'.join(map(str, shape))}, {'apart' if layout == APART else 'side by side'}"
    for name in LAYERS:
        show(f"{name} / BatchNorm ({where})", found[name] / found["bn"], "<= 3")


def network_step(model: nn.Module) -> Callable[[], None]:
    model = model.train().to(memory_format=TOGETHER)
    images, labels = torch.randn(8, 3, 128, 128).contiguous(memory_format=TOGETHER), torch.arange(8) % 7

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()

    return step


def loss_step(model: nn.Module) -> Callable[[], None]:
    algorithm = ISW()
    task = Task(tuple("abcdefg"), ("noise",), IMAGES, "fc", shape=(3, 128, 128))
    learner = algorithm.trainee(algorithm.modify(model), task).to(memory_format=TOGETHER)
    for mask in learner.masks:
        mask.copy_(torch.rand(mask.shape).triu(1) > 0.9)
    images = torch.randn(8, 3, 128, 128).contiguous(memory_format=TOGETHER)
    batch = Batch((images,), torch.arange(8) % 7, torch.zeros(8))
    learner.before_epoch(algorithm.plain_epochs)

    def step() -> None:
        learner.zero_grad()
        learner.loss(batch)[0].backward()

    return step


def networks(rounds: int) -> None:
    plain = network("resnet18")
    steps = {
        name: network_step(algorithm_of(name, settings).modify(copy.deepcopy(plain)))
        for name, settings in ALGORITHMS.items()
    }
    steps["isw and its loss"] = loss_step(copy.deepcopy(plain))
    found = fastest(rounds, plain=network_step(copy.deepcopy(plain)), **steps)
    for name in steps:
        show(f"a training step of ResNet-18 with {name} / without", found[name] / found["plain"], "<= 1.25")


def main(rounds: int) -> None:
    torch.manual_seed(0)
    for layout in (APART, TOGETHER):
        for shape in ((8, 64, 64, 64), (8, 256, 32, 32)):
            layers(5 * rounds, shape, layout)
    networks(rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="the fastest of so many counts; of layers, five times so many"
    )
    main(parser.parse_args().rounds)

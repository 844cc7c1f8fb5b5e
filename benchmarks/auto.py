"""What `auto` is made of beside the same steps in plain PyTorch, and the whole of `adapt`: ratios of one run."""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fewshift
from core import fastest, forward, network, show, support
from fewshift import METHODS, Network, Target

GRID = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
FOLDS, EPOCHS, BATCH, RATE = 3, 8, 16, 2e-3
LAST = ("layer4", "fc")
GOALS = {"resnet18": 75, "resnet50": 180}  # seconds on two otherwise idle cores


@contextmanager
def blending(model: nn.Module, v: float) -> Iterator[None]:
    """Each image is normalised with v of the others' statistics: the hook anyone would write."""

    def hook(layer: nn.BatchNorm2d, args: tuple[Tensor]) -> Tensor:
        inputs = args[0]
        count = len(inputs)
        mean, square = inputs.mean((2, 3)), inputs.square().mean((2, 3))
        others = (mean.sum(0) - mean) / (count - 1)
        var = (square.sum(0) - square) / (count - 1) - others.square()
        source = (layer.running_var + layer.eps).sqrt()
        own_mean = (1 - v) * layer.running_mean + v * others
        own_std = (1 - v) * source + v * (var.clamp(min=0) + layer.eps).sqrt()
        shaped = (inputs - own_mean[..., None, None]) / own_std[..., None, None]
        return shaped * source[None, :, None, None] + layer.running_mean[None, :, None, None]

    hooks = [layer.register_forward_pre_hook(hook) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    yield
    for handle in hooks:
        handle.remove()


@torch.no_grad()
def search(model: nn.Module, images: Tensor) -> None:
    """Eight blends and one more pass."""
    for v in (*GRID, GRID[-1]):
        with blending(model, v):
            model(images)


def plain_blend(model: nn.Module, labelled) -> Callable[[], None]:
    ours = copy.deepcopy(model).to(memory_format=torch.channels_last)
    images = labelled.images.contiguous(memory_format=torch.channels_last)
    return lambda: search(ours, images)


def plain_all(model: nn.Module, labelled) -> Callable[[], None]:
    def loop() -> None:
        start = copy.deepcopy(model).eval().requires_grad_(False).to(memory_format=torch.channels_last)
        images = labelled.images.contiguous(memory_format=torch.channels_last)
        search(start, images)
        for fold in range(FOLDS):
            kept = torch.arange(len(images)) % FOLDS != fold
            ours, pictures, labels = copy.deepcopy(start), images[kept], labelled.labels[kept]
            with torch.no_grad(), blending(ours, 0.2):
                ours(pictures)
            weights = [w.requires_grad_(True) for name, w in ours.named_parameters() if name.startswith(LAST)]
            optimizer = torch.optim.SGD(weights, lr=RATE, momentum=0.9)
            for _ in range(EPOCHS):
                for indices in torch.randperm(len(pictures)).split(BATCH):
                    optimizer.zero_grad()
                    F.cross_entropy(ours(pictures[indices]), labels[indices]).backward()
                    nn.utils.clip_grad_norm_(weights, 5.0)
                    optimizer.step()
            with torch.no_grad():
                ours(pictures)  # the features that the head is trained on

    return loop


def on_all_cores(name: str) -> float:
    """Seconds of `adapt` with 35 images of 224 px."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    began = time.perf_counter()
    fewshift.adapt(network(name), support())
    torch.set_num_threads(threads)
    return time.perf_counter() - began


def main(rounds: int) -> None:
    model, labelled = network(), support()
    view = Network.of(model, labelled.images)
    seconds = fastest(
        rounds,
        forward=lambda: forward(model, labelled.images),
        blend=lambda: METHODS["blend"]().adapt(view, Target(labelled)),
        plain_blend=plain_blend(model, labelled),
        head=lambda: METHODS["blend-head"]().adapt(view, Target(labelled)),
        all=lambda: METHODS["blend-all"]().adapt(view, Target(labelled)),
        plain_all=plain_all(model, labelled),
        adapt=lambda: fewshift.adapt(model, labelled),
    )
    show("blend / the same passes in plain PyTorch", seconds["blend"] / seconds["plain_blend"], "<= 1.20")
    show("blend + head / the same passes in plain PyTorch", seconds["head"] / seconds["plain_blend"], "<= 1.20")
    show("blend + all / the same steps in plain PyTorch", seconds["all"] / seconds["plain_all"], "<= 1.20")
    show("adapt, evidence included / one fit (blend + all)", seconds["adapt"] / seconds["all"], "<= 2.50")
    show("adapt, evidence included / one forward pass of the support", seconds["adapt"] / seconds["forward"], "<= 70")
    for name, goal in GOALS.items():
        show(
            f"adapt, evidence included, {name} on {os.cpu_count()} cores, in seconds", on_all_cores(name), f"<= {goal}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args().rounds)

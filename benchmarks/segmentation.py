"""Adapting a street-scene network against training its BatchNorm parameters: memory and time, as ratios.

DeepLabV3+ with a ResNet-50, five images of 512x512 pixels, 19 classes. For memory, each side runs in a process of
its own and reports its peak; for time, they take turns in one process. Random weights cost as much as trained ones.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from core import fastest, show
from fewshift import LCCS, Network, Support, Target
from fewshift.core.losses import cross_entropy
from fewshift.core.reading import tied
from fewshift.methods.lccs import Start

CLASSES, IMAGES, SIZE = 19, 5, 512
ROUNDS = 3


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        SIDES[sys.argv[1]]()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    peaks = {side: alone(side) for side in SIDES}
    show("peak memory of LCCS / of training BatchNorm at batch 1", peaks["lccs"] / peaks["training"], "<= 1.15")
    seconds = fastest(ROUNDS, lccs=epoch_of_lccs(network(), scenes()), training=epoch_of_training(network(), scenes()))
    show("an epoch of LCCS / of training BatchNorm at batch 1", seconds["lccs"] / seconds["training"], "<= 1.10")


def alone(side: str) -> int:
    """The peak memory of one side in a fresh process."""
    done = subprocess.run([sys.executable, __file__, side], check=True, capture_output=True, text=True)
    return int(done.stdout)


def network() -> nn.Module:
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    model: nn.Module = smp.DeepLabV3Plus("resnet50", encoder_weights=None, classes=CLASSES)
    return model.eval()


def scenes() -> Support:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator)
    return Support(images, torch.randint(0, CLASSES, (IMAGES, SIZE, SIZE), generator=generator))


def one_epoch() -> None:
    epoch_of_training(network(), scenes())()


def epoch_of_lccs(model: nn.Module, support: Support) -> Callable[[], object]:
    """One gradient epoch, everything before it done."""
    method = LCCS(epochs=1)
    _, view, support = method._prepare(Network.of(model, support.pictures[:1]), support)
    start = Start(tied(view, 0.5))
    spans = method._span(view, support, start)
    return lambda: method._learn(view, spans, support, start.blend, cross_entropy, 0)


def epoch_of_training(model: nn.Module, support: Support) -> Callable[[], object]:
    """A plain loop over BatchNorm's weight and bias, in its fastest memory layout."""
    model = model.to(memory_format=torch.channels_last).requires_grad_(False)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    tensors = [tensor.requires_grad_(True) for layer in layers for tensor in (layer.weight, layer.bias)]
    optimizer = torch.optim.Adam(tensors, lr=1e-3)
    images, labels = support.pictures.contiguous(memory_format=torch.channels_last), support.targets

    def epoch() -> None:
        for index in range(IMAGES):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(images[index : index + 1]), labels[index : index + 1]).backward()
            optimizer.step()

    return epoch


SIDES: dict[str, Callable[[], object]] = {
    "lccs": lambda: LCCS(epochs=2).fit(network(), Target(scenes())),  # all of it: search, spanning vectors, steps
    "training": one_epoch,
}

if __name__ == "__main__":
    main()

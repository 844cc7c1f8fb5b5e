"""How often a wrong mean and deviation is noticed before adaptation, and how often the right one is taken for wrong.

The digits need no data. With --data-root and --weights the same is done for pacs-<target>.safetensors in that folder,
and for resnet18-imagenet.safetensors, whose labels are not asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fewshift
from fewshift.core.draws import draw_support
from fewshift.core.network import Network
from fewshift.images.inputs import as_support
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.lab.datasets import digits
from fewshift.models.cards import known_card
from fewshift.trust.at_home import LOOKED_AT, find_homes

SHOTS = 5
TARGETS = ("art_painting", "cartoon", "photo", "sketch")
PIXELS = Preprocess(256, 224, (0.0,) * 3, (1.0,) * 3)


def scales(channels: int) -> dict[str, Preprocess]:
    """The scales that are tried, by name."""
    numbers = {"-1 to 1": (0.5, 0.5), "0 to 1": (0.0, 1.0), "127, 58": (127.0, 58.0), "MNIST's": (0.1307, 0.3081)}
    found = {
        name: Preprocess(None, None, (mean,) * channels, (std,) * channels) for name, (mean, std) in numbers.items()
    }
    return found | ({"ImageNet's": Preprocess(None, None, IMAGENET.mean, IMAGENET.std)} if channels == 3 else {})


def show(name: str, network: nn.Module, pixels: Tensor, labels: Tensor, draws: int, *, asked: bool = True) -> None:
    view, counts = Network.of(network, pixels[:2]), {}
    for scale, steps in scales(pixels.shape[1]).items():
        counts[scale] = 0
        for seed in range(draws):
            drawn = draw_support(labels, SHOTS, seed)
            drawn = drawn[torch.linspace(0, len(drawn) - 1, min(LOOKED_AT, len(drawn))).round().long()]
            images = list(steps.normalise(pixels[drawn]))
            counts[scale] += find_homes(view, images, steps, None, labels[drawn] if asked else None) is not None
    print(f"{name:32} noticed of {draws}   " + "   ".join(f"{key}: {n}" for key, n in counts.items()), flush=True)


def of_pacs(data_root: Path, target: str, steps: Preprocess, classes: tuple[str, ...] | None) -> tuple[Tensor, Tensor]:
    """20 images per class in [0, 1], and their labels."""
    pool = as_support(data_root / "pacs" / target, steps, None, classes, shots=20, seed=1234)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (steps.mean, steps.std))
    return torch.as_tensor(pool.images) * std + mean, pool.targets


def imagenet(weights: Mapping[str, Tensor]) -> nn.Module:
    """A ResNet-18 of ImageNet; its head is untrained."""
    network: nn.Module = timm.create_model("resnet18", num_classes=7)
    network.load_state_dict(dict(weights), strict=False)
    return network.eval()


def main(data_root: Path | None, weights: Path | None, targets: Sequence[str], draws: int) -> None:
    if not (data_root and weights):
        for source, place in (("mnist", "uci"), ("uci", "mnist")):
            images, labels = digits.PLACES[place].read()
            pool = draw_support(labels, 50, 99)
            show(f"digits, {source} to {place}", digits.source_network(source), images[pool], labels[pool], draws)
        return
    for target in targets:
        network = fewshift.load(weights=weights / f"pacs-{target}.safetensors")
        card = known_card(network)
        assert card.preprocess is not None
        show(f"pacs, {target}", network, *of_pacs(data_root, target, card.preprocess, card.classes), draws)
    network = imagenet(load_file(weights / "resnet18-imagenet.safetensors"))
    for target in targets:
        show(f"resnet18, {target}", network, *of_pacs(data_root, target, PIXELS, None), draws, asked=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--draws", type=int, default=10)
    options = parser.parse_args()
    main(options.data_root, options.weights, options.targets, options.draws)

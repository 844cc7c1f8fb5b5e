"""Would bfloat16 do for passes that only judge? Agreement with float32, and time, on crops of two photographs.

A third of the labels is drawn at random, the others are the network's own: a network that is right most of the time.
`--model timm:NAME --weights FILE` takes a trained network; without it, a ResNet-18 with random weights gives the time.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import fewshift
from core import fastest, network, show
from fewshift.core.losses import log_losses

IMAGES, SIZE = 70, 224


def crops() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    photographs = [torch.tensor(photograph).permute(2, 0, 1) / 255 for photograph in load_sample_images().images]
    pictures = []
    for index in range(IMAGES):
        photograph = photographs[index % 2]
        top, left = (int(torch.randint(side - SIZE, (), generator=generator)) for side in photograph.shape[1:])
        pictures.append(photograph[:, top : top + SIZE, left : left + SIZE])
    return (torch.stack(pictures) - 0.45) / 0.225


@torch.no_grad()
def main(name: str | None, weights: str | None, rounds: int) -> None:
    torch.set_num_threads(1)
    model: nn.Module = network() if name is None else fewshift.load(name, weights=weights)
    model = model.eval().to(memory_format=torch.channels_last)
    narrow = copy.deepcopy(model).bfloat16()
    images = crops().contiguous(memory_format=torch.channels_last)
    one, other = model(images), narrow(images.bfloat16()).float()
    generator = torch.Generator().manual_seed(0)
    labels = one.argmax(1)
    wrong = torch.rand(IMAGES, generator=generator) < 1 / 3
    labels = torch.where(wrong, torch.randint(one.shape[1], (IMAGES,), generator=generator), labels)
    change = (log_losses(other, labels) - log_losses(one, labels)).abs()
    some, narrow_some = images[:35], images[:35].bfloat16()
    seconds = fastest(rounds, wide=lambda: model(some), narrow=lambda: narrow(narrow_some))
    show(
        "bfloat16: share of images with the same prediction",
        float((one.argmax(1) == other.argmax(1)).double().mean()),
        "1",
    )
    show("bfloat16: largest change of an image's tempered loss, in nats", float(change.max()), "-")
    show("bfloat16: time of a forward pass / in float32", seconds["narrow"] / seconds["wide"], "-")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--rounds", type=int, default=3)
    main(**{"name" if key == "model" else key: value for key, value in vars(parser.parse_args()).items()})

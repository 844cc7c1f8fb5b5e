"""Small source images, networks with stages, and trainings that take a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet

from fewshift import LCCS, Preprocess, Target
from fewshift.core.labels import IMAGES
from fewshift.core.randomness import private_randomness
from fewshift.core.support import Support
from fewshift.images.scenes import Encoding, Scenes
from fewshift.lab.datasets import digits
from fewshift.lab.training import ERM
from fewshift.lab.training.algorithm import Batch, Task
from fewshift.lab.training.checkpoint import Checkpoint
from fewshift.lab.training.gather import Sources
from fewshift.lab.training.recipes import Recipe
from fewshift.lab.training.samples import Joined, Pool
from fewshift.lab.training.trainer import Trained, train
from tests.helpers.networks import make_tiny, unsettle

STEPS = Preprocess(8, 8, (0.5,) * 3, (0.25,) * 3)
RECIPE = Recipe(epochs=3, lr=0.05, batch_size=8, nesterov=True, schedule="one-cycle", augment="crop")
ROOM = 2**20


class Listed:
    """Samples that are tensors already."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def pictures(count: int, seed: int, size: int = 10, classes: int = 3) -> Listed:
    """Bytes in which each class has a channel that is brighter."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    images = torch.randint(0, 160, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    images[torch.arange(count), labels] += 90
    return Listed(images, labels)


def make_sources(counts: tuple[int, ...] = (24, 20), held_out: int = 12, room: int = ROOM) -> Sources:
    train_images = Joined([pictures(count, seed) for seed, count in enumerate(counts)])
    return Sources(
        names=tuple(f"place{index}" for index in range(len(counts))),
        classes=("red", "green", "blue"),
        preprocess=STEPS,
        train=Pool(train_images, room),
        domains=train_images.domains,
        validation=Pool(Joined([pictures(held_out, 9, size=8)]), room) if held_out else None,
    )


def make_checkpoint(folder: Path, **facts: object) -> Checkpoint:
    known = {"classes": ["red", "green", "blue"], **STEPS.to_json(), "recipe": RECIPE.settings(), **facts}
    return Checkpoint(folder / "w.safetensors", known, ("recipe", *facts))


def run_plain(recipe: Recipe = RECIPE, seed: int = 0, **options) -> Trained:
    options = {"sources": make_sources(), "algorithm": ERM()} | options
    return train(make_tiny(), recipe=recipe, seed=seed, **options)


class StoppedError(Exception):
    """Stands for a kill."""


def stop_in_epoch(number: int):
    def hear(standing) -> None:
        if standing.moment.epoch == number:
            raise StoppedError

    return hear


class Staged(nn.Module):
    """Four stages, as a ResNet names them."""

    def __init__(self, classes: int = 3, width: int = 6) -> None:
        super().__init__()
        for number in range(1, 5):
            conv = nn.Conv2d(3 if number == 1 else width, width, 3, padding=1, stride=2 if number == 3 else 1)
            self.add_module(f"layer{number}", nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU()))
        self.fc = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        for number in range(1, 5):
            images = self.get_submodule(f"layer{number}")(images)
        return self.fc(images.mean((2, 3)))


def make_staged(**kwargs: int) -> nn.Module:
    with private_randomness(0):
        return unsettle(Staged(**kwargs))


class Small(nn.Module):
    """A stem and four stages, as ResNets have them, of a library's own blocks."""

    def __init__(self, block: type[nn.Module] = torchvision_resnet.BasicBlock, stem: str = "bn1") -> None:
        super().__init__()
        planes = 8 // block.expansion
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.add_module(stem, nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)
        for stage in range(1, 5):
            self.add_module(f"layer{stage}", nn.Sequential(*(block(8, planes) for _ in range(1 + stage % 2))))
        self.fc = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.get_submodule("bn1")(self.conv1(images)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            hidden = stage(hidden)
        return self.fc(hidden.mean((2, 3)))


def make_small(block: type[nn.Module] = torchvision_resnet.BasicBlock, seed: int = 0) -> nn.Module:
    with private_randomness(seed):
        return unsettle(Small(block), seed)


def make_task(domains: int = 2, shape: tuple[int, ...] = (3, 8, 8)) -> Task:
    return Task(tuple("abc"), tuple(f"place{number}" for number in range(domains)), IMAGES, "fc", shape=shape)


def make_batch(domains: list[int], seed: int = 0, views: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = tuple(torch.randn(len(domains), 3, 8, 8, generator=generator) for _ in range(views))
    return Batch(images, torch.arange(len(domains)) % 3, torch.tensor(domains))


def digit_sources(*places: str, each: int = 128) -> Sources:
    """The first digits of each place, in the trainer's form."""
    parts = [Listed(*(tensor[:each] for tensor in digits.split(place)[0])) for place in places]
    joined = Joined(parts)
    classes = tuple("0123456789")
    return Sources(places, classes, digits.PREPROCESS, Pool(joined, 2**26), joined.domains, None)


def other_digits(shots: int = 1) -> Support:
    """White paper, black ink: so many of each digit of UCI that no training has seen."""
    images, labels = digits.split("uci")[1]
    chosen = torch.cat([(labels == digit).nonzero().flatten()[:shots] for digit in range(10)])
    return Support(digits.normalise(1 - images[chosen]), labels[chosen])


def adapts(model: nn.Module) -> nn.Module:
    """LCCS runs, gives the same kind of network, and moves its answers."""
    support = other_digits()
    adapted = LCCS().adapt(model, Target(support=support))
    assert adapted.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        answers = adapted(support.pictures)
        assert torch.isfinite(answers).all()
        assert not torch.allclose(answers, model(support.pictures))
    return adapted


def make_scenes(folder: Path, sizes: list[tuple[int, int]]) -> Scenes:
    """Street below, sky above; the last rows are not labelled."""
    files, label_files = [], []
    for index, (height, width) in enumerate(sizes):
        labels = np.zeros((height, width), dtype=np.uint8)
        labels[height // 2 :] = 1
        image = np.where(labels[..., None] == 1, (60, 70, 60), (120, 160, 220)).astype(np.uint8)
        labels[-2:] = 255
        for kind, values, those in (("image", image, files), ("label", labels, label_files)):
            those.append(folder / f"{kind}{index}.png")
            Image.fromarray(values).save(those[-1])
    steps = Preprocess(None, None, (0.5,) * 3, (0.25,) * 3)
    return Scenes(tuple(files), tuple(label_files), ("sky", "street"), steps, Encoding.index(2), ((0,) * 3, (9,) * 3))

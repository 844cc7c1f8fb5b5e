"""Networks that label every pixel, scenes to label, and the plain forward pass to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fewshift import Preprocess

CLASSES = ("grass", "water", "stone")
COLOURS = np.array([[90, 200, 80], [60, 90, 210], [190, 180, 170]])
STEPS = Preprocess(None, None, (0.5,) * 3, (0.25,) * 3)
Array = np.ndarray[Any, Any]


class Labeller(nn.Module):
    """Takes a pixel for the class whose colour it resembles, after BatchNorm with the source's statistics."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.head = nn.Conv2d(3, num_classes, 1)
        colours = torch.tensor((COLOURS / 255 - 0.5) / 0.25, dtype=torch.float32)
        with torch.no_grad():
            self.stem.weight.copy_(torch.eye(3)[:, :, None, None])
            self.bn.running_mean.copy_(colours.mean(0))
            self.bn.running_var.copy_(colours.var(0, correction=0))
            prototypes = (colours - colours.mean(0)) / colours.std(0, correction=0)
            self.head.weight.copy_(prototypes[torch.arange(num_classes) % 3, :, None, None])
            self.head.bias.copy_(-prototypes[torch.arange(num_classes) % 3].square().sum(1) / 2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(self.bn(self.stem(images)))}


class Coarse(nn.Module):
    """Answers at a quarter of the size."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.head = nn.Conv2d(3, num_classes, 4, 4, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.bn(images))


def labeller(num_classes: int = 3) -> nn.Module:
    return Labeller(num_classes).eval()


def coarse(num_classes: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Coarse(num_classes).eval()


def paint(root: Path, count: int, seed: int, size: tuple[int, int] = (20, 28)) -> Path:
    """Scenes at dusk, darker and bluer than the source: three patches each, and a strip without labels."""
    generator = np.random.default_rng(seed)
    for name in ("images", "labels"):
        (root / name).mkdir(parents=True)
    for index in range(count):
        labels = np.full(size, index % 3, np.uint8)
        labels[:, size[1] // 2 :] = (index + 1) % 3
        labels[size[0] // 2 :, : size[1] // 3] = (index + 2) % 3
        pixels = COLOURS[labels] * [0.5, 0.55, 0.8] + [0, 5, 40] + generator.normal(0, 12, (*size, 3))
        labels[:2] = 255
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / "images" / f"{index}.png")
        Image.fromarray(labels).save(root / "labels" / f"{index}.png")
    return root


def read(file: Path) -> Array:
    with Image.open(file) as image:
        return np.array(image)


def forward(model: nn.Module, file: Path) -> Array:
    """The plain forward pass on the plain image: a class for each pixel."""
    image = torch.from_numpy(read(file).astype(np.float32) / 255).permute(2, 0, 1)
    with torch.no_grad():
        return model(((image - 0.5) / 0.25)[None])["out"].argmax(1)[0].numpy()


def naive_ious(truth: Array, labels: Array, classes: int = 3) -> list[float]:
    """The IoU of each class in percent, NaN where it neither occurs nor is predicted."""
    known = truth != 255
    both = [((truth == label) & (labels == label) & known).sum() for label in range(classes)]
    either = [(((truth == label) | (labels == label)) & known).sum() for label in range(classes)]
    return [100 * hits / total if total else float("nan") for hits, total in zip(both, either, strict=True)]


def snapshot(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder, with its bytes."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}

"""Images per second of `fewshift.predict` over those of a plain PyTorch DataLoader loop, measured in one run.

Both read the same JPEGs with as many processes, resize and normalise them alike, and write a CSV. The loop is what
somebody would write by hand: a Dataset with torchvision's transforms, a DataLoader, a network, `csv.writer`. "table" is
the CSV of `predict`, "parts" the same rows as Parquet. Processor time, that of all processes together, is there too: on
a busy machine it says more.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

import fewshift
from core import show

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 10
BATCH = 32
JPEG = (320, 240)  # pixels
CASES = {"resnet18, 224 px": (256, 224, 96), "small network, 64 px": (72, 64, 1000)}  # resize, crop, images
WORKERS = (0, 1, 2)
GOAL = 0.9


def small() -> nn.Module:
    """So little work that reading and writing decide."""
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES)).eval()


def photographs(folder: Path, count: int) -> Path:
    """JPEGs with some detail: smooth colours and noise."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for index in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(JPEG)
        noise = generator.normal(0, 12, (JPEG[1], JPEG[0], 3))
        Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).save(
            folder / f"{index:05}.jpg", quality=90
        )
    return folder


class Photographs(Dataset[Tensor]):
    """What a user would write."""

    def __init__(self, files: list[Path], resize: int, crop: int) -> None:
        self.files = files
        steps = [v2.Resize(resize), v2.CenterCrop(crop), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        self.steps = v2.Compose([*steps, v2.Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.steps(Image.open(self.files[index]).convert("RGB"))


def by_hand(network: nn.Module, folder: Path, resize: int, crop: int, workers: int, out: Path) -> None:
    files = sorted(folder.glob("*.jpg"))
    loader = DataLoader(Photographs(files, resize, crop), batch_size=BATCH, num_workers=workers)
    names = iter(files)
    with out.open("w", newline="") as table, torch.no_grad():
        writer = csv.writer(table)
        writer.writerow(["file", "class", "probability"])
        for images in loader:
            values, places = network(images).softmax(1).max(1)
            for value, place in zip(values.tolist(), places.tolist(), strict=True):
                writer.writerow([next(names), place, round(value, 6)])


def measure(name: str, rounds: int, workers: int, parts: bool, scratch: Path) -> None:
    resize, crop, count = CASES[name]
    torch.manual_seed(0)
    network = small() if "small" in name else torchvision.models.resnet18(num_classes=CLASSES).eval()
    steps = fewshift.Preprocess(resize, crop, MEAN, STD)
    folder = scratch / f"{count} images"
    if not folder.exists():
        photographs(folder, count)

    def ours(out: Path) -> Callable[[], object]:
        return lambda: fewshift.predict(
            network, folder, preprocess=steps, out=out, overwrite=True, batch_size=BATCH, workers=workers
        )

    works: dict[str, Callable[[], object]] = {
        "loop": lambda: by_hand(network, folder, resize, crop, workers, scratch / "hand.csv"),
        "table": ours(scratch / "ours.csv"),
    }
    if parts:
        works["parts"] = ours(scratch / "parts")
    for unit, seconds in shortest(rounds, works).items():
        for kind in [kind for kind in works if kind != "loop"]:
            what = f"{name}, workers={workers}: images per {unit}, {kind} / loop"
            show(what, seconds["loop"] / seconds[kind], f">= {GOAL}")


def shortest(rounds: int, works: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Seconds and processor seconds of each piece of work, the least of interleaved rounds."""
    times: dict[str, dict[str, list[float]]] = {"second": {}, "processor second": {}}
    for _ in range(rounds):
        for name, work in works.items():
            began, before = time.perf_counter(), sum(os.times()[:4])
            work()
            times["second"].setdefault(name, []).append(time.perf_counter() - began)
            times["processor second"].setdefault(name, []).append(sum(os.times()[:4]) - before)
    return {unit: {name: min(values) for name, values in rows.items()} for unit, rows in times.items()}


def main(rounds: int, parts: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name in CASES:
            for workers in WORKERS:
                measure(name, rounds, workers, parts, Path(scratch))


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="the fastest of so many counts")
    parser.add_argument("--no-parts", action="store_true", help="leave out the Parquet parts, which need pyarrow")
    arguments = parser.parse_args()
    main(arguments.rounds, not arguments.no_parts)

"""Places of tiny pictures, and networks and steps that end their process or cannot travel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fewshift import METHODS, Fleet, Preprocess
from fewshift.report.fleet import VERDICTS, PlaceGain, PlaceRow
from tests.helpers.networks import make_tiny
from tests.helpers.pictures import save

CLASSES = ("ant", "bee", "cat")
STEPS = Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
DEADLY = (13, 8)  # the size of a picture that ends whoever reads it


def fill(folder: Path, seed: int, classes: tuple[str, ...] = CLASSES, shots: int = 4) -> Path:
    """A place: pictures of a colour for each class."""
    generator = np.random.default_rng(seed)
    for name in classes:
        for index in range(shots):
            pixels = generator.integers(0, 120, (8, 8, 3))
            pixels[:, :, CLASSES.index(name)] += 120
            save(folder / name / f"{index}.png", pixels)
    return folder


def fleet_of(count: int) -> Fleet:
    """A fleet with every verdict, a long note, and places of long names."""
    failed = PlaceRow("roof", "failed", note=f"{'/a/long/path' * 8}/1.png is not an image: replace or remove it")
    rows = [
        PlaceRow(
            f"camera-{index}-at-the-northern-gate", VERDICTS[1 + index % 3], 30,
            PlaceGain(index, index - 9.5, index + 9.5),
            1.5, False, "deploy, and watch bee", Path("sites/x.safetensors"), True, 2.0,
        )
        for index in range(count)
    ]  # fmt: skip
    ordered = sorted([failed, *rows], key=PlaceRow.urgency)
    return Fleet(tuple(ordered), Path("sites"), Path("places"), "timm:resnet18", METHODS["auto"](), 0, 61.0)


class DeadlySteps:
    """Preprocessing that ends its process at one picture, and writes a line whenever it arrives in a process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, picture: Image.Image) -> Tensor:
        if picture.size == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return STEPS(picture)

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.file = state["file"]
        with self.file.open("a") as lines:
            lines.write(f"{os.getpid()}\n")


class Once:
    """Ends a process other than the one that made it, once: as long as a file is there."""

    def __init__(self, trap: Path) -> None:
        self.trap, self.home = trap, os.getpid()
        trap.touch()

    def __call__(self) -> None:
        if os.getpid() != self.home and self.trap.exists():
            self.trap.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class OnceDeadly(nn.Module):
    """A network that ends the process of its first worker, in the middle of the work."""

    def __init__(self, trap: Path, after: int) -> None:
        super().__init__()
        self.inner, self.once, self.after = make_tiny(), Once(trap), after
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.after:
            self.once()
        return self.inner(images)


class OnceDeadlySteps:
    """Preprocessing that ends the process that first reads a picture of one colour."""

    def __init__(self, trap: Path) -> None:
        self.once = Once(trap)

    def __call__(self, picture: Image.Image) -> Tensor:
        if picture.getpixel((0, 0)) == (1, 2, 3):
            self.once()
        return STEPS(picture)

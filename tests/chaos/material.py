"""Digits on disk, small enough that every command takes seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from fewshift.lab.datasets import digits

NETWORK = ["--model", "digits", "--weights", str(digits.WEIGHTS), "--threads", "1"]
PLACES, SHOTS, MANY = 3, 3, 240
GRID = """title = "Chaos"
dataset = "digits"
source = "mnist"
targets = ["uci"]
seeds = [0, 1]
max_test = 200

[[rows]]
method = "source"
label = "Source"

[[rows]]
method = "adabn"
label = "AdaBN"
shots = [1, 5]

[[rows]]
method = "lccs"
label = "LCCS"
shots = [1]
"""


def write_material(home: Path) -> None:
    """photos/CLASS/ to learn from, places/NAME/CLASS/, flat/digit-CLASS-*.png to label, many/ to predict."""
    images, labels = digits.uci()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    for place in range(PLACES + 1):
        root = home / "photos" if place == PLACES else home / "places" / f"camera-{place}"
        for label in range(digits.OUTPUTS):
            of_class = [at for at in order if int(labels[at]) == label]
            for at in of_class[place * SHOTS : (place + 1) * SHOTS]:
                _save(images[at, 0], root / str(label) / f"{at}.png")
    for label in range(digits.OUTPUTS):
        for at in [at for at in order if int(labels[at]) == label][-SHOTS:]:
            _save(images[at, 0], home / "flat" / f"digit-{label}-{at}.png")
    for at in order[-MANY:]:
        _save(images[at, 0], home / "many" / f"{at:04}.png")
    (home / "grid.toml").write_text(GRID, encoding="utf-8")


def _save(image: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 255).byte().numpy()).save(path)

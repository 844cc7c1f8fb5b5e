"""Files of a tiny network and its images, and commands that run where its factory is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.helpers.commands import CLASSES, small_network


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Weights, a support folder and images to predict."""
    save_file(small_network().state_dict(), tmp_path / "w.safetensors")
    generator = torch.Generator().manual_seed(0)
    for label, name in enumerate(CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(6):
            pixels = torch.randint(0, 120, (16, 16, 3), generator=generator)
            pixels[:, :, label] += 120
            Image.fromarray(pixels.byte().numpy()).save(tmp_path / "photos" / name / f"{index}.png")
    return tmp_path


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., object]) -> Callable[..., object]:
    """Run a command in this process through the real entry point."""
    monkeypatch.chdir(Path(__file__).parents[2])
    return command

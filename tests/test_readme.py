"""The Python of the README runs as it stands, on files of the names that it uses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models._registry import _model_entrypoints
from torch import nn

from tests.helpers.networks import make_tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SIDE = 8  # pixels
CLASSES = 3
IMAGES = 2


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights of the README's architecture, made small under its own name, and the images it names."""
    monkeypatch.chdir(tmp_path)
    named = re.search(r'timm:(\w+)|create_model\("(\w+)"', README)
    count = re.search(r"num_classes=(\d+)", "".join(BLOCKS))
    assert named, "the README names no timm architecture"
    classes = int(count[1]) if count else CLASSES
    architecture = named[1] or named[2]
    monkeypatch.setitem(_model_entrypoints, architecture, small)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(architecture, num_classes=classes)
    save_file(model.state_dict(), "w.safetensors")
    names = [f"class-{number}" for number in range(classes)]
    steps = {"resize": SIDE, "crop": SIDE, "mean": [0.5] * 3, "std": [0.25] * 3}
    Path("w.json").write_text(json.dumps({"classes": names, **steps}))
    generator = torch.Generator().manual_seed(0)
    for folder in ("photos", "labelled"):
        for name in names:
            paint(tmp_path / folder / name, generator)
    for folder in ("images", "stream"):
        paint(tmp_path / folder, generator)
    return tmp_path


def small(pretrained: bool = False, num_classes: int = CLASSES, **_: Any) -> nn.Module:
    """Two layers in the place of the architecture."""
    assert not pretrained
    return make_tiny(num_classes)


def paint(folder: Path, generator: torch.Generator) -> None:
    """Pictures of noise, each another."""
    folder.mkdir(parents=True)
    for number in range(IMAGES):
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=generator).byte()
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")


def test_the_python_of_the_readme_runs(files: Path) -> None:
    assert BLOCKS
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    written = {path.name for path in files.iterdir()}
    assert set(re.findall(r'\.(?:save|report)\("([^"]+)"\)', "".join(BLOCKS))) <= written

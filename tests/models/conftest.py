"""A tiny network on disk, and an empty folder to import from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A tiny seven-class network whose every tensor differs from a fresh one's."""
    model: nn.Module = timm.create_model("test_resnet", num_classes=7).eval()
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.add_(number + 1 if tensor.dtype == torch.int64 else 0.01)
    return model


@pytest.fixture
def weights(tmp_path: Path, network: nn.Module) -> Path:
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]

"""A tiny network that the command line can open, and the options that open it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tests.helpers.networks import make_tiny

CLASSES = ["ant", "bee", "cat"]
FACTORY = "tests.helpers.commands:small_network"
SIZES = ["--crop", "16", "--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"]


def small_network(num_classes: int = 3) -> nn.Module:
    return make_tiny(num_classes)


def network_options(place: Path) -> list[object]:
    """The network whose weights the fixture `place` has written."""
    return ["--model", FACTORY, "--weights", place / "w.safetensors", *SIZES]


def never() -> nn.Module:
    """A network that no test should build."""
    raise AssertionError("the network was built")

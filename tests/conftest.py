"""One thread, and what every test may ask for."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fewshift import Support, cli
from tests.helpers.networks import make_support, make_tiny

torch.set_num_threads(1)


@pytest.fixture
def tiny() -> nn.Module:
    return make_tiny()


@pytest.fixture
def support() -> Support:
    return make_support()


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command in this process through the real entry point."""

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fewshift", *map(str, words)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return Result(code, out.out, out.err)

    return run

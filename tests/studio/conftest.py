"""A network for digits, a folder of digits, and a studio that serves them without answering."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import fewshift
from fewshift.studio.answers import NetworkAnswers
from fewshift.studio.serving import Studio
from fewshift.studio.workbench import Workbench
from tests.helpers.studio import Client, write_digits


@pytest.fixture(scope="session")
def network() -> nn.Module:
    return fewshift.load("digits")


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of forty digits, and the class of each file. Tests only read it."""
    folder = tmp_path_factory.mktemp("forms") / "photos"
    return folder, write_digits(folder, 4)


@pytest.fixture
def bench(network: nn.Module, digits_folder: tuple[Path, dict[str, str]], tmp_path: Path) -> Iterator[Workbench]:
    """A workbench on which nothing is answered yet."""
    bench = Workbench(network, digits_folder[0], out=tmp_path / "out", seed=0)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def quiet_studio(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A studio that serves a few digits, a link that leads outside and a file that is no image; no process starts."""
    place = tmp_path_factory.mktemp("served")
    write_digits(place / "photos", 1)
    (place / "secret.png").write_bytes((place / "photos" / "form-000.png").read_bytes())
    (place / "photos" / "link.png").symlink_to(place / "secret.png")
    (place / "photos" / "noise.png").write_bytes(b"no picture")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NetworkAnswers, "start", lambda self: None)
        with Studio(network, place / "photos", seed=0) as studio:
            yield Client(studio)

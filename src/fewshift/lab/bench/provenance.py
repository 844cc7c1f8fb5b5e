"""Provenance: the code and the network that made a result, as a record keeps them."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fewshift import __version__
from fewshift.models.cards import known_card

PACKAGE = Path(__file__).parents[2]
PATIENCE = 10  # seconds that git may take


def made_by(network: nn.Module) -> dict[str, Any]:
    """The part of a result that says what made it."""
    return {"network": network_facts(network), "versions": versions()}


def versions() -> dict[str, str]:
    """The versions of the packages that made a result, and the commit of this one where it is known."""
    packages = {"fewshift": __version__, "torch": torch.__version__, "python": platform.python_version()}
    made_at = commit(PACKAGE)
    return packages if made_at is None else packages | {"commit": made_at}


@cache
def commit(package: Path) -> str | None:
    """The commit of the checkout that a package lies in, with "-dirty" if the package was changed since.

    None if git does not track the package: it was installed, perhaps into a folder of somebody else's checkout. Asked
    once in a process, because that is the code which the process has loaded.
    """
    head = _git(package, "rev-parse", "--short", "HEAD")
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    if not head or not tracked:
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None where there is no git, no checkout, or no answer in time."""
    # a hook of git that runs this would otherwise point it at the hook's own repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def network_facts(network: nn.Module) -> dict[str, Any]:
    """What a network's card says about its architecture, its training and the size of its images, as far as it does."""
    card = known_card(network)
    facts = {
        "arch": card.arch,
        "algorithm": (card.algorithm or {}).get("name"),
        "pixels": None if card.preprocess is None else card.preprocess.crop,
    }
    return {name: value for name, value in facts.items() if value is not None}

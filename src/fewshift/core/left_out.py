"""What is not among the images, though it lies beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LeftOut:
    """Files that were passed over."""

    count: int  # all of them
    files: tuple[Path, ...] = ()  # those that are images: in a format that is not read here, or without a label
    strange: tuple[Path, ...] = ()  # those that are no ordinary files, and folders that cannot be looked into

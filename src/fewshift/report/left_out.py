"""Files that were left out, in words."""

from __future__ import annotations

from pathlib import Path

from fewshift.core.left_out import LeftOut
from fewshift.images.formats import looks_like_an_image, readable, remedy, unreadable

NAMED = 5


def not_warned_of(left: LeftOut) -> LeftOut | None:
    """The files that no caution names: those that are no images, and images without a label."""
    named = unreadable(left.files)
    count = left.count - len(named)
    return LeftOut(count, tuple(file for file in left.files if file not in named), left.strange) if count else None


def passed_over(left: LeftOut) -> str:
    """The first images by name, the number of other files, and what to do: "a.heic, b.jp2, 3 other files (...)"."""
    names = [file.name for file in left.files[:NAMED]]
    more, others = len(left.files) - len(names), left.count - len(left.files) - len(left.strange)
    parts = names + [f"{more} more image{'s' * (more > 1)}"] * bool(more)
    parts += [f"{path.name} ({_nature(path)})" for path in left.strange[:NAMED]]
    parts += [f"{len(left.strange) - NAMED} more of these"] * (len(left.strange) > NAMED)
    parts += [f"{others} {'other ' * bool(parts)}file{'s' * (others > 1)}"] * bool(others)
    without_label = any(looks_like_an_image(file) and file.suffix.lower() in readable() for file in left.files)
    advice = [remedy(left.files), "label them to use them" if without_label else None]
    known = ", ".join(filter(None, advice))
    return ", ".join(parts) + (f" ({known})" if known else "")


def _nature(path: Path) -> str:
    """Why something is no file that can be read."""
    return "a folder that cannot be looked into" if path.is_dir() else "not an ordinary file"

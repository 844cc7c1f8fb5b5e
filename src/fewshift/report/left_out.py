"""Files that were left out, in words."""

from __future__ import annotations

from fewshift.core.left_out import LeftOut
from fewshift.images.formats import looks_like_an_image, readable, remedy

NAMED = 5


def passed_over(left: LeftOut) -> str:
    """The first images by name, the number of other files, and what to do: "a.heic, b.jp2, 3 other files (...)"."""
    names = [file.name for file in left.files[:NAMED]]
    more, others = len(left.files) - len(names), left.count - len(left.files)
    parts = names + [f"{more} more image{'s' * (more > 1)}"] * bool(more)
    parts += [f"{others} {'other ' * bool(names)}file{'s' * (others > 1)}"] * bool(others)
    without_label = any(looks_like_an_image(file) and file.suffix.lower() in readable() for file in left.files)
    advice = [remedy(left.files), "label them to use them" if without_label else None]
    known = ", ".join(filter(None, advice))
    return ", ".join(parts) + (f" ({known})" if known else "")

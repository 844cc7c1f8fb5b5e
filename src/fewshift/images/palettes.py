"""Colours of classes, for people who look at labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fewshift.images import street

Colour = tuple[int, int, int]

# Okabe and Ito's seven, then four that stay as far from them, and from black, for eyes without red or green cones
FIRST_COLOURS: tuple[Colour, ...] = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
    (0, 0, 255), (150, 255, 165), (0, 0, 75), (90, 45, 0),
)  # fmt: skip
VOID: Colour = (0, 0, 0)  # of unlabelled pixels
STEPS = (0, 36, 72, 108, 144, 180, 216, 252)  # of each channel, where further colours are looked for


def palette_of(classes: Sequence[str]) -> tuple[Colour, ...]:
    """The colours that people know classes by, where one data set names them all, or the default ones."""
    names = [_plain(it) for it in classes]
    for known in KNOWN:
        if known.keys() >= set(names):
            return tuple(known[it] for it in names)
    return default_palette(len(classes))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


KNOWN: tuple[dict[str, Colour], ...] = tuple(
    {_plain(name): colour for name, colour in zip(names, colours, strict=True)}
    for names, colours in ((street.CLASSES, street.PALETTE), (street.CAMVID_CLASSES, street.CAMVID_PALETTE))
)


def default_palette(classes: int) -> tuple[Colour, ...]:
    """A colour for each class, always the same ones.

    The first eleven can be told apart without red or green cones; each further one is as far from all before, and
    from the black of unlabelled pixels, as there is.
    """
    return (FIRST_COLOURS + _further_colours(max(0, classes - len(FIRST_COLOURS))))[:classes]


@cache
def _further_colours(count: int) -> tuple[Colour, ...]:
    """Farthest first: each of `count` colours is the one that is least like all before it."""
    steps = torch.tensor(STEPS)
    possible = torch.cartesian_prod(steps, steps, steps)
    seen = _lab(possible)
    distance = torch.cdist(seen, _lab(torch.tensor((*FIRST_COLOURS, VOID)))).amin(1)
    chosen = []
    for _ in range(count):
        best = int(distance.argmax())
        chosen.append(tuple(possible[best].tolist()))
        distance = torch.minimum(distance, torch.linalg.vector_norm(seen - seen[best], dim=1))
    return tuple(chosen)


def _lab(colours: Tensor) -> Tensor:
    """CIELAB of sRGB: distances are differences that one sees."""
    share = colours.double() / 255
    light = torch.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    to_xyz = light.new_tensor([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    ratio = light @ to_xyz.T / to_xyz.sum(1)
    root = torch.where(ratio > 0.008856, ratio ** (1 / 3), 7.787 * ratio + 16 / 116)
    x, y, z = root.unbind(1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)

"""Placeholder until the cards have their room."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fewshift.images.preprocess import Preprocess


@dataclass(frozen=True)
class KnownCard:
    """What is known about a network."""

    preprocess: Preprocess | None = None
    classes: tuple[str, ...] | None = None


def known_card(model: nn.Module) -> KnownCard:
    """What is known about a network."""
    card: KnownCard = getattr(model, "fewshift_card", KnownCard())
    return card

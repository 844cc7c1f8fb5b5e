"""Where cells find their networks and images: the embedded digits, weights in a folder, data sets below a root."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import nn

from fewshift import models
from fewshift.bench.cell import Cell
from fewshift.bench.run import Images, Workshop
from fewshift.data import digits
from fewshift.data.collections import load_domain
from fewshift.errors import FewshiftError


def open_workshop(data_root: str | None, weights: str | None) -> Workshop:
    """A workshop that loads every network and every domain once; small domains stay decoded in memory.

    `weights` is a folder of safetensors files named after the cells' sources, each with its card. A domain is
    preprocessed as the card of the source network says.
    """

    @cache
    def loaded(source: str) -> models.Loaded:
        if weights is None:
            raise FewshiftError(f"where '{source}' lies is not known: pass --weights FOLDER with {source}.safetensors")
        return models.load(None, Path(weights) / f"{source}.safetensors")

    def network(cell: Cell) -> nn.Module:
        return digits.source_network() if cell.dataset == "digits" else loaded(cell.source).model

    def domain(cell: Cell) -> Images:
        steps = None if cell.dataset == "digits" else loaded(cell.source).preprocess
        found = load_domain(cell.dataset, cell.target, data_root, steps)
        return found.cached() if len(found) <= SMALL else found

    return Workshop(network, domain)


SMALL = 20_000  # images that may stay in memory, a byte for each value

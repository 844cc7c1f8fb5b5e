"""Where cells find their networks and images: the embedded digits, weights in a folder, data sets below a root."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import nn

from fewshift import models
from fewshift.bench.cell import Cell
from fewshift.bench.run import Images, Workshop
from fewshift.bench.scenes import Scenery
from fewshift.data import digits
from fewshift.data.collections import find_collection
from fewshift.data.copies import load_domain, load_scenes
from fewshift.data.domain import Domain
from fewshift.data.preprocess import Preprocess
from fewshift.errors import FewshiftError

MEMORY = 4 * 2**30  # bytes of decoded images that a workshop keeps
MOST_DECODERS = 4  # processes; a network on a CPU does not outrun more


def open_workshop(data_root: str | None, weights: str | None) -> Workshop:
    """A workshop that loads every network and every domain once; domains stay decoded in memory while there is room.

    `weights` is a folder of safetensors files named after the cells' sources, each with its card. A domain is
    preprocessed as the card of the source network says. Images of a domain that found no room are decoded by other
    processes while the network runs.
    """
    room = MEMORY

    @cache
    def loaded(source: str) -> models.Loaded:
        if weights is None:
            raise FewshiftError(f"where '{source}' lies is not known: pass --weights FOLDER with {source}.safetensors")
        return models.load(None, Path(weights) / f"{source}.safetensors")

    @cache
    def read(dataset: str, target: str, steps: Preprocess | None) -> Domain:
        nonlocal room
        found = replace(load_domain(dataset, target, data_root, steps), workers=decoders())
        if (size := found.decoded_bytes) > room:
            return found
        room -= size
        return found.cached()

    def network(cell: Cell) -> nn.Module:
        return digits.source_network(cell.source) if cell.dataset == "digits" else loaded(cell.source).model

    def scenery(cell: Cell) -> Scenery | None:
        known = find_collection(cell.dataset)
        if not known.dense:
            return None
        steps = loaded(cell.source).preprocess
        test, origin = load_scenes(known, cell.target, data_root, steps), known.support_domain(cell.target)
        return Scenery(test, test if origin == cell.target else load_scenes(known, origin, data_root, steps))

    def domain(cell: Cell) -> Images:
        if cell.dataset != "digits":
            return read(cell.dataset, cell.target, loaded(cell.source).preprocess)
        found = read(cell.dataset, cell.target, None)
        # at home a network is judged on what it was not trained on
        return found.subset(digits.find_place(cell.source).parts()[1]) if cell.source == cell.target else found

    return Workshop(network, domain, scenery)


def decoders() -> int:
    """How many processes decode images beside this one: one where a pool has shared out the cores, none on one core."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if cores == 1:
        return 0
    return 1 if multiprocessing.parent_process() else min(cores, MOST_DECODERS)

"""Where cells find their networks and images: the embedded digits, weights in a folder, data sets below a root."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import nn

from fewshift.core.labels import PIXELS
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.run import Images, Workshop
from fewshift.lab.bench.scenes import Scenery
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.datasets.copies import listed, load_domain, load_scenes, load_validation
from fewshift.lab.datasets.domain import Domain, joined
from fewshift.lab.training.gather import split
from fewshift.models import libraries as models
from fewshift.models.cards import Card, card_of, known_card

MEMORY = 4 * 2**30  # bytes of decoded images that a workshop keeps
MOST_DECODERS = 4  # processes; a network on a CPU does not outrun more


def open_workshop(data_root: str | None, weights: str | None) -> Workshop:
    """A workshop that loads every network and every domain once; domains stay decoded in memory while there is room.

    `weights` is a folder of safetensors files named after the cells' sources, each with its card. A domain is
    preprocessed as the card of the source network says. Images of a domain that found no room are decoded by other
    processes while the network runs. The card also says which domains are the network's own source.
    """
    room = MEMORY

    def file(source: str) -> Path:
        if weights is None:
            raise FewshiftError(f"where '{source}' lies is not known: pass --weights FOLDER with {source}.safetensors")
        return Path(weights) / f"{source}.safetensors"

    @cache
    def loaded(source: str) -> nn.Module:
        return models.load(None, file(source))

    @cache
    def read(dataset: str, target: str, steps: Preprocess | None) -> Domain:
        return kept(load_domain(dataset, target, data_root, steps))

    def kept(domain: Domain) -> Domain:
        nonlocal room
        found = replace(domain, workers=decoders())
        if (size := found.decoded_bytes) > room:
            return found
        room -= size
        return found.cached()

    def network(cell: Cell) -> nn.Module:
        return digits.source_network(cell.source) if cell.dataset == "digits" else loaded(cell.source)

    def scenery(cell: Cell) -> Scenery | None:
        known = find_collection(cell.dataset)
        if known.labels is not PIXELS:
            return None
        steps = known_card(loaded(cell.source)).preprocess
        test, origin = load_scenes(known, cell.target, data_root, steps), known.support_domain(cell.target)
        return Scenery(test, test if origin == cell.target else load_scenes(known, origin, data_root, steps))

    def domain(cell: Cell) -> Images:
        if cell.dataset != "digits":
            steps = known_card(loaded(cell.source)).preprocess
            if cell.target == OWN_SOURCE:
                return kept(held_out(cell.dataset, card_of(file(cell.source)), data_root, steps))
            return read(cell.dataset, cell.target, steps)
        # at home a network is judged on what it was not trained on
        at_home = cell.target in (OWN_SOURCE, cell.source)
        found = read(cell.dataset, cell.source if at_home else cell.target, None)
        return found.subset(digits.find_place(cell.source).parts()[1]) if at_home else found

    return Workshop(network, domain, scenery)


def held_out(dataset: str, card: Card, root: str | None, steps: Preprocess | None) -> Domain:
    """The images of a network's source domains that it was not trained on.

    Those that the card lists, or that `fewshift train` set aside, where the card says which share that was; the
    published validation lists otherwise.
    """
    known = find_collection(dataset)
    if card.validation is not None:
        return listed(card.validation, known, root, steps)
    names = [name for name in known.domains if name in card.sources]
    if not names:
        raise FewshiftError(
            f"the card of a network does not say on which domains of {known.title} it was trained: "
            f'add them to {card.path or "a card beside its weights"}, such as "sources": ["{known.domains[0]}"]'
        )
    if card.held_out is None:
        return joined([load_validation(known, name, root, steps) for name in names])
    if not card.held_out:
        raise FewshiftError(f"{card.path} says that every source image was trained on: train with held_out above 0")
    whole = {name: load_domain(known, name, root, steps) for name in names}
    return joined([it.subset(split(known, name, len(it), card.held_out)[1]) for name, it in whole.items()])


def decoders() -> int:
    """How many processes decode images beside this one: one where a pool has shared out the cores, none on one core."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if cores == 1:
        return 0
    return 1 if multiprocessing.parent_process() else min(cores, MOST_DECODERS)

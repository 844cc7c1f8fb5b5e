"""Materials: the networks and images that cells share, loaded once: embedded digits, a folder of weights, data sets."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.bench.scenes import SceneSplit
from fewshift.lab.datasets import digits, scene_layouts
from fewshift.lab.datasets.catalog import find_collection
from fewshift.lab.datasets.copies import listed, load_domain, load_scenes, load_validation
from fewshift.lab.datasets.corruptions import corrupted
from fewshift.lab.datasets.domain import Domain, joined
from fewshift.lab.training.gather import split
from fewshift.models import libraries as models
from fewshift.models.cards import Card, card_of, known_card

T = TypeVar("T")

MEMORY = 4 * 2**30  # bytes of decoded images that a process keeps
CORRUPTED = 6  # corrupted domains that a process keeps: three strengths for two networks take turns in a grid
MOST_DECODERS = 4  # processes; a network on a CPU does not outrun more


@dataclass
class Materials:
    """What cells share: each network and domain is loaded once; cells that differ only in the stream share a fit."""

    load_network: Callable[[Cell], nn.Module]
    load_domain: Callable[[Cell], Domain]
    load_split: Callable[[Cell], SceneSplit | None] = lambda _: None
    _kept: dict[tuple[str, ...], Any] = field(default_factory=dict)
    _corrupted: dict[tuple[int, str], Domain] = field(default_factory=dict)  # the newest alone
    _fit: tuple[str, Any] | None = None  # the newest alone: a sweep runs cells that share a fit one after the other

    def network(self, cell: Cell) -> nn.Module:
        """The source network of a cell."""
        return self._once(("network", cell.dataset, cell.source), self.load_network, cell)

    def domain(self, cell: Cell) -> Domain:
        """The target domain of a cell."""
        # the source too: its card says how images are preprocessed
        clean = self._once(("domain", cell.dataset, cell.target, cell.source), self.load_domain, cell)
        if cell.corruption is None:
            return clean
        key = id(clean), cell.corruption  # the clean domain is kept, so its id stays its own
        if key not in self._corrupted:
            while len(self._corrupted) >= CORRUPTED:
                del self._corrupted[next(iter(self._corrupted))]
            self._corrupted[key] = corrupted(clean, cell.corruption)
        return self._corrupted[key]

    def scenes(self, cell: Cell) -> SceneSplit | None:
        """The target of a cell with pixel labels; None for image labels."""
        return self._once(("scenes", cell.dataset, cell.target, cell.source), self.load_split, cell)

    def shared_fit(self, cell: Cell, fit: Callable[[], T]) -> T:
        """The fit of the previous cell if this one differs only in the stream, a new one otherwise."""
        if self._fit is None or self._fit[0] != cell.fit_key:
            self._fit = cell.fit_key, fit()
        shared: T = self._fit[1]
        return shared

    def source_answers(self, cell: Cell, indices: Tensor, predict: Callable[[Tensor], Tensor]) -> Tensor:
        """The source network's row for each image; an image that several cells share is predicted once."""
        known: dict[int, Tensor] = self._kept.setdefault(_answers_key(cell), {})
        new = [index for index in indices.tolist() if index not in known]
        if new:
            known.update(zip(new, predict(torch.tensor(new)), strict=True))
        return torch.stack([known[index] for index in indices.tolist()])

    def _once(self, key: tuple[str, ...], load: Callable[[Cell], T], cell: Cell) -> T:
        if key not in self._kept:
            self._kept[key] = load(cell)
        kept: T = self._kept[key]
        return kept


def _answers_key(cell: Cell) -> tuple[str, ...]:
    return "answers", cell.dataset, cell.target, cell.source, cell.corruption or "", cell.precision


def open_materials(data_root: str | None, weights: str | None) -> Materials:
    """Materials from files; domains stay decoded in memory while there is room.

    `weights` is a folder with a safetensors file and a card for each source. The card says how images are preprocessed
    and on which domains the network was trained. Other processes decode the images that memory has no room for, while
    the network runs.
    """
    room = MEMORY

    def file(source: str) -> Path:
        if weights is None:
            raise FewshiftError(f"no folder of weights for '{source}': pass --weights FOLDER with {source}.safetensors")
        return Path(weights) / f"{source}.safetensors"

    @cache
    def loaded(source: str) -> nn.Module:
        return models.load(None, file(source))

    @cache
    def read(dataset: str, target: str, steps: Preprocess | None) -> Domain:
        return kept(load_domain(dataset, target, data_root, steps))

    def kept(domain: Domain) -> Domain:
        nonlocal room
        domain = replace(domain, workers=decoders())
        if (size := domain.decoded_bytes) > room:
            return domain
        room -= size
        return domain.cached()

    def network(cell: Cell) -> nn.Module:
        return digits.source_network(cell.source) if cell.dataset == "digits" else loaded(cell.source)

    def scenes(cell: Cell) -> SceneSplit | None:
        known = find_collection(cell.dataset)
        if known.layout not in scene_layouts.PLACES:
            return None
        steps = known_card(loaded(cell.source)).preprocess
        test, origin = load_scenes(known, cell.target, data_root, steps), known.support_domain(cell.target)
        return SceneSplit(test, test if origin == cell.target else load_scenes(known, origin, data_root, steps))

    def domain(cell: Cell) -> Domain:
        if cell.dataset != "digits":
            steps = known_card(loaded(cell.source)).preprocess
            if cell.target == OWN_SOURCE:
                return kept(held_out(cell.dataset, card_of(file(cell.source)), data_root, steps))
            return read(cell.dataset, cell.target, steps)
        # on its own source a network is judged on images that it was not trained on
        own = cell.target in (OWN_SOURCE, cell.source)
        images = read(cell.dataset, cell.source if own else cell.target, None)
        return images.subset(digits.find_place(cell.source).parts()[1]) if own else images

    return Materials(network, domain, scenes)


def held_out(dataset: str, card: Card, root: str | None, steps: Preprocess | None) -> Domain:
    """The images of a network's source domains that it was not trained on.

    These are the images that the card lists; else those that `fewshift train` set aside; else those of the published
    validation lists.
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
    domains = {name: load_domain(known, name, root, steps) for name in names}
    return joined(
        [domain.subset(split(known, name, len(domain), card.held_out)[1]) for name, domain in domains.items()]
    )


def decoders() -> int:
    """How many processes decode images: one inside a pool, which has shared out the cores; none on a single core."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if cores == 1:
        return 0
    return 1 if multiprocessing.parent_process() else min(cores, MOST_DECODERS)

"""Source images of a data set, shared out into those that train and those that validate. Never the target's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fewshift.core.labels import Labels, extent
from fewshift.core.network import free_memory
from fewshift.errors import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.collection import Collection
from fewshift.lab.datasets.copies import LOADERS
from fewshift.lab.datasets.domain import Domain
from fewshift.lab.training.augment import Size, check_augment
from fewshift.lab.training.batches import check_batches
from fewshift.lab.training.recipes import DIGITS_HELD_OUT, OFFICIAL, Recipe
from fewshift.lab.training.samples import READINGS, Decoded, Joined, Pool

ROOM = 4 * 2**30  # bytes of decoded images that are kept in memory, where there is twice as much


@dataclass(frozen=True)
class Sources:
    """The images a network is trained on and those it is validated on, all from the source domains."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess  # of evaluation; what a user of the network does to an image
    train: Pool
    domains: Tensor  # of each training image: the position of its source in `names`
    validation: Pool | None

    @property
    def labels(self) -> Labels:
        """Whether a label belongs to an image or to a pixel."""
        return self.train.labels

    def seen_size(self, recipe: Recipe) -> Size:
        """The height and width of the images that a training step sees."""
        height, width = self.train.batch(torch.tensor([0]))[0].shape[-2:]
        return READINGS[self.labels].seen(self.preprocess, recipe, (height, width))


def source_names(collection: Collection, target: str | None, sources: Sequence[str]) -> tuple[str, ...]:
    """The domains to train on: those named, or all but the target where the data set does not say which."""
    if target is None and not sources:
        raise FewshiftError("neither a target nor a source is named: pass --target DOMAIN or --source DOMAIN")
    for name in (*sources, *([] if target is None else [target])):
        if name not in collection.domains:
            raise FewshiftError(f"{collection.name} has no domain {name!r}: use one of {', '.join(collection.domains)}")
    for name in sources:
        if name == target:
            raise FewshiftError(f"{name!r} is both source and target: training never sees the target, name another")
        if list(sources).count(name) > 1:
            raise FewshiftError(f"source {name!r} is named twice: name it once")
    others = tuple(name for name in collection.domains if name != target)
    return tuple(sources) or OFFICIAL.get((collection.name, target or ""), others)


def load_sources(collection: Collection, names: Sequence[str], root: str | Path | None) -> dict[str, Domain | Scenes]:
    """Each source domain: with a label for each image, or for each pixel."""
    return {name: LOADERS[collection.labels](collection, name, root) for name in names}


def evaluation_steps(own: Preprocess | None, collection: Collection, recipe: Recipe) -> Preprocess:
    """How images are prepared for the network in evaluation.

    Values are as the network's library or card says, otherwise as is usual for the data set; sizes are the recipe's.
    """
    usual = collection.preprocess
    base = own if own is not None and own.channels == usual.channels else usual
    return READINGS[collection.labels].evaluation(replace(usual, mean=base.mean, std=base.std), base, recipe)


def gather(
    collection: Collection,
    images: Mapping[str, Domain | Scenes],
    recipe: Recipe,
    steps: Preprocess,
    room: int | None = None,
) -> Sources:
    """Read the source domains: most of each trains, a fixed random part of each validates."""
    _check(collection, images, steps)
    parts = {name: split(collection, name, len(domain), recipe.held_out) for name, domain in images.items()}
    training = READINGS[collection.labels].training(steps, recipe)
    train = Joined([Decoded(replace(images[name], preprocess=training).subset(parts[name][0])) for name in images])
    check_augment(recipe.augment, collection.labels)  # before images are read, which takes time
    check_batches(train.domains, recipe.batch_size, recipe.domains_per_batch)
    room = _room() if room is None else room
    pool = Pool(train, room, "training images read")
    held_out = [replace(images[name], preprocess=steps).subset(parts[name][1]) for name in images]
    validation = [Decoded(domain) for domain in held_out if len(domain)]
    return Sources(
        names=tuple(images),
        classes=tuple(next(iter(images.values())).classes),
        preprocess=steps,
        train=pool,
        domains=train.domains,
        validation=Pool(Joined(validation), room - pool.nbytes, "validation images read") if validation else None,
    )


def split(collection: Collection, name: str, count: int, share: float) -> tuple[Tensor, Tensor]:
    """The positions of the images that train, and of those that validate; the same for every seed.

    Of the embedded digits they are those that the shipped networks were, and were not, trained on.
    """
    if not share:
        return torch.arange(count), torch.arange(0)
    if collection.layout == "digits":
        if share != DIGITS_HELD_OUT:
            raise FewshiftError(
                f"held_out={share} cannot be: of the digits a fixed fifth validates, set {DIGITS_HELD_OUT} or 0"
            )
        return digits.find_place(name).parts()
    if count < 2:
        raise FewshiftError(f"domain {name!r} has {count} image, so none can be held out: set held_out to 0")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    aside = min(count - 1, max(1, round(count * share)))
    return order[aside:].sort().values, order[:aside].sort().values


def _check(collection: Collection, images: Mapping[str, Domain | Scenes], steps: Preprocess) -> None:
    """Raise one sentence when domains do not go together, or their pixels have a size already."""
    first, *rest = images.values()
    if any(tuple(domain.classes) != tuple(first.classes) for domain in rest):
        raise FewshiftError(f"the sources of {collection.title} have different classes: train on one of them")
    source = first.source if isinstance(first, Domain) else None
    if isinstance(source, Tensor) and source.shape[-2:] != (steps.resize, steps.resize):
        raise FewshiftError(
            f"images of {collection.title} are {extent(source.shape[-2:])} pixels, not {steps.resize}: "
            "leave the size out"
        )


def _room() -> int:
    free = free_memory(torch.device("cpu"))
    return ROOM if free is None else min(ROOM, free // 2)

"""Features before and after a BatchNorm layer, of two samples side by side: appendix A of the LCCS paper as data.

The samples may come from different domains, be standardised by the source's statistics or by those of their
minibatches, and have their classes as found or in equal numbers. The network up to the layer is the source's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core.moments import source_layers
from fewshift.core.network import Network, batchnorm, channels_last, like
from fewshift.core.support import draw_support
from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import Cell, hashed
from fewshift.lab.bench.grid import Grid, check_known, read_toml
from fewshift.lab.bench.run import Images, Workshop, versions

STATISTICS = ("source", "batch")
MIXES = ("as found", "balanced")
PERPLEXITY = 30.0
LAST = "last"

GRIDS = Path(__file__).parents[1] / "grids"  # of the package


@dataclass(frozen=True)
class Sample:
    """Images of a domain, and the statistics that standardise their features."""

    domain: str
    statistics: str = "source"
    classes: str = "as found"

    def __post_init__(self) -> None:
        for name, known in (("statistics", STATISTICS), ("classes", MIXES)):
            if getattr(self, name) not in known:
                raise FewshiftError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(known)}")

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.domain}, {self.classes}, {self.statistics} statistics"


@dataclass(frozen=True)
class FeatureCell:
    """One comparison of two samples of `images` images each, at one layer."""

    dataset: str
    source: str
    label: str
    first: Sample
    second: Sample
    layer: str = LAST
    images: int = 300
    batch_size: int = 32
    seed: int = 0

    @property
    def key(self) -> str:
        """The same for the same experiment."""
        return hashed({"kind": "features", **self.to_json()})

    @property
    def fit_key(self) -> str:
        """Nothing is shared with other cells."""
        return self.key

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self)


Experiment = Cell | FeatureCell


@dataclass(frozen=True)
class FeatureGrid:
    """The comparisons of one figure."""

    title: str
    comparisons: tuple[FeatureCell, ...]

    @classmethod
    def load(cls, path: str | Path) -> FeatureGrid:
        """Read a file with [[comparisons]]; what stands above them holds for all."""
        path = Path(path)
        data = read_toml(path)
        title, comparisons = data.pop("title", ""), data.pop("comparisons", [])
        missing = [it for it, value in (("title", title), ("comparisons", comparisons)) if not value]
        missing += [it for it in ("dataset", "source") if it not in data]
        if missing:
            raise FewshiftError(f"{path} lacks {missing[0]}: add it")
        return cls(title, tuple(_comparison(path, {**data, **it}) for it in comparisons))

    def cells(self) -> list[FeatureCell]:
        """Every comparison."""
        return list(self.comparisons)


def grid_file(name: str | Path) -> Path:
    """A grid of the package by its name, or the file at a path."""
    packaged = GRIDS / f"{name}.toml"
    return packaged if packaged.is_file() else Path(name)


def load_grid(path: str | Path) -> Grid | FeatureGrid:
    """The grid in a file, of whichever kind it is."""
    return FeatureGrid.load(path) if "comparisons" in read_toml(Path(path)) else Grid.load(path)


def embed(cell: FeatureCell, workshop: Workshop) -> dict[str, Any]:
    """t-SNE of both samples' features together, before and after the layer standardises them; and their gap."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise FewshiftError("t-SNE comes with the package scikit-learn: pip install 'fewshift[demo]'") from error

    began = time.perf_counter()
    samples = cell.first, cell.second
    homes = [workshop.domain(Cell(cell.dataset, cell.source, it.domain, "source")) for it in samples]
    network = workshop.network(Cell(cell.dataset, cell.source, cell.first.domain, "source"))
    chosen = _drawn(cell, homes)
    view = Network.of(network, homes[0].images(chosen[0][:2]))
    layer = _layer(view, cell.layer)
    seen = [
        _features(view, layer, sample, home, indices, cell.batch_size)
        for sample, home, indices in zip(samples, homes, chosen, strict=True)
    ]
    labels = [home.labels[indices] for home, indices in zip(homes, chosen, strict=True)]
    found: dict[str, Any] = {
        "layer": layer,
        "classes": list(homes[0].classes),
        "labels": [it.tolist() for it in labels],
        "samples": [it.label for it in samples],
    }
    sizes = [len(indices) for indices in chosen]
    for when, place in (("before", 0), ("after", 1)):
        first, second = (it[place] for it in seen)
        both = torch.cat([first, second]).double()
        perplexity = min(PERPLEXITY, (len(both) - 1) / 3)
        points = TSNE(2, perplexity=perplexity, init="pca", random_state=cell.seed).fit_transform(both.numpy())
        found[when] = [part.round(2).tolist() for part in (points[: sizes[0]], points[sizes[0] :])]
        found[f"gap_{when}"] = gap(first, second, labels)
    return found | {
        "seconds": {"adapt": 0.0, "predict": time.perf_counter() - began},
        "notes": {},
        "versions": versions(),
    }


def gap(first: Tensor, second: Tensor, labels: Sequence[Tensor]) -> float:
    """How far the samples lie apart within a class, in units of its spread: the mean over the classes of both."""
    found = []
    for label in sorted(set(labels[0].tolist()) & set(labels[1].tolist())):
        one, other = first[labels[0] == label], second[labels[1] == label]
        spread = (one.var(0, correction=0) + other.var(0, correction=0)).sum() / 2
        found.append((one.mean(0) - other.mean(0)).norm() / spread.sqrt().clamp(min=1e-12))
    return float(torch.stack(found).mean()) if found else math.nan


def _comparison(path: Path, data: Mapping[str, Any]) -> FeatureCell:
    check_known(path, "a comparison", data, FeatureCell)
    given = dict(data)
    for name in ("first", "second"):
        if name not in given:
            raise FewshiftError(f"{path} has a comparison without {name}: add it")
        check_known(path, f"'{name}' of a comparison", given[name], Sample)
        if "domain" not in given[name]:
            raise FewshiftError(f"{path} has a comparison whose {name} sample names no domain: add it")
        given[name] = Sample(**given[name])
    if "label" not in given:
        raise FewshiftError(f"{path} has a comparison without label: add it")
    return FeatureCell(**given)


def _drawn(cell: FeatureCell, homes: list[Images]) -> list[Tensor]:
    """Indices of both samples; of one domain they share no image."""
    found: list[Tensor] = []
    for sample, home in zip((cell.first, cell.second), homes, strict=True):
        taken = found[0] if found and sample.domain == cell.first.domain else torch.empty(0, dtype=torch.long)
        free = torch.ones(len(home.labels), dtype=torch.bool)
        free[taken] = False
        pool = free.nonzero().flatten()
        if sample.classes == "balanced":
            each = max(1, cell.images // len(home.labels.unique()))
            drawn = pool[draw_support(home.labels[pool], each, cell.seed, home.classes)]
            pool = drawn
        generator = torch.Generator().manual_seed(cell.seed)
        found.append(pool[torch.randperm(len(pool), generator=generator)[: cell.images]])
    return found


def _layer(network: Network, name: str) -> str:
    names = [layer.name for layer in network.layers]
    if not names:
        raise FewshiftError("the network has no BatchNorm layer with statistics: choose another network")
    if name != LAST and name not in names:
        raise FewshiftError(f"layer '{name}' is no BatchNorm layer of this network: name one, or write last")
    return names[-1] if name == LAST else name


@torch.no_grad()
def _features(
    network: Network, layer: str, sample: Sample, home: Images, indices: Tensor, batch_size: int
) -> tuple[Tensor, Tensor]:
    """What goes into the layer, and the same standardised, both averaged over positions."""
    source = source_layers(network)[layer]
    inputs: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append(given[0].detach().flatten(2) if given[0].ndim > 2 else given[0].detach()[..., None])

    handle = batchnorm(network.model, layer).register_forward_pre_hook(keep)
    try:
        for images in home.batches(indices.split(batch_size)):
            network.model(like(network.model, channels_last(images)))
    finally:
        handle.remove()
    after = []
    for batch in inputs:
        if sample.statistics == "batch":
            mean, std = batch.mean((0, 2)), (batch.var((0, 2), correction=0) + source.eps).sqrt()
        else:
            mean, std = source.normal.mean, source.normal.std
        after.append((batch.mean(2) - mean) / std)
    return torch.cat([batch.mean(2) for batch in inputs]), torch.cat(after)

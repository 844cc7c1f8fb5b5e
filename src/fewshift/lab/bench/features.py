"""Features of two samples before and after a BatchNorm layer: appendix A of the LCCS paper as data.

The samples may come from different domains. They are standardised by the source's statistics or by those of their
minibatches, and their classes are as found or balanced. The network up to the layer is the source network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshift.core.draws import draw_support, others
from fewshift.core.hooks import before
from fewshift.core.moments import source_layers
from fewshift.core.network import Network, batchnorm
from fewshift.errors import FewshiftError
from fewshift.lab.bench.cell import LAST, Cell, FeatureCell, Sample
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.grid_format import (
    COMPARISON_KINDS,
    SAMPLE_KINDS,
    TABLES,
    WORD,
    check_kinds,
    check_known,
    read_toml,
)
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.provenance import made_by
from fewshift.lab.datasets.domain import Domain

PERPLEXITY = 30.0

GRIDS = Path(__file__).parents[1] / "grids"  # of the package


@dataclass(frozen=True)
class FeatureGrid:
    """The comparisons of one figure."""

    title: str
    comparisons: tuple[FeatureCell, ...]

    @classmethod
    def load(cls, path: str | Path) -> FeatureGrid:
        """Read a file with [[comparisons]]; the keys above them hold for all."""
        path = Path(path)
        data = read_toml(path)
        check_kinds(path, data, {"title": WORD, "comparisons": TABLES})
        title, comparisons = data.pop("title", ""), data.pop("comparisons", [])
        missing = [name for name, value in (("title", title), ("comparisons", comparisons)) if not value]
        missing += [name for name in ("dataset", "source") if name not in data]
        if missing:
            raise FewshiftError(f"{path} lacks {missing[0]}: add it")
        return cls(title, tuple(_comparison(path, {**data, **own}) for own in comparisons))

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


def embed(cell: FeatureCell, materials: Materials) -> dict[str, Any]:
    """t-SNE of both samples' features together, before and after the layer standardises them, and their gap."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise FewshiftError("t-SNE comes with the package scikit-learn: pip install 'fewshift[demo]'") from error

    began = time.perf_counter()
    samples = cell.first, cell.second
    domains = [materials.domain(Cell(cell.dataset, cell.source, sample.domain, "source")) for sample in samples]
    network = materials.network(Cell(cell.dataset, cell.source, cell.first.domain, "source"))
    chosen = _drawn(cell, domains)
    view = Network.of(network, domains[0].images(chosen[0][:2]))
    layer = _layer(view, cell.layer)
    features = [
        _features(view, layer, sample, domain, indices, cell.batch_size)
        for sample, domain, indices in zip(samples, domains, chosen, strict=True)
    ]
    labels = [domain.labels[indices] for domain, indices in zip(domains, chosen, strict=True)]
    result: dict[str, Any] = {
        "layer": layer,
        "classes": list(domains[0].classes),
        "labels": [part.tolist() for part in labels],
        "samples": [sample.label for sample in samples],
    }
    sizes = [len(indices) for indices in chosen]
    for when, (first, second) in zip(("before", "after"), zip(*features, strict=True), strict=True):
        both = torch.cat([first, second]).double()
        perplexity = min(PERPLEXITY, (len(both) - 1) / 3)
        points = TSNE(2, perplexity=perplexity, init="pca", random_state=cell.seed).fit_transform(both.numpy())
        result[when] = [part.round(2).tolist() for part in (points[: sizes[0]], points[sizes[0] :])]
        result[f"gap_{when}"] = gap(first, second, labels)
    return result | {
        "seconds": {"adapt": 0.0, "predict": time.perf_counter() - began},
        "notes": {},
        **made_by(network),
    }


def gap(first: Tensor, second: Tensor, labels: Sequence[Tensor]) -> float:
    """The distance of the samples within a class, in units of its spread: the mean over the classes of both."""
    gaps = []
    for label in sorted(set(labels[0].tolist()) & set(labels[1].tolist())):
        one, other = first[labels[0] == label], second[labels[1] == label]
        spread = (one.var(0, correction=0) + other.var(0, correction=0)).sum() / 2
        gaps.append((one.mean(0) - other.mean(0)).norm() / spread.sqrt().clamp(min=1e-12))
    return float(torch.stack(gaps).mean()) if gaps else math.nan


def _comparison(path: Path, data: Mapping[str, Any]) -> FeatureCell:
    check_known(path, "a comparison", data, FeatureCell)
    check_kinds(path, data, COMPARISON_KINDS)
    values = dict(data)
    for name in ("first", "second"):
        if name not in values:
            raise FewshiftError(f"{path} has a comparison without {name}: add it")
        check_known(path, f"'{name}' of a comparison", values[name], Sample)
        check_kinds(path, values[name], SAMPLE_KINDS)
        if "domain" not in values[name]:
            raise FewshiftError(f"{path} has a comparison whose {name} sample names no domain: add it")
        values[name] = Sample(**values[name])
    if "label" not in values:
        raise FewshiftError(f"{path} has a comparison without label: add it")
    return FeatureCell(**values)


def _drawn(cell: FeatureCell, domains: list[Domain]) -> list[Tensor]:
    """Indices of both samples; samples of one domain share no image."""
    drawn: list[Tensor] = []
    for sample, domain in zip((cell.first, cell.second), domains, strict=True):
        taken = drawn[0] if drawn and sample.domain == cell.first.domain else torch.empty(0, dtype=torch.long)
        pool = others(taken, len(domain.labels))
        if sample.classes == "balanced":
            each = max(1, cell.images // len(domain.labels.unique()))
            pool = pool[draw_support(domain.labels[pool], each, cell.seed, domain.classes)]
        generator = torch.Generator().manual_seed(cell.seed)
        drawn.append(pool[torch.randperm(len(pool), generator=generator)[: cell.images]])
    return drawn


def _layer(network: Network, name: str) -> str:
    names = [layer.name for layer in network.layers]
    if not names:
        raise FewshiftError("the network has no BatchNorm layer with statistics: choose another network")
    if name != LAST and name not in names:
        raise FewshiftError(f"layer '{name}' is no BatchNorm layer of this network: name one, or use last")
    return names[-1] if name == LAST else name


@torch.no_grad()
def _features(
    network: Network, layer: str, sample: Sample, domain: Domain, indices: Tensor, batch_size: int
) -> tuple[Tensor, Tensor]:
    """The inputs of the layer, and the same standardised, both averaged over positions."""
    source = source_layers(network)[layer]
    inputs: list[Tensor] = []

    def keep(_: nn.Module, batch: Tensor) -> None:
        inputs.append(batch.flatten(2) if batch.ndim > 2 else batch[..., None])

    with before(batchnorm(network.model, layer), keep):
        for images in domain.batches(indices.split(batch_size)):
            network.model(network.laid_out(images))
    after = []
    for batch in inputs:
        if sample.statistics == "batch":
            mean, std = batch.mean((0, 2)), (batch.var((0, 2), correction=0) + source.eps).sqrt()
        else:
            mean, std = source.normal.mean, source.normal.std
        after.append((batch.mean(2) - mean) / std)
    return torch.cat([batch.mean(2) for batch in inputs]), torch.cat(after)

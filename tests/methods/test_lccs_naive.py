"""LCCS from end to end against the paper written out plainly: statistics, grid, SVD, Adam, nearest centroids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshift import LCCS, Target
from tests.helpers.networks import make_support, make_tiny


class NaiveLCCS:
    """The four stages for the tiny network in float64. `released` has the quirks of the authors' code."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, *, released: bool = False) -> None:
        self.model, self.images, self.labels, self.released = model, images, labels, released
        self.layers = {"bn1": model.bn1, "bn2": model.bn2}

    def forward(self, images: Tensor, statistics) -> tuple[Tensor, Tensor]:
        """(features, logits); `statistics(name, z)` gives mean and deviation for a layer that sees z."""

        def bn(name: str, z: Tensor) -> Tensor:
            layer, (mean, std) = self.layers[name], statistics(name, z)
            mean, std, gamma, beta = (t.view(1, -1, 1, 1) for t in (mean, std, layer.weight, layer.bias))
            return gamma * (z - mean) / std + beta

        hidden = bn("bn1", self.model.conv1(images)).relu()
        hidden = (hidden + bn("bn2", self.model.conv2(hidden))).relu()
        features = hidden.mean((2, 3))
        return features, self.model.fc(features)

    def source(self, name: str) -> tuple[Tensor, Tensor]:
        layer = self.layers[name]
        return layer.running_mean, (layer.running_var + layer.eps).sqrt()

    def pooled(self, name: str, z: Tensor) -> tuple[Tensor, Tensor]:
        pixels = z.transpose(0, 1).flatten(1)
        return pixels.mean(1), (pixels.var(1, correction=0) + self.layers[name].eps).sqrt()

    def blended(self, v: float, spans: dict | None = None, n: int = 1):
        def statistics(name: str, z: Tensor) -> list[Tensor]:
            if spans is not None:
                spans[name] = self.span(name, z, n)
            return [(1 - v) * s + v * t for s, t in zip(self.source(name), self.pooled(name, z), strict=True)]

        return statistics

    def grid(self) -> dict[float, float]:
        """v -> cross-entropy of the support when every layer blends with that v."""
        losses = {}
        for v in (step / 10 for step in range(11)):
            _, logits = self.forward(self.images, self.blended(v))
            losses[v] = float(F.cross_entropy(logits, self.labels))
        return losses

    def span(self, name: str, z: Tensor, n: int) -> list[Tensor]:
        """[source, support, U S ...] of means and of deviations, by NumPy."""
        eps = self.layers[name].eps
        columns = [z.mean((2, 3)).T.numpy(), np.sqrt(z.flatten(2).numpy().var(2, ddof=1) + eps).T]
        decomposed = []
        for first, matrix in zip(self.pooled(name, z), columns, strict=True):
            u = first.numpy() / np.linalg.norm(first.numpy())
            decomposed.append(np.linalg.svd(matrix - np.outer(u, u @ matrix), full_matrices=False)[:2])
        if self.released:  # deviations take the singular values of the means
            decomposed[1] = (decomposed[1][0], decomposed[0][1])
        return [
            torch.stack([source, first, *torch.from_numpy(u * s).T[: n - 1]], 1)
            for source, first, (u, s) in zip(self.source(name), self.pooled(name, z), decomposed, strict=True)
        ]

    def fit(self, n: int, epochs: int, lr: float) -> NaiveLCCS:
        losses = self.grid()
        self.v = max(v for v in losses if losses[v] == min(losses.values()))
        self.spans: dict[str, list[Tensor]] = {}
        self.forward(self.images, self.blended(self.v, self.spans, n))
        self.coefficients = {
            name: [
                torch.tensor([1 - self.v, self.v, *[0.0] * (m.shape[1] - 2)]).double().requires_grad_() for m in pair
            ]
            for name, pair in self.spans.items()
        }
        flat = [c for pair in self.coefficients.values() for c in pair]
        first, second = [torch.zeros_like(c) for c in flat], [torch.zeros_like(c) for c in flat]
        for step in range(1, (epochs - 1 if self.released else epochs) + 1):  # the last released step is never used
            with torch.enable_grad():
                _, logits = self.forward(self.images, self.learned)
                gradients = torch.autograd.grad(F.cross_entropy(logits, self.labels), flat)
            for c, g, m, s in zip(flat, gradients, first, second, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                s.mul_(0.999).add_(0.001 * g * g)
                c.sub_(lr * (m / (1 - 0.9**step)) / ((s / (1 - 0.999**step)).sqrt() + 1e-8))
        return self

    def learned(self, name: str, z: Tensor) -> list[Tensor]:
        return [matrix @ c for matrix, c in zip(self.spans[name], self.coefficients[name], strict=True)]

    def cosines(self, images: Tensor) -> Tensor:
        """cos(f, c_k) to the means of the support's features under the learned statistics."""
        features, _ = self.forward(self.images, self.learned)
        centres = torch.stack([features[self.labels == k].mean(0) for k in range(3)])
        queries, _ = self.forward(images, self.learned)
        return torch.stack([F.cosine_similarity(queries, centre[None], dim=1) for centre in centres], 1)


CASES = {
    "paper": {"n": 4, "epochs": 5, "lr": 0.01},
    "paper, one vector": {"n": 1, "epochs": 3, "lr": 0.01},
    "paper, more vectors than exist": {"n": 15, "epochs": 3, "lr": 0.01},
    "released": {"n": 4, "epochs": 5, "lr": 0.01, "variant": "released"},
}


@torch.no_grad()
def both(case: dict, shots: int, classifier: str):
    """(the naive implementation, ours, some queries)."""
    support = make_support(shots)
    model, images, queries = make_tiny().double(), support.images.double(), make_support(4, seed=1).images.double()
    released = case.get("variant") == "released"
    settings = {key: value for key, value in case.items() if key != "variant"}
    naive = NaiveLCCS(model, images, support.labels, released=released).fit(**settings)
    with torch.enable_grad():
        ours = LCCS(classifier=classifier, batch_size=64, **case).fit(model, Target(support))
    return naive, ours, queries


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.no_grad()
def test_statistics_grid_and_gradient_steps_are_the_papers(case):
    naive, ours, queries = both(case, 5, "source")
    assert ours.notes["v"] == naive.v
    assert [point["loss"] for point in ours.notes["grid"]] == pytest.approx(list(naive.grid().values()), abs=1e-9)
    _, expected = naive.forward(queries, naive.learned)
    assert (ours.predictor(queries) - expected).abs().max() < 1e-5
    _, start = naive.forward(queries, naive.blended(naive.v))
    assert (expected - start).abs().max() > 1e-3  # the steps did something
    for name, pair in naive.coefficients.items():
        assert ours.layers[name]["eta"][:2] == pytest.approx(pair[0][:2].tolist(), abs=1e-6)
        assert ours.layers[name]["rho"][:2] == pytest.approx(pair[1][:2].tolist(), abs=1e-6)


@torch.no_grad()
def test_from_five_shots_on_the_nearest_centroid_decides():
    naive, ours, queries = both(CASES["paper"], 5, "auto")
    logits, cosines = ours.predictor(queries), naive.cosines(queries)
    # one factor per image, the length of its features, is all in which they differ
    assert torch.allclose(F.normalize(logits, dim=1), F.normalize(cosines, dim=1), atol=1e-6)
    assert ours.predictor.fc.bias.abs().max() == 0


@torch.no_grad()
def test_at_one_shot_the_source_classifier_stays():
    naive, ours, queries = both(CASES["paper"], 1, "auto")
    _, expected = naive.forward(queries, naive.learned)
    assert (ours.predictor(queries) - expected).abs().max() < 1e-5
    assert torch.equal(ours.predictor.fc.weight, make_tiny().double().fc.weight)

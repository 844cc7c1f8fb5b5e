"""Features before and after a layer: what is drawn, what is standardised by what, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fewshift import FewshiftError
from fewshift.lab.bench.cell import FeatureCell, Sample
from fewshift.lab.bench.features import FeatureGrid, embed, gap, load_grid
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.sweep import sweep
from tests.helpers.bench import DOMAIN, Held, tiny_materials
from tests.helpers.networks import make_tiny

CELL = FeatureCell("toy", "tiny", "two", Sample("here"), Sample("here", "batch", "balanced"), images=30, batch_size=8)


class Recorded(Held):
    """A domain that keeps which images each sample had."""

    def batches(self, batches):
        self.drawn = [*getattr(self, "drawn", []), torch.cat(list(batches))]
        return super().batches(batches)


@pytest.fixture
def seen(monkeypatch):
    """The features that would be embedded, before and after the layer."""
    features = []

    class FirstTwo:
        def __init__(self, *_, **__):
            pass

        def fit_transform(self, rows):
            features.append(torch.tensor(rows))
            return rows[:, :2]

    monkeypatch.setattr("sklearn.manifold.TSNE", FirstTwo)
    return features


def test_samples_of_one_domain_share_no_image_and_balanced_ones_have_equal_classes(seen):
    domain = Recorded(DOMAIN.pictures, DOMAIN.labels)
    result = embed(CELL, Materials(lambda _: make_tiny(), lambda _: domain))
    first, second = domain.drawn
    assert result["labels"] == [DOMAIN.labels[first].tolist(), DOMAIN.labels[second].tolist()]
    assert not set(first.tolist()) & set(second.tolist())
    assert len(first) == len(second) == 30
    assert DOMAIN.labels[second].bincount().tolist() == [10, 10, 10]


def last_batchnorm(model: nn.Module) -> str:
    return [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)][-1]


@pytest.mark.parametrize("statistics", ["source", "batch"])
def test_features_are_what_the_layer_itself_gives_before_its_weights(seen, statistics):
    model, domain = make_tiny(), Recorded(DOMAIN.pictures, DOMAIN.labels)
    layer = model.get_submodule(last_batchnorm(model))
    cell = replace(CELL, first=Sample("here", statistics))
    embed(cell, Materials(lambda _: model, lambda _: domain))
    indices = domain.drawn[0]
    before, after = (features[: len(indices)].float() for features in seen)

    inputs = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    expected = []
    with torch.no_grad():
        for batch in indices.split(8):
            model(DOMAIN.pictures[batch])
            plain = nn.BatchNorm2d(layer.num_features, eps=layer.eps, affine=False)
            plain.load_state_dict(
                {key: tensor for key, tensor in layer.state_dict().items() if "running" in key or "num" in key}
            )
            expected.append(plain.train(statistics == "batch")(inputs[-1]).mean((2, 3)))
    handle.remove()
    torch.testing.assert_close(before, torch.cat(inputs).mean((2, 3)))
    torch.testing.assert_close(after, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_the_gap_is_the_distance_within_classes_in_units_of_their_spread():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(2000) % 2
    first = torch.randn(2000, 5, generator=generator) + 10 * labels[:, None]
    moved = torch.randn(2000, 5, generator=generator) + 10 * labels[:, None]
    assert gap(first, moved, (labels, labels)) == pytest.approx(0, abs=0.1)
    moved[:, 0] += 5**0.5  # one spread of five features
    assert gap(first, moved, (labels, labels)) == pytest.approx(1, abs=0.1)
    assert gap(first, moved, (labels, 1 - labels)) > 9  # classes exchanged


def test_a_comparison_is_a_record_like_any_other(tmp_path):
    heard = []
    sweep([CELL], tmp_path, tiny_materials, (), workers=1, tell=heard.append)
    result = heard[0]["result"]
    assert [len(sample) for sample in result["before"]] == [len(sample) for sample in result["labels"]] == [30, 30]
    assert json.loads(json.dumps(result)) == result
    assert heard[0]["key"] == CELL.key != replace(CELL, seed=1).key
    heard.clear()
    sweep([CELL], tmp_path, tiny_materials, (), workers=1, tell=heard.append)
    assert not heard
    again = embed(CELL, tiny_materials())
    assert again["before"] == result["before"]


TEXT = """
title = "Two"
dataset = "toy"
source = "tiny"
images = 30

[[comparisons]]
label = "one"
first = {domain = "a"}
second = {domain = "b", statistics = "batch", classes = "balanced"}
"""


def test_a_file_with_comparisons_is_a_feature_grid(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text(TEXT)
    grid = load_grid(path)
    assert isinstance(grid, FeatureGrid)
    assert grid.cells() == [FeatureCell("toy", "tiny", "one", Sample("a"), Sample("b", "batch", "balanced"), images=30)]
    path.write_text('title="t"\nsource="s"\ndataset="d"\ntargets=["a"]\nseeds=[0]\n[[rows]]\nmethod="source"\n')
    assert isinstance(load_grid(path), Grid)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('title = "Two"', "", "lacks title"),
        ("images = 30", "image = 30", "'image' in a comparison"),
        ('first = {domain = "a"}', "", "without first"),
        ('{domain = "a"}', '{statistics = "batch"}', "names no domain"),
        ('"batch"', '"magic"', "'magic' is unknown"),
        ('label = "one"', "", "without label"),
    ],
)
def test_a_mistake_is_named(tmp_path, old, new, sentence):
    path = tmp_path / "f.toml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(FewshiftError, match=sentence):
        load_grid(path)


def test_a_layer_that_is_none_is_refused():
    with pytest.raises(FewshiftError, match="'conv' is no BatchNorm layer"):
        embed(replace(CELL, layer="conv"), tiny_materials())

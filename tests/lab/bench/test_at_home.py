"""Networks at home: images of their own domains that they were not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from fewshift import FewshiftError
from fewshift.images.preprocess import Preprocess
from fewshift.lab.bench import materials
from fewshift.lab.bench.cell import OWN_SOURCE, Cell
from fewshift.lab.datasets import digits
from fewshift.lab.datasets.catalog import COLLECTIONS
from fewshift.lab.datasets.copies import load_validation
from fewshift.models.cards import Card, read_card, with_card
from tests.helpers.networks import make_tiny

PACS = COLLECTIONS["pacs"]
SMALL = Preprocess(6, 6, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Two domains of PACS with a list each, whose labels are from 1 and whose images have another ending by now."""
    (tmp_path / "pacs_splits").mkdir()
    for shade, domain in enumerate(("cartoon", "sketch")):
        lines = []
        for number, label in enumerate((7, 1, 2)):
            file = tmp_path / "pacs" / domain / PACS.classes[label - 1] / f"{number}.jpg"
            file.parent.mkdir(parents=True)
            Image.new("RGB", (6, 6), (40 * label, 100 * shade, 0)).save(file)
            lines.append(f"{domain}/{PACS.classes[label - 1]}/{number}.png {label}\n")
        (tmp_path / "pacs_splits" / f"{domain}_crossval_kfold.txt").write_text("".join(lines))
    return tmp_path


def test_a_published_list_tells_which_images_were_not_trained_on(copy):
    validation = load_validation("pacs", "sketch", copy, SMALL)
    assert validation.labels.tolist() == [6, 0, 1]
    assert [file.name for file in validation.source] == ["0.jpg", "1.jpg", "2.jpg"]
    assert load_validation("pacs", "sketch", copy / "pacs", SMALL).source == validation.source  # its own folder, given
    (copy / "pacs_splits" / "sketch_crossval_kfold.txt").unlink()
    with pytest.raises(FewshiftError, match=r"sketch_crossval_kfold.txt is not in .*pacs_splits: put it there"):
        load_validation("pacs", "sketch", copy, SMALL)
    with pytest.raises(FewshiftError, match=r"'photo' of PACS .* is not in"):
        load_validation("pacs", "photo", copy, SMALL)
    with pytest.raises(FewshiftError, match="Office-31 has no published validation lists"):
        load_validation("office31", "dslr", copy, SMALL)


def test_a_card_tells_which_domains_are_a_networks_own(tmp_path):
    card = tmp_path / "net.json"
    card.write_text(json.dumps({"sources": ["sketch", "photo"], "recipe": {"held_out": 0.1}}))
    assert (read_card(card).sources, read_card(card).held_out) == (("sketch", "photo"), 0.1)
    card.write_text(json.dumps({"sources": "all of them", "recipe": "mine"}))  # a note
    assert (read_card(card).sources, read_card(card).held_out) == ((), None)


def test_at_home_a_network_has_the_lists_of_its_own_domains_one_after_the_other(copy, monkeypatch):
    (copy / "net.json").write_text(json.dumps({"sources": ["sketch", "cartoon"]}))
    monkeypatch.setattr(materials.models, "load", lambda *_: with_card(make_tiny(7), Card("net", PACS.classes, SMALL)))
    shop = materials.open_materials(str(copy), str(copy))
    domain = shop.domain(Cell("pacs", "net", OWN_SOURCE, "source"))
    assert domain.labels.tolist() == [6, 0, 1] * 2
    expected = [load_validation("pacs", name, copy, SMALL) for name in ("cartoon", "sketch")]
    every = torch.arange(3)
    assert torch.equal(domain.images(torch.arange(6)), torch.cat([part.images(every) for part in expected]))


def test_a_list_that_the_card_names_comes_before_published_ones(copy, monkeypatch):
    (copy / "seen-by-nobody.txt").write_text("sketch/person/0.jpg 6\ncartoon/elephant/2.jpg 1\n")
    (copy / "net.json").write_text(json.dumps({"sources": ["sketch"], "validation": "seen-by-nobody.txt"}))
    monkeypatch.setattr(materials.models, "load", lambda *_: with_card(make_tiny(7), Card("net", PACS.classes, SMALL)))
    domain = materials.open_materials(str(copy), str(copy)).domain(Cell("pacs", "net", OWN_SOURCE, "source"))
    assert domain.labels.tolist() == [6, 1]


def test_what_training_set_aside_is_at_home():
    domain = materials.held_out("digits", Card(sources=("uci",), held_out=0.2), None, None)
    assert torch.equal(domain.labels, digits.split("uci")[1][1])


@pytest.mark.parametrize("place", ["mnist", "uci"])
def test_digits_at_home_are_those_the_network_never_saw(place):
    domain = materials.open_materials(None, None).domain(Cell("digits", place, OWN_SOURCE, "source"))
    images, labels = digits.split(place)[1]
    assert torch.equal(domain.labels, labels)
    torch.testing.assert_close(domain.images(torch.arange(9)), digits.normalise(images[:9]))


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        (Card(), "domains of PACS .*card"),
        (Card(path=Path("net.json"), sources=("north",)), "add them to net.json, such as"),
        (Card(path=Path("net.json"), sources=("photo",), held_out=0.0), "every source image was trained on"),
    ],
)
def test_a_network_that_cannot_be_at_home_says_why(card, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        materials.held_out("pacs", card, None, None)

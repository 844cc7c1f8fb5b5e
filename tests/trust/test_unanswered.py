"""An answer that is not finite is no answer: it is named, and never counted as class 0."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import fewshift
from fewshift import FewshiftError, Preprocess
from fewshift.core.outputs import unanswered
from fewshift.trust.held_out import ImageAnswers
from fewshift.trust.suspects import suspected
from tests.helpers.networks import Street, Tiny, make_support, scenes, unsettle
from tests.helpers.pictures import picture, save

STEPS = Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
NAMES = ("ant", "bee", "cat")
FACT = "output is NaN or infinite"


class Overflowing(Tiny):
    """Has finite weights, and no finite answer to bright images."""

    def forward(self, images):
        bright = (images.mean((1, 2, 3)) > 1.9)[:, None]
        return torch.where(bright, super().forward(images) * 1e38 * 1e38, super().forward(images))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return unsettle(Overflowing())


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for index in range(4):
        save(tmp_path / "photos" / f"{index}.png", picture(8, 8, seed=index))
    white = picture(8, 8).point(lambda _: 255)
    save(tmp_path / "photos" / "white.png", white)
    return tmp_path / "photos"


@pytest.mark.parametrize("out", ["rows.csv", "rows"])
def test_predict_leaves_such_an_image_out_and_names_it(network, photos, tmp_path, out):
    result = fewshift.predict(network, photos, preprocess=STEPS, classes=NAMES, out=tmp_path / out, batch_size=2)
    assert [image.file.name for image in result.broken] == ["white.png"]
    assert FACT in result.broken[0].error
    assert "white.png" in result.broken[0].error
    assert result.asked == 5
    if out.endswith("csv"):
        with (tmp_path / out).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [Path(row["file"]).name for row in rows] == ["0.png", "1.png", "2.png", "3.png"]
        assert not any(row["probability"] == "nan" for row in rows)


def test_predict_stops_there_if_it_is_strict(network, photos):
    with pytest.raises(FewshiftError, match=rf"white\.png: the network's {FACT}"):
        fewshift.predict(network, photos, preprocess=STEPS, classes=NAMES, strict=True)


@pytest.mark.parametrize(
    "call",
    [
        fewshift.evaluate,
        lambda network, labelled: fewshift.learning_curve(network, labelled, method="adabn", draws=1),
    ],
    ids=["evaluate", "learning_curve"],
)
def test_no_score_counts_it(network, call):
    support = make_support()
    support.images[-1] = 5.0
    with pytest.raises(FewshiftError, match=f"{FACT} for 1 image:"):
        call(network, (support.images, support.labels))


def test_a_comparison_has_no_number_for_it(network):
    support = make_support()
    support.images[-1] = 5.0
    compared = fewshift.compare(network, (support.images, support.labels), ["source", "adabn"])
    assert compared.rows[0].gain is None
    assert FACT in compared.rows[0].evidence.error


def test_adapt_says_so_in_its_verdict(network):
    support = make_support()
    support.images[-1] = 5.0
    result = fewshift.adapt(network, (support.images, support.labels), method="adabn")
    assert not result.accepted
    assert FACT in result.reason


def test_pixels_are_answered_alike():
    class Bright(Street):
        def forward(self, images):
            return {name: logits * 1e38 * 1e38 for name, logits in super().forward(images).items()}

    torch.manual_seed(0)
    with pytest.raises(FewshiftError, match="NaN"):
        fewshift.evaluate(unsettle(Bright()), scenes(3))


def test_minus_infinity_rules_out_a_class():
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[0, 1.0], [-inf, 0], [inf, 0], [nan, 0], [-inf, -inf]])
    assert unanswered(logits).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("method", ["auto", "lccs"])
def test_a_network_that_never_answers_is_one_sentence(method):
    class Silent(Tiny):
        def forward(self, images):
            return super().forward(images) * 1e38 * 10

    network = unsettle(Silent())
    with pytest.raises(FewshiftError, match=r"the network's logits are not finite|the loss is NaN for every blend"):
        fewshift.adapt(network, make_support(), method=method)


def test_held_out_answers_that_are_none_are_one_sentence():
    index = torch.arange(2)
    held = ImageAnswers(index, index, index, torch.full((2, 3), torch.inf), torch.full((2, 3), torch.nan))
    with pytest.raises(FewshiftError, match=FACT + " for held-out images, before and after adaptation"):
        suspected([held])

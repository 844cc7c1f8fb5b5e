"""Judged cells: the guard's verdict beside the truth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fewshift import Auto, FewshiftError, adapt
from fewshift.core.draws import draw_support
from fewshift.core.support import Support
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.damage import damaged
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.run import run, split
from fewshift.trust.guard import Rule, Verdict
from tests.helpers.bench import DOMAIN, tiny_materials
from tests.helpers.networks import make_tiny

FAST = {"epochs": 1}
CELL = Cell("toy", "tiny", "place", "auto", FAST, shots=5, largest_support=5, validate="cv")


def accuracy(model: torch.nn.Module, cell: Cell = CELL) -> float:
    test = split(DOMAIN, cell)[1]
    with torch.no_grad():
        return float((model(DOMAIN.pictures[test]).argmax(1) == DOMAIN.labels[test]).double().mean())


@pytest.mark.parametrize("damage", [None, "wrong labels", "two classes"])
def test_a_judged_cell_is_what_adapt_gives_beside_the_truth(damage):
    cell = replace(CELL, damage=damage)
    result = run(cell, tiny_materials())
    drawn = draw_support(DOMAIN.labels, 5, 0)
    labels = DOMAIN.labels[drawn]
    if damage:
        drawn, labels = damaged(drawn, labels, damage, 3, 0)
        assert result["support_labels"] == labels.tolist()
    expected = adapt(make_tiny(), Support(DOMAIN.pictures[drawn], labels), method=Auto(**FAST))
    verdict = result["trust"]
    assert verdict["accuracy"] == pytest.approx(
        {
            "source": accuracy(make_tiny()),
            "candidate": accuracy(expected.candidate),
            "returned": accuracy(expected.model),
        }
    )
    assert result["accuracy"] == pytest.approx(verdict["accuracy"]["returned"])
    assert (verdict["accepted"], verdict["reason"]) == (expected.accepted, expected.reason)
    assert verdict["gain"]["point"] == pytest.approx(expected.gain.point)
    assert verdict["gain"]["low"] == pytest.approx(expected.gain.low)
    assert (verdict["gain"]["images"], verdict["gain"]["wins"]) == (len(drawn), expected.gain.wins)
    assert verdict["chosen"] == expected.choice.chosen
    assert result["support"] == drawn.tolist()
    assert not set(result["support"]) & set(split(DOMAIN, cell)[1].tolist())
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_picture_that_a_data_set_has_twice_is_judged_once():
    drawn = draw_support(DOMAIN.labels, 5, 0)
    same = (drawn[DOMAIN.labels[drawn] == 0][:2]).tolist()
    pictures = DOMAIN.pictures.clone()
    pictures[same[1]] = pictures[same[0]]
    result = run(CELL, Materials(lambda _: make_tiny(), lambda _: replace(DOMAIN, pictures=pictures)))
    assert result["trust"]["gain"]["images"] == len(drawn) - 1


def test_what_the_guard_refuses_is_answered_by_the_source_network(monkeypatch):
    monkeypatch.setattr("fewshift.api.decide", lambda *_, **__: Verdict(False, Rule.CALLABLE))
    result = run(CELL, tiny_materials())
    source = run(replace(CELL, method="source", settings={}, shots=None, validate=None), tiny_materials())
    for score in ("accuracy", "macro_f1", "macro_f1_with_support", "tally"):
        assert result[score] == source[score]
    accuracy = result["trust"]["accuracy"]
    assert accuracy["returned"] == accuracy["source"] == source["accuracy"] != accuracy["candidate"]
    assert result["trust"]["accepted"] is False


def test_accuracies_are_those_of_the_images_that_the_scores_are_of():
    cell = replace(CELL, condition=Condition("sequential", 10, 8))
    result = run(cell, tiny_materials())
    assert sum(result["realised_counts"]) < len(split(DOMAIN, cell)[1])  # a long tail leaves images out
    assert result["trust"]["accuracy"]["returned"] == pytest.approx(result["accuracy"])


def test_the_source_network_is_asked_about_an_image_once():
    asked: list[list[int]] = []

    def ask(indices: torch.Tensor) -> torch.Tensor:
        asked.append(indices.tolist())
        return torch.stack([indices, indices + 1], 1).double()

    shop = tiny_materials()
    for wanted in ([3, 1, 2], [2, 4, 3]):
        answers = shop.source_answers(CELL, torch.tensor(wanted), ask)
        assert answers.tolist() == [[index, index + 1] for index in wanted]
    assert asked == [[3, 1, 2], [4]]
    shop.source_answers(replace(CELL, target="elsewhere"), torch.tensor([1]), ask)
    assert asked[-1] == [1]


def test_answers_that_are_kept_change_no_result():
    shop = tiny_materials()
    run(replace(CELL, shots=1), shop)
    together, alone = run(replace(CELL, seed=1), shop), run(replace(CELL, seed=1), tiny_materials())
    assert together["trust"] == alone["trust"]
    assert together["tally"] == alone["tally"]


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (replace(CELL, method="adabn", settings={}, shots=None), "no support to damage"),
        (replace(CELL, damage="blur"), "damage='blur' is unknown"),
    ],
)
def test_a_cell_that_cannot_be_judged_says_why(cell, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        run(cell, tiny_materials())


def test_pixels_are_not_judged_here():
    shop = Materials(lambda _: make_tiny(), lambda _: DOMAIN, lambda _: object())
    with pytest.raises(FewshiftError, match="labels for pixels"):
        run(CELL, shop)

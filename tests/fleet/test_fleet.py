"""A fleet is `adapt` for every place: nothing done twice, nothing stopped by another, nothing left that is not true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fewshift
from fewshift import Delta, FewshiftError, Fleet
from fewshift.fleet import work
from fewshift.jobs.ledger import alone_in
from tests.helpers.fleet import CLASSES, DEADLY, STEPS, DeadlySteps, fill
from tests.helpers.networks import make_tiny, same_state
from tests.helpers.pictures import picture, save

NAMES = ("door", "gate", "yard")


@pytest.fixture
def places(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        fill(tmp_path / "places" / name, seed)
    return tmp_path / "places"


def adapt(places: Path, model: nn.Module | None = None, **options: Any) -> Fleet:
    options = {"method": "adabn", "accept": "always", "preprocess": STEPS, **options}
    return fewshift.adapt_sites(model or make_tiny(), places, places.parent / "sites", **options)


def delta_of(places: Path, name: str) -> Delta:
    return Delta.load(places.parent / "sites" / f"{name}.safetensors")


def alone(place: Path, **options: Any) -> fewshift.Adaptation:
    options = {"method": "adabn", "accept": "always", "preprocess": STEPS, **options}
    return fewshift.adapt(make_tiny(), place, **options)


def same(one: Delta, other: Delta) -> bool:
    return same_state(one.bits, other.bits) and one.classes == other.classes


def test_every_place_gets_what_adapt_gives_it(places: Path) -> None:
    fleet = adapt(places)
    assert {row.place for row in fleet.rows} == set(NAMES)
    for row in fleet.rows:
        expected = alone(places / row.place)
        assert same(delta_of(places, row.place), expected.delta)
        assert row.images == 12
        assert row.verdict == expected.recommendation.advice.value
        assert expected.gain is not None
        assert row.gain == pytest.approx((expected.gain.point, expected.gain.low, expected.gain.high), abs=0.01)


def test_what_is_done_is_left_alone_until_something_changes(places: Path) -> None:
    assert adapt(places).fresh == 3
    again = adapt(places)
    assert again.fresh == 0
    assert [row.verdict for row in again.rows] == [row.verdict for row in adapt(places).rows]
    save(places / "gate/ant/0.png", picture(8, 8, seed=9))
    assert [row.place for row in adapt(places).rows if row.fresh] == ["gate"]
    (places.parent / "sites/yard.safetensors").unlink()
    assert [row.place for row in adapt(places).rows if row.fresh] == ["yard"]
    assert adapt(places, seed=1).fresh == 3
    assert adapt(places, make_tiny(seed=3), seed=1).fresh == 3


def test_a_place_that_fails_stops_no_other_comes_first_and_is_tried_again(places: Path) -> None:
    (places / "yard/bee/1.png").write_bytes(b"no image")
    fill(places / "gate", 5, ("bee",))
    (places / "gate/bee").rename(places / "gate/wasp")
    fleet = adapt(places)
    assert [(row.place, row.verdict) for row in fleet.rows[:2]] == [("gate", "failed"), ("yard", "failed")]
    assert "wasp" in fleet.rows[0].note
    assert f"{places / 'yard/bee/1.png'} is not an image" in fleet.rows[1].note
    assert fleet.rows[2].delta == places.parent / "sites/door.safetensors"
    save(places / "yard/bee/1.png", picture(8, 8))
    assert {row.place for row in adapt(places).rows if row.fresh} == {"gate", "yard"}


def test_a_rejected_place_has_no_delta_and_keeps_none_of_an_earlier_run(places: Path) -> None:
    adapt(places)
    fleet = adapt(places, accept=1000.0)
    assert len(fleet.rejected) == 3
    assert not list((places.parent / "sites").glob("*.safetensors"))


def test_a_place_without_a_class_does_not_shift_the_numbers_of_the_others(places: Path) -> None:
    fill(places / "roof", 4, ("ant", "cat"))
    adapt(places)
    assert same(delta_of(places, "roof"), alone(places / "roof", classes=CLASSES).delta)


def test_a_list_of_labels_is_a_place_too(places: Path) -> None:
    rows = [f"door/{name}/{index}.png,{name}" for name in CLASSES for index in range(4)]
    (places / "listed.csv").write_text("\n".join(["path,label", *rows]))
    assert adapt(places).fresh == 4
    assert same_state(delta_of(places, "listed").bits, delta_of(places, "door").bits)
    save(places / "door/ant/0.png", picture(8, 8, seed=9))
    assert {row.place for row in adapt(places).rows if row.fresh} == {"listed", "door"}


def test_workers_give_the_same_load_the_network_once_and_survive_a_deadly_place(places: Path, tmp_path: Path) -> None:
    save(places / "gate/ant/0.png", picture(*DEADLY))
    loads = tmp_path / "loads"
    bad, *others = adapt(places, workers=2, preprocess=DeadlySteps(loads)).rows
    assert (bad.place, bad.verdict) == ("gate", "failed")
    assert "died three times in this place" in bad.note
    assert [row.place for row in others] == ["door", "yard"]
    for row in others:
        assert same_state(delta_of(places, row.place).bits, alone(places / row.place).delta.bits)
    processes = loads.read_text().split()
    assert len(set(processes)) == len(processes) <= 2 + 3  # two workers, and one for each death


def test_a_network_that_cannot_travel_is_one_sentence(places: Path) -> None:
    class Local(nn.Sequential):
        pass

    model = Local(make_tiny()).eval()
    with pytest.raises(FewshiftError, match=r"Local cannot be sent to other processes .*one worker"):
        adapt(places, model, workers=2)
    assert adapt(places, model).fresh == 3


def test_two_writers_in_one_folder_are_one_too_many(places: Path) -> None:
    with alone_in(places.parent / "sites"), pytest.raises(FewshiftError, match="another process is writing into"):
        adapt(places)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"method": "tent"}, "tent does not learn from labelled images"),
        ({"method": "late-fusion"}, "late-fusion returns a .*no delta"),
        ({"validate": "others/"}, "for one place"),
        ({"unlabelled": "stream/"}, "unlabelled cannot be the same for every place"),
        ({"engine": "steam"}, "no engine 'steam'"),
        ({"workers": 0}, "workers=0"),
        ({"accept": "maybe"}, "accept='maybe'"),
    ],
)
def test_options_that_fit_no_fleet_are_refused_before_the_work(
    places: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], facts: str
) -> None:
    monkeypatch.setattr(work, "adapt", None)
    with pytest.raises(FewshiftError, match=facts):
        adapt(places, **options)


def test_folders_that_are_no_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FewshiftError, match="has no places"):
        adapt(tmp_path / "empty")
    with pytest.raises(FewshiftError, match=r"as one place has: .*--support"):
        adapt(fill(tmp_path / "photos", 0))
    with pytest.raises(FewshiftError, match="no such folder"):
        adapt(tmp_path / "nowhere")


def test_the_network_and_the_random_state_stay_as_they_are(places: Path) -> None:
    model, before = make_tiny(), torch.random.get_rng_state()
    adapt(places, model)
    assert same_state(model.state_dict(), make_tiny().state_dict())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_page_has_every_place_and_escapes_their_names(places: Path, tmp_path: Path) -> None:
    (places / "gate").rename(places / "<gate> & co")
    (places / "yard/bee/1.png").write_bytes(b"no image")
    fleet = adapt(places)
    page = fleet.report(tmp_path / "fleet.html").read_text()
    assert "3 places for Tiny" in page
    assert "&lt;gate&gt; &amp; co" in page
    assert "<gate>" not in page
    assert "1 failed" in page
    assert [row["place"] for row in fleet.table()] == [row.place for row in fleet.rows]

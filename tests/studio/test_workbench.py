"""Images, labels and adaptations, without a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import fewshift
from fewshift.errors import FewshiftError
from fewshift.images.label_lists import read_label_list
from fewshift.studio import decisions
from fewshift.studio.adapt_task import AdaptTask
from fewshift.studio.adapting import Adaptations, changed_first
from fewshift.studio.gallery import Gallery
from fewshift.studio.labels_store import ConflictError
from fewshift.studio.tasks import AnswerTask, CurveTask, LabelledImages, LookTask
from fewshift.studio.thumbnails import SmallPicture, Thumbnails, small_picture
from fewshift.studio.workbench import Workbench
from tests.helpers.labeller import CLASSES, STEPS, labeller, paint
from tests.helpers.studio import write_digits


def messages_of(task: Any) -> dict[str, list[tuple[Any, ...]]]:
    """What a task sends, by its first word."""
    heard: dict[str, list[tuple[Any, ...]]] = {}
    task.work(lambda message: heard.setdefault(message[0], []).append(message[1:]))
    return heard


# --- images


def test_numbers_stay_with_their_files(tmp_path: Path) -> None:
    write_digits(tmp_path, 1)
    gallery = Gallery(tmp_path)
    before = {image.name: image.number for image in gallery.images}
    (tmp_path / "a-first.png").write_bytes((tmp_path / "form-000.png").read_bytes())
    assert gallery.look_again() == 1
    assert {image.name: image.number for image in gallery.images} == before | {"a-first.png": 10}


def test_an_empty_folder_waits_for_images(network: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    bench = Workbench(network, tmp_path / "photos")
    assert "no images" in bench.gallery.note
    assert bench.next("t", "spread", 3) == []
    write_digits(tmp_path / "photos", 1)
    assert bench.gallery.look_again() == 10
    assert len(bench.next("t", "spread", 3)) == 3
    bench.close()


def test_an_image_that_one_tab_was_offered_is_not_offered_to_another(bench: Workbench) -> None:
    first = {image["number"] for image in bench.next("one", "spread", 8)}
    second = {image["number"] for image in bench.next("two", "random", 8)}
    assert len(first) == len(second) == 8
    assert not first & second


def test_a_decided_image_does_not_come_again(bench: Workbench) -> None:
    for state, label in (("labelled", "3"), ("skipped", None), ("none of these", None)):
        for image in bench.next("t", "random", 8):
            bench.mark(image["number"], state, label, image["version"], "t")
    rest = [image for _ in range(3) for image in bench.next("t", "random", 8)]
    assert all(image["state"] == "open" for image in rest)
    assert bench.tally() == {"labelled": 8, "skipped": 8, "none of these": 8, "open": 16, "all": 40}


def test_a_change_that_another_tab_made_is_not_overwritten(bench: Workbench) -> None:
    bench.mark(0, "labelled", "3", 0, "one")
    with pytest.raises(ConflictError):
        bench.mark(0, "labelled", "5", 0, "two")
    assert bench.counts()["3"] == 1


def test_a_label_is_a_class_of_the_network(bench: Workbench) -> None:
    with pytest.raises(FewshiftError, match="none of the network's classes"):
        bench.mark(0, "labelled", "cat", 0, "t")


def test_pages_of_images_are_filtered_and_sorted(bench: Workbench) -> None:
    bench.mark(7, "labelled", "3", 0, "t")
    assert [image["number"] for image in bench.listing(0, 10, show="labelled")["images"]] == [7]
    assert bench.listing(0, 10, label="3")["total"] == 1
    assert bench.listing(0, 10, query="FORM-01")["total"] == 10
    page = bench.listing(30, 20)
    assert (page["total"], len(page["images"])) == (40, 10)


@pytest.mark.parametrize("out", ["photos/studio", "photos"])
def test_labels_do_not_go_among_the_images(network: nn.Module, tmp_path: Path, out: str) -> None:
    write_digits(tmp_path / "photos", 1)
    with pytest.raises(FewshiftError, match="among the images"):
        Workbench(network, tmp_path / "photos", out=tmp_path / out)


def test_a_network_that_labels_pixels_needs_scenes(tmp_path: Path) -> None:
    write_digits(tmp_path / "photos", 1)
    with pytest.raises(FewshiftError, match="no images/ and labels/"):
        Workbench(labeller(), tmp_path / "photos", preprocess=STEPS)


def test_thumbnails_are_small_upright_and_bounded(tmp_path: Path) -> None:
    photo = Image.new("RGB", (900, 300), "red")
    exif = photo.getexif()
    exif[0x0112] = 6  # turned by a quarter
    photo.save(tmp_path / "turned.jpg", exif=exif)
    made = small_picture(tmp_path / "turned.jpg", "small")
    (tmp_path / "made.jpg").write_bytes(made.content)
    with Image.open(tmp_path / "made.jpg") as small:
        assert small.size == (80, 240)
    kept = Thumbnails(most_bytes=25)
    calls: list[int] = []
    for key in (1, 1, 2, 3, 3, 1):
        kept.get(key, lambda key=key: calls.append(key) or SmallPicture(b"x" * 10, ""))
    assert calls == [1, 2, 3, 1]


# --- adapting


@pytest.fixture(scope="module")
def adapted(
    network: nn.Module, digits_folder: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Workbench, AdaptTask, dict[str, list[tuple[Any, ...]]]]:
    """An adaptation to twenty labels, in this process."""
    folder, truth = digits_folder
    bench = Workbench(network, folder, out=tmp_path_factory.mktemp("adapted") / "out")
    chosen = [name for label in range(10) for name in [n for n, own in truth.items() if own == str(label)][:2]]
    for name in chosen:
        number = bench.gallery.number_of(folder / name)
        bench.mark(number, "labelled", truth[name], 0, "t")
    rows = tuple(bench.labelled_files().items())
    place = decisions.new_folder(bench.out, "camera 7/ä")
    task = AdaptTask(bench.parcel, LabelledImages(rows), (), (), place, (("seed", 0),))
    messages = messages_of(task)
    bench.close()
    return bench, task, messages


def test_an_adaptation_is_what_adapt_gives(adapted: Any, network: nn.Module) -> None:
    bench, task, messages = adapted
    result = fewshift.adapt(network, list(task.labelled.rows), classes=bench.classes, seed=0)
    outcome = decisions.opened_outcome(task.folder)
    assert outcome.folder.name == "camera-7-ä"
    assert outcome.facts["recommendation"] == list(result.recommendation.lines)
    assert json.loads(json.dumps(messages["result"][0][0])) == outcome.facts
    delta, expected = fewshift.Delta.load(outcome.delta), result.candidate_delta
    assert delta.bits.keys() == expected.bits.keys()
    assert all(torch.equal(delta.bits[name], expected.bits[name]) for name in expected.bits)
    assert outcome.report.read_text("utf-8").startswith("<!doctype html>")


def test_the_labels_beside_a_delta_are_those_it_was_made_from(adapted: Any) -> None:
    _, task, _ = adapted
    rows = read_label_list(task.folder / "labels.csv").rows
    assert {file.resolve(): label for file, label in rows} == {f.resolve(): label for f, label in task.labelled.rows}


def test_progress_rises_to_the_end(adapted: Any) -> None:
    shares = [done for done, _ in adapted[2]["share"]]
    assert shares == sorted(shares)


def test_both_networks_are_asked_about_the_other_images(adapted: Any, network: nn.Module) -> None:
    bench, task, _ = adapted
    images = tuple((image.number, image.file) for image in bench.gallery.images[:5])
    delta = decisions.opened_outcome(task.folder).delta
    before, after = messages_of(AnswerTask(bench.parcel, images)), messages_of(LookTask(bench.parcel, delta, images))
    asked = ((before["answers"], network), (after["after"], fewshift.apply(network, delta)))
    for messages, model in asked:
        expected = fewshift.predict(model, [file for _, file in images], classes=bench.classes)
        numbers, probabilities = messages[0][:2]
        assert numbers == [number for number, _ in images]
        assert [bench.classes[row.argmax()] for row in probabilities] == [row.name for row in expected.rows]
    assert before["shift"][0][0] in (True, False)


def test_flips_come_first_and_the_surest_of_them() -> None:
    before = {1: (0, 0.9), 2: (0, 0.6), 3: (1, 0.5), 4: (0, 0.9)}
    after = {
        1: torch.tensor([0.3, 0.7]),
        2: torch.tensor([0.1, 0.9]),
        3: torch.tensor([0.1, 0.9]),
        4: torch.tensor([0.88, 0.12]),
    }
    assert changed_first(before, {number: row.numpy() for number, row in after.items()}) == [2, 1, 3, 4]


def test_what_was_decided_is_written_beside_the_delta(adapted: Any, tmp_path: Path) -> None:
    bench, task, _ = adapted
    outcome = decisions.opened_outcome(task.folder)
    assert outcome.decision is None
    decision = decisions.keep(outcome, bench.out)
    assert json.loads((task.folder / "decision.json").read_text("utf-8")) == decision == outcome.decision
    assert decision["decision"] == "kept"
    assert decision["delta"] == outcome.delta.name
    assert decision["against_advice"] is not outcome.facts["accepted"]
    with pytest.raises(FewshiftError, match="was kept"):
        decisions.throw_away(outcome, bench.out)
    (task.folder / "decision.json").unlink()


def test_what_is_thrown_away_is_gone_and_remembered(tmp_path: Path) -> None:
    facts = {"advice": "recommended", "recommendation": [], "accepted": True, "gain": None, "labels": 3, "classes": []}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text(json.dumps(facts))
    outcome = decisions.last_outcome(tmp_path)
    assert outcome is not None
    decisions.throw_away(outcome, tmp_path)
    assert not (tmp_path / "a").exists()
    line = json.loads((tmp_path / "decisions.jsonl").read_text())
    assert (line["decision"], line["against_advice"]) == ("thrown away", True)
    assert decisions.last_outcome(tmp_path) is None


@pytest.mark.parametrize("name", ["", "  ", "..", "../../up", "a/b", ".hidden"])
def test_a_name_never_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = decisions.new_folder(tmp_path, name)
    assert folder.parent == tmp_path
    assert not folder.name.startswith(".")


def test_without_labels_there_is_nothing_to_adapt_to(bench: Workbench) -> None:
    work = Adaptations(bench)
    with pytest.raises(FewshiftError, match="no labels"):
        work.adapt("x")
    with pytest.raises(FewshiftError, match="adapt first"):
        work.keep()
    assert work.result() is None


def test_a_learning_curve_is_what_fewshift_measures(adapted: Any) -> None:
    bench, task, _ = adapted
    facts = messages_of(CurveTask(bench.parcel, task.labelled, (("method", "adabn"),)))["result"][0][0]
    assert [point["shots"] for point in facts["points"]] == [1]
    assert facts["words"]


# --- pixels


def test_scenes_are_shown_and_adapted(tmp_path: Path) -> None:
    paint(tmp_path / "street", 5, seed=0)
    extra = tmp_path / "street" / "images" / "unlabelled.png"
    extra.write_bytes(next((tmp_path / "street" / "images").iterdir()).read_bytes())
    bench = Workbench(labeller(), tmp_path / "street", preprocess=STEPS, classes=CLASSES)
    assert bench.scenes is not None
    assert [bench.record(image)["scene"] for image in bench.gallery.images].count(False) == 1
    work = Adaptations(bench)
    task = AdaptTask(bench.parcel, work._labelled(), ((5, extra),), (), bench.out / "street", (("method", "adabn"),))
    messages_of(task)
    outcome = decisions.opened_outcome(bench.out / "street")
    assert outcome.facts["labels"] == 5
    assert outcome.scenes == ["unlabelled.png"]
    for when in ("before", "after"):
        with Image.open(outcome.folder / f"{when}-0.jpg") as picture, Image.open(extra) as photo:
            assert picture.size == photo.size
    bench.close()

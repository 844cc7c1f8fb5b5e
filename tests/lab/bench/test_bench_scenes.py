"""Cells on scenes: one tally of all pixels, supports apart from the test images, pictures that a page can show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import jaccard_score

from fewshift import LCCS, FewshiftError, Support, Target
from fewshift.images.preprocess import Preprocess
from fewshift.images.scenes import Scenes, scene_folder
from fewshift.lab.bench.cell import Cell
from fewshift.lab.bench.condition import Condition
from fewshift.lab.bench.grid import Grid
from fewshift.lab.bench.materials import Materials
from fewshift.lab.bench.record import Records
from fewshift.lab.bench.run import run
from fewshift.lab.bench.runs import report_run
from fewshift.lab.bench.scenes import SceneSplit, extremes
from fewshift.lab.bench.sweep import sweep
from tests.helpers.networks import STREET_CLASSES as CLASSES
from tests.helpers.networks import street

STEPS = Preprocess(None, None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
NAMES = ("road", "car", "tree", "sky")


def folder(root: Path, count: int = 8, seed: int = 0) -> Scenes:
    random = np.random.default_rng(seed)
    for part in ("images", "labels"):
        (root / part).mkdir(parents=True)
    for index in range(count):
        pixels = random.integers(0, 256, (16, 24, 3), dtype=np.uint8)
        labels = (pixels[..., 0] > 127).astype(np.uint8) + 2 * (pixels[..., 1] > 127).astype(np.uint8)
        labels[:2] = 255
        Image.fromarray(pixels).save(root / "images" / f"{index}.png")
        Image.fromarray(labels).save(root / "labels" / f"{index}.png")
    return scene_folder(root, STEPS, NAMES)


def materials(split: SceneSplit) -> Materials:
    def no_domain(_: Cell):
        raise AssertionError

    return Materials(lambda _: street(), no_domain, lambda _: split)


def shop_of(root: Path) -> Materials:
    scenes = scene_folder(root, STEPS, NAMES)
    return materials(SceneSplit(scenes, scenes))


def cell(method: str, shots: int | None = None, **more) -> Cell:
    return Cell("camvid", "day", "dusk", method, {}, shots, largest_support=3, **more)


def by_hand(model: torch.nn.Module, scenes: Scenes, indices: list[int]) -> float:
    truth, answers = [], []
    for index in indices:
        image, labels = scenes[index]
        with torch.no_grad():
            answer = model(image[None])["out"][0].argmax(0)
        truth.append(labels[labels != 255])
        answers.append(answer[labels != 255])
    return float(jaccard_score(torch.cat(truth), torch.cat(answers), average="macro", labels=range(CLASSES)))


def test_a_result_is_what_doing_it_by_hand_gives(tmp_path):
    scenes = folder(tmp_path)
    result = run(cell("lccs", 3, seed=2), materials(SceneSplit(scenes, scenes)))
    drawn = result["support"]
    rest = [index for index in range(8) if index not in drawn]
    assert sorted(map(int, result["image_iou"])) == rest
    images, labels = zip(*(scenes[index] for index in drawn), strict=True)
    model = LCCS().adapt(street(), Target(Support(images, labels)), seed=2)
    assert result["mean_iou"] == pytest.approx(by_hand(model, scenes, rest), abs=1e-3)
    assert np.array(result["tally"]).sum() == len(rest) * 14 * 24


def test_all_rows_share_one_test_set_and_draws_are_nested(tmp_path):
    scenes = folder(tmp_path)
    shop = materials(SceneSplit(scenes, scenes))
    rows = [run(cell(*arguments), shop) for arguments in (("source",), ("adabn", 1), ("lccs", 2), ("l2", 3))]
    assert len({tuple(row["image_iou"]) for row in rows}) == 1
    one, two, three = (row["support"] for row in rows[1:])
    assert one == two[:1]
    assert two == three[:2]
    assert not set(three) & set(map(int, rows[0]["image_iou"]))


def test_a_support_from_elsewhere_leaves_all_test_images(tmp_path):
    test, pool = folder(tmp_path / "val", 4), folder(tmp_path / "train", 6, seed=1)
    result = run(cell("adabn", 3), materials(SceneSplit(test, pool)))
    assert list(result["image_iou"]) == ["0", "1", "2", "3"]
    assert len(result["support"]) == 3


@pytest.mark.parametrize("method", ["testtime-bn", "tent"])
def test_streaming_methods_see_batches_of_scenes(tmp_path, method):
    scenes = folder(tmp_path)
    shop = materials(SceneSplit(scenes, scenes))
    alone, together = (run(cell(method, condition=Condition(batch_size=size)), shop) for size in (1, 5))
    assert alone["tally"] != together["tally"]
    assert np.array(alone["tally"]).sum() == np.array(together["tally"]).sum()


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (cell("testtime-bn", condition=Condition(order="sequential")), "only batch_size"),
        (cell("adabn"), "adabn.*with a support"),
        (replace(cell("lccs", 9), largest_support=9), "9 support images asked of 8"),
    ],
)
def test_what_cannot_be_run_on_scenes_is_said(tmp_path, chosen, sentence):
    scenes = folder(tmp_path)
    with pytest.raises(FewshiftError, match=sentence):
        run(chosen, materials(SceneSplit(scenes, scenes)))


def test_the_scenes_that_gained_and_lost_most_are_those_of_the_scores(tmp_path):
    scenes = folder(tmp_path)
    shop = materials(SceneSplit(scenes, scenes))
    before, after = run(cell("source"), shop), run(cell("lccs", 3), shop)
    gained, lost = extremes(before, after)
    change = {name: after["image_iou"][name] - before["image_iou"][name] for name in before["image_iou"]}
    order = sorted(change, key=lambda name: -change[name])
    assert [scene.name for scene in gained] == [f"{name}.png" for name in order if change[name] > 0][:3]
    assert [scene.name for scene in lost] == [f"{name}.png" for name in reversed(order) if change[name] < 0][:3]
    for scene in gained + lost:
        index = int(scene.name.removesuffix(".png"))
        assert torch.equal(scene.labels.long(), scenes[index][1])  # 24 pixels wide: nothing was reduced


GRID = """
title = "Scenes"
dataset = "camvid"
source = "day"
targets = ["dusk"]
seeds = [0, 1]
largest_support = 3
rows = [{method = "source"}, {method = "lccs", shots = [3], settings = {epochs = 1, grid = 3}}]
"""


def test_a_run_on_scenes_becomes_a_table_of_iou_and_a_page_of_pictures(tmp_path):
    file = tmp_path / "scenes.toml"
    file.write_text(GRID)
    folder(tmp_path / "data")
    out = tmp_path / "run"
    sweep(Grid.load(file).cells(), out, shop_of, (tmp_path / "data",), workers=1, tell=lambda *_: None)
    (out / "grids").mkdir(exist_ok=True)
    (out / "grids" / "scenes.toml").write_text(GRID)
    json.dumps([record["result"] for record in Records(out).read().values()])
    page = report_run(out).page.read_text()
    assert "mean IoU" in page
    assert "the images that" in page
    assert page.count("<img") >= 4
    assert "IoU in %" in page


def test_metrics_of_pixels_are_for_pixels(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace("seeds", 'metric = "macro_f1"\nseeds'))
    with pytest.raises(FewshiftError, match=r"metric = 'macro_f1', which camvid has no labels for"):
        Grid.load(file)
    text = GRID.replace("camvid", "digits").replace("dusk", "uci").replace("seeds", 'metric = "mean_iou"\nseeds')
    file.write_text(text)
    with pytest.raises(FewshiftError, match="metric = 'mean_iou', which digits has no labels for"):
        Grid.load(file)

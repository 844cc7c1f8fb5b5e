"""A table of classes at volume: rows come as they are predicted, and nothing that was written is lost."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import fewshift
from fewshift.deploy import class_table
from tests.helpers.networks import make_support, make_tiny
from tests.helpers.pictures import picture, save

STEPS = fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
NAMES = ("ant", "bee", "cat")
ROOTS = (Path(fewshift.__file__).parents[1], Path(__file__).parents[2])  # of the package and of its tests


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for index in range(7):
        save(tmp_path / "photos" / f"{index}.png", picture(8, 8, seed=index))
    return tmp_path / "photos"


def predict(images: Any, out: Path | None = None, **options: Any) -> fewshift.ImagePredictions:
    options = {"preprocess": STEPS, "classes": NAMES, "batch_size": 2, **options}
    result = fewshift.predict(options.pop("model", make_tiny()), images, out=out, **options)
    assert isinstance(result, fewshift.ImagePredictions)
    return result


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def probabilities(model: torch.nn.Module, file: Path) -> list[float]:
    with torch.no_grad():
        return model(STEPS(Image.open(file))[None]).softmax(1)[0].tolist()


# --- columns


def test_all_probabilities_and_the_top_classes_are_those_of_a_loop(photos: Path, tmp_path: Path) -> None:
    result = predict(photos, tmp_path / "t.csv", top=2, all_probabilities=True)
    for row, line in zip(result.rows, table(tmp_path / "t.csv"), strict=True):
        expected = probabilities(make_tiny(), row.file)
        assert list(row.probabilities) == pytest.approx(expected, abs=1e-6)
        ranked = sorted(zip(expected, NAMES, strict=True), reverse=True)
        assert (line["class"], line["class_2"]) == (ranked[0][1], ranked[1][1])
        assert float(line["probability_2"]) == pytest.approx(ranked[1][0], abs=2e-6)
        assert [float(line[f"p_{name}"]) for name in NAMES] == pytest.approx(expected, abs=2e-6)
    assert [entry["probabilities"].keys() for entry in result.to_json()] == [set(NAMES)] * 7


def test_the_source_network_speaks_beside_the_adapted_one(photos: Path, tmp_path: Path) -> None:
    adapted = fewshift.adapt(make_tiny(), make_support(), method="adabn", validate=None)
    predict(photos, tmp_path / "t.csv", delta=adapted.delta, with_source=True)
    plain, changed = predict(photos), predict(photos, model=adapted.model)
    lines = table(tmp_path / "t.csv")
    assert [line["class"] for line in lines] == [row.name for row in changed.rows]
    assert [line["source_class"] for line in lines] == [row.name for row in plain.rows]
    assert [float(line["source_probability"]) for line in lines] == pytest.approx(
        [row.probability for row in plain.rows], abs=1e-6
    )


# --- damaged images


def test_damaged_and_missing_images_are_listed_and_the_others_are_done(photos: Path, tmp_path: Path) -> None:
    whole = predict(photos)
    (photos / "3.png").write_bytes((photos / "3.png").read_bytes()[:50])
    files = [*sorted(photos.iterdir()), photos / "gone.png"]
    (tmp_path / "list.txt").write_text("\n".join(map(str, files)))
    result = predict(f"@{tmp_path / 'list.txt'}")
    assert [image.file.name for image in result.broken] == ["3.png", "gone.png"]
    assert result.rows == tuple(row for row in whole.rows if row.file.name != "3.png")
    assert result.asked == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_strict_stops_at_the_first_and_keeps_the_rows_before_it(photos: Path, tmp_path: Path, workers: int) -> None:
    (photos / "3.png").write_bytes(b"no image")
    with pytest.raises(fewshift.FewshiftError, match=r"3\.png is not an image"):
        predict(photos, tmp_path / "t.csv", strict=True, workers=workers)
    assert [Path(line["file"]).name for line in table(tmp_path / "t.csv")] == ["0.png", "1.png", "2.png"]


def test_processes_that_read_change_neither_rows_nor_the_random_state(photos: Path) -> None:
    (photos / "5.png").write_bytes(b"no image")
    state = torch.random.get_rng_state()
    assert predict(photos, workers=2) == predict(photos)
    assert torch.equal(torch.random.get_rng_state(), state)


# --- going on

SLOW = """
import sys, time
from pathlib import Path
import fewshift
from tests.deploy.test_class_table import NAMES, STEPS
from tests.helpers.networks import make_tiny
model = make_tiny()
model.register_forward_pre_hook(lambda *_: time.sleep(0.3))
fewshift.predict(model, sys.argv[1], out=sys.argv[2], preprocess=STEPS, classes=NAMES, batch_size=1)
"""


def test_a_killed_run_keeps_its_rows_and_goes_on(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, ROOTS))}
    run = subprocess.Popen([sys.executable, "-c", SLOW, photos, out], env=environment)
    until = time.monotonic() + 60
    while time.monotonic() < until and (not out.exists() or len(out.read_text().splitlines()) < 4):
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    kept = table(out)
    assert 3 <= len(kept) < 7
    with pytest.raises(fewshift.FewshiftError, match=r"t\.csv has the rows of a run that was stopped: pass --resume"):
        predict(photos, out)
    result = predict(photos, out, resume=True)
    assert (result.earlier, len(result.rows)) == (len(kept), 7 - len(kept))
    predict(photos, tmp_path / "whole.csv")
    assert out.read_text() == (tmp_path / "whole.csv").read_text()


def test_a_line_that_was_cut_off_is_written_again(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    predict(photos, out)
    whole = out.read_text()
    out.write_text(whole[:-9])
    assert len(predict(photos, out, resume=True).rows) == 1
    assert out.read_text() == whole
    out.write_text(whole[:7])  # not even the header is there
    assert len(predict(photos, out, resume=True).rows) == 7
    assert out.read_text() == whole


def test_new_images_and_mended_ones_join_a_finished_table(photos: Path, tmp_path: Path) -> None:
    out, good = tmp_path / "t.csv", (photos / "2.png").read_bytes()
    (photos / "2.png").write_bytes(b"no image")
    assert len(predict(photos, out, resume=True).rows) == 6  # a first run may say so too
    (photos / "2.png").write_bytes(good)
    save(photos / "7.png", picture(8, 8, seed=7))
    result = predict(photos, out, resume=True)
    assert [row.file.name for row in result.rows] == ["2.png", "7.png"]
    assert len(table(out)) == 8


@pytest.mark.parametrize("rows", [0, 1, 4, 6])
def test_a_file_that_is_named_several_times_has_a_row_for_each_after_a_kill_too(
    photos: Path, tmp_path: Path, rows: int
):
    files, out = [photos / "0.png", photos / "1.png"] * 3, tmp_path / "t.csv"
    predict(files, out)
    whole = out.read_text()
    out.write_text("".join(whole.splitlines(keepends=True)[: 1 + rows]))
    result = predict(files, out, resume=True)
    assert (len(result.rows), result.earlier) == (6 - rows, rows)
    assert out.read_text() == whole


def test_only_a_table_of_the_same_run_is_resumed(photos: Path, tmp_path: Path) -> None:
    out, foreign = tmp_path / "t.csv", tmp_path / "foreign.csv"
    predict(photos, out)
    foreign.write_text(out.read_text())
    before = out.read_text()
    other = make_tiny()
    with torch.no_grad():
        next(other.parameters())[0] += 1
    for change in ({"model": other}, {"classes": ("a", "b", "c")}, {"top": 2}):
        with pytest.raises(fewshift.FewshiftError, match=r"t\.csv is by another network, or by other classes"):
            predict(photos, out, resume=True, **change)
    with pytest.raises(fewshift.FewshiftError, match=r"has no foreign\.csv\.run\.json"):
        predict(photos, foreign, resume=True)
    assert out.read_text() == before
    predict(photos, out, model=other, overwrite=True)
    assert predict(photos, out, model=other, resume=True).earlier == 7


def test_an_interrupted_run_keeps_its_rows(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    real, calls = class_table.class_probabilities, []

    def stopping(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(class_table, "class_probabilities", stopping)
    with pytest.raises(KeyboardInterrupt):
        predict(photos, tmp_path / "t.csv")
    assert len(table(tmp_path / "t.csv")) == 4


def test_json_is_whole_or_not_there(photos: Path, tmp_path: Path) -> None:
    result = predict(photos, tmp_path / "t.json", as_json=True)
    assert json.loads((tmp_path / "t.json").read_text()) == result.to_json()
    (photos / "6.png").write_bytes(b"no image")
    with pytest.raises(fewshift.FewshiftError):
        predict(photos, tmp_path / "u.json", as_json=True, strict=True)
    assert not (tmp_path / "u.json").exists()


@pytest.mark.parametrize("content", [b"file,class\n\xed\xa0\x80,x\n", b'file,class\n"' + b"x" * 200_000 + b'"\n'])
def test_a_file_that_is_no_table_is_one_sentence_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.csv").write_bytes(content + b"torn")
    with pytest.raises(fewshift.FewshiftError, match=r"out\.csv is no table: pass --overwrite"):
        class_table._whole_rows(tmp_path / "out.csv", class_table.Columns(("ant", "bee")))
    assert (tmp_path / "out.csv").read_bytes() == content + b"torn"

"""Parquet parts: the rows of the table, whole files, and a stopped run goes on where it was."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import fewshift
from fewshift import FewshiftError, PartPredictions
from fewshift.deploy import class_table
from fewshift.deploy.listing import listed
from fewshift.images.folders import image_files
from fewshift.jobs.ledger import alone_in
from tests.helpers.disk import room_for
from tests.helpers.networks import make_tiny
from tests.helpers.pictures import picture, save

STEPS = fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
NAMES = ("ant", "bee", "cat")
COUNT = 11


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for index in range(COUNT):
        save(tmp_path / "photos" / f"{index:02}.png", picture(8, 8, seed=index))
    return tmp_path / "photos"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "predictions"


def predict(images: Any, out: Path, **options: Any) -> PartPredictions:
    options = {"preprocess": STEPS, "classes": NAMES, "batch_size": 2, "part_size": 4, **options}
    result = fewshift.predict(options.pop("model", make_tiny()), images, out=out, **options)
    assert isinstance(result, PartPredictions)
    return result


def rows(out: Path) -> list[dict[str, Any]]:
    return parquet.read_table(out).to_pylist()


@pytest.mark.parametrize("options", [{}, {"top": 2, "all_probabilities": True}, {"workers": 1}])
def test_parts_have_the_columns_and_rows_of_the_table(photos: Path, out: Path, tmp_path: Path, options) -> None:
    same = {"preprocess": STEPS, "classes": NAMES, "batch_size": 2}  # rounding depends on what is computed together
    fewshift.predict(make_tiny(), photos, out=tmp_path / "t.csv", **same, **options)
    with (tmp_path / "t.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    result = predict(photos, out, **options)
    assert [{name: str(cell) for name, cell in row.items()} for row in rows(out)] == table
    assert (result.parts, result.predicted, result.earlier, result.asked) == (3, COUNT, 0, COUNT)
    assert [parquet.read_metadata(file).num_rows for file in sorted(out.glob("*.parquet"))] == [4, 4, 3]


def test_a_run_that_was_stopped_goes_on_with_the_parts_that_are_missing(photos, out, tmp_path, monkeypatch) -> None:
    whole = predict(photos, tmp_path / "whole")
    real, calls = class_table.class_probabilities, []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(class_table, "class_probabilities", counted)
    with pytest.raises(KeyboardInterrupt):
        predict(photos, out)
    assert [file.name for file in out.glob("*.parquet")] == ["part-00000.parquet"]
    with pytest.raises(FewshiftError, match=r"has predictions already: pass --resume .*--overwrite"):
        predict(photos, out)
    result = predict(photos, out, resume=True)
    assert (result.predicted, result.earlier) == (7, 4)
    assert len(calls) == 4 + 4  # two batches of each of the two parts that were missing
    assert rows(out) == rows(tmp_path / "whole")
    assert whole.predicted == COUNT


def test_images_that_cannot_be_read_are_recorded_and_their_part_is_written_again_once_they_are_mended(
    photos: Path, out: Path
) -> None:
    for name in ("05.png", "06.png"):
        (photos / name).write_bytes(b"no image")
    result = predict(photos, out)
    assert (result.predicted, result.unreadable) == (9, 2)
    assert [image.file.name for image in result.broken] == ["05.png", "06.png"]
    assert not {"05.png", "06.png"} & {Path(row["file"]).name for row in rows(out)}
    with (out / "_broken/part-00001.csv").open(newline="") as file:
        assert [Path(row["file"]).name for row in csv.DictReader(file)] == ["05.png", "06.png"]
    again = predict(photos, out, resume=True)
    assert (again.predicted, again.earlier, again.unreadable) == (0, 9, 2)
    save(photos / "05.png", picture(8, 8, seed=5))
    mended = predict(photos, out, resume=True)
    assert (mended.predicted, mended.earlier, mended.unreadable) == (3, 7, 1)
    save(photos / "06.png", picture(8, 8, seed=6))
    assert predict(photos, out, resume=True).unreadable == 0
    assert not (out / "_broken/part-00001.csv").exists()
    assert len(rows(out)) == COUNT


def test_an_image_that_cannot_be_read_ends_a_strict_run(photos: Path, out: Path) -> None:
    (photos / "05.png").write_bytes(b"no image")
    with pytest.raises(FewshiftError, match=r"05\.png is not an image"):
        predict(photos, out, strict=True)
    assert len(rows(out)) == 4


@pytest.mark.parametrize("change", [{"model": make_tiny(seed=2)}, {"top": 2}, {"part_size": 5}])
def test_a_folder_by_another_run_is_refused_and_replaced_only_if_asked(photos: Path, out: Path, change) -> None:
    predict(photos, out)
    with pytest.raises(FewshiftError, match=r"is by another network, or by other .*--overwrite"):
        predict(photos, out, resume=True, **change)
    assert predict(photos, out, overwrite=True, **change).predicted == COUNT


def test_parts_of_a_longer_list_are_removed(photos: Path, out: Path) -> None:
    predict(photos, out)
    for index in range(3, COUNT):
        (photos / f"{index:02}.png").unlink()
    result = predict(photos, out, resume=True)
    assert (result.parts, len(rows(out))) == (1, 3)


def test_two_writers_in_one_folder_are_one_too_many(photos: Path, out: Path) -> None:
    with alone_in(out), pytest.raises(FewshiftError, match=r"another process is writing into .*predictions"):
        predict(photos, out)


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(photos: Path, out: Path) -> None:
    with room_for(600), pytest.raises(FewshiftError, match=r"cannot write .*part-00000.*free some space.*--resume"):
        predict(photos, out)
    assert not list(out.glob("*.parquet"))
    assert not list(out.glob(".*part-00000*"))
    assert predict(photos, out, resume=True).predicted == COUNT


def test_a_part_that_was_damaged_is_written_again(photos: Path, out: Path) -> None:
    predict(photos, out)
    part = out / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    assert predict(photos, out, resume=True).predicted == 4


def test_a_file_is_no_folder_of_parts_and_ray_needs_one(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match="pass --out FOLDER"):
        fewshift.predict(make_tiny(), photos, preprocess=STEPS, engine="ray")
    (tmp_path / "t.csv").touch()
    with pytest.raises(FewshiftError, match="is not a folder"):
        fewshift.predict(make_tiny(), photos, preprocess=STEPS, engine="ray", out=tmp_path / "t.csv")


def test_a_folder_is_walked_in_the_order_of_its_sorted_paths(tmp_path: Path) -> None:
    for name in ("b/1.png", "b.png", "b-1/2.png", "a/z/3.png", "a/z.png", ".hidden/4.png", "c/.5.png", "B/6.JPG"):
        save(tmp_path / name)
    (tmp_path / "a/gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    assert listed(tmp_path).files == image_files(tmp_path)
    assert listed(tmp_path).files[1:3] == image_files(tmp_path)[1:3]

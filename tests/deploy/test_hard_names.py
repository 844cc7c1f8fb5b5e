"""Names of images that are hard to write: as formulas, as bytes that are no text, too long, or alike."""

from __future__ import annotations

import csv
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fewshift
from fewshift import FewshiftError
from tests.helpers.labeller import CLASSES, forward, labeller, read
from tests.helpers.networks import make_tiny
from tests.helpers.pictures import picture, save

STEPS = fewshift.Preprocess(None, 8, (0.5,) * 3, (0.25,) * 3)
PIXELS = fewshift.Preprocess(None, None, (0.5,) * 3, (0.25,) * 3)
NAMES = ("ant", "bee", "cat")
LATIN = os.fsdecode(b"caf\xe9.png")
FORMULAS = ["+1.png", "-2.png", "=1+1.png", "@sum.png"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path / "photos")
    return tmp_path


def predict(images: Any, out: Any = None, **options: Any) -> Any:
    return fewshift.predict(make_tiny(), images, preprocess=STEPS, classes=NAMES, out=out, batch_size=2, **options)


def label(images: Any, out: Path, **options: Any) -> Any:
    return fewshift.predict(labeller(), images, preprocess=PIXELS, classes=CLASSES, out=out, **options)


def cells(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [row["file"] for row in csv.DictReader(file)]


# --- carriage returns


def test_a_carriage_return_in_a_name_ends_no_row(here: Path) -> None:
    names = ["a\rb.png", "c.png", "d\r\n,e.png", "\r.png"]
    for index, name in enumerate(names):
        save(Path(name), picture(8, 8, seed=index))
    result = predict(".", here / "out.csv")
    assert {Path(cell) for cell in cells(here / "out.csv")} == set(map(Path, names))
    with (here / "out.csv").open(newline="") as file:
        assert result.to_csv() == file.read()
    again = predict(".", here / "out.csv", resume=True)
    assert (len(again.rows), again.earlier) == (0, 4)


# --- formulas


def test_no_name_is_a_formula_and_every_name_is_a_path(here: Path) -> None:
    for index, name in enumerate(FORMULAS):
        save(Path(name), picture(8, 8, seed=index))
    save(Path("plain.png"), picture(8, 8, seed=9))
    result = predict(".", here / "out.csv")
    written = cells(here / "out.csv")
    assert not [cell for cell in written if cell[0] in "=+-@\t\r"]
    assert [Path(cell) for cell in written] == [Path(name) for name in [*FORMULAS, "plain.png"]]
    assert all(Path(cell).is_file() for cell in written)
    assert result.to_csv() == (here / "out.csv").read_text()
    assert [row["file"] for row in result.to_json()] == [*FORMULAS, "plain.png"]
    assert predict(".", here / "out.csv", resume=True).earlier == 5
    assert len(cells(here / "out.csv")) == 5


def test_an_image_that_cannot_be_read_is_no_formula_either(here: Path) -> None:
    Path("=1+1.png").write_bytes(b"no image")
    save(Path("plain.png"), picture(8, 8))
    predict(".", here / "rows", part_size=4)
    with (here / "rows/_broken/part-00000.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["file"], row["error"].startswith("./=1+1.png is not an image")) == ("./=1+1.png", True)
    again = predict(".", here / "rows", part_size=4, resume=True)
    assert (again.broken[0].file, again.broken[0].error[:4]) == (Path("=1+1.png"), "=1+1")


# --- bytes that are no text


@pytest.mark.parametrize("out", ["out.csv", "out.json", "rows", None])
def test_an_image_whose_name_is_no_text_is_left_out_and_named(here: Path, out: str | None) -> None:
    for name in ("a.png", LATIN, "z.png"):
        save(Path(name), picture(8, 8))
    result = predict(".", here / out if out else None, as_json=out == "out.json")
    assert [row.error for row in result.broken] == [
        "caf\\xe9.png: the name is not UTF-8 text, as a table needs it: rename the file"
    ]
    assert result.asked == 3
    if out == "out.csv":
        assert cells(here / out) == ["a.png", "z.png"]
        Path(LATIN).rename("café.png")
        predict(".", here / out, resume=True)
        assert cells(here / out) == ["a.png", "z.png", "café.png"]
    if out == "rows":
        assert predict(".", here / out, resume=True).broken[0].error == result.broken[0].error


def test_with_strict_such_a_name_is_one_sentence(here: Path) -> None:
    save(Path(LATIN), picture(8, 8))
    with pytest.raises(FewshiftError, match=r"caf\\xe9\.png: the name is not UTF-8 text"):
        predict(".", here / "out.csv", strict=True)


def test_label_maps_have_names_of_any_bytes(here: Path) -> None:
    save(Path(LATIN), picture(8, 8))
    result = label(".", here / "out")
    assert os.listdir(os.fsencode(here / "out/labels")) == [b"caf\xe9.png"]  # noqa: PTH208 - bytes
    assert (len(result.images), result.broken) == (1, ())


def test_a_class_whose_name_is_no_text_is_refused_before_the_work(here: Path) -> None:
    save(Path("a.png"), picture(8, 8))
    with pytest.raises(FewshiftError, match=r"the class name caf\\xe9 is not UTF-8 text"):
        fewshift.predict(make_tiny(), ".", preprocess=STEPS, classes=("caf\udce9", "b", "c"), out=here / "out.csv")
    assert not (here / "out.csv").exists()


# --- line breaks


def test_a_kill_in_the_middle_of_a_name_with_line_breaks_loses_no_row(here: Path) -> None:
    for index in range(5):
        save(Path(f"{index}\nof\nfive.png"), picture(8, 8, seed=index))
    predict(".", here / "whole.csv")
    content = (here / "whole.csv").read_bytes()
    record = (here / "whole.csv.run.json").read_bytes()
    for size in range(len(content) // 2, len(content), 7):
        (here / "cut.csv").write_bytes(content[:size])
        (here / "cut.csv.run.json").write_bytes(record)
        predict(".", here / "cut.csv", resume=True)
        assert cells(here / "cut.csv") == cells(here / "whole.csv")


# --- names that are alike


@pytest.mark.parametrize("order", list(itertools.permutations(["a.jpg", "a.png", "a.jpg.png"])))
def test_images_whose_names_are_alike_get_files_of_their_own(here: Path, order: tuple[str, ...]) -> None:
    for index, name in enumerate(("a.jpg", "a.png", "a.jpg.png")):
        save(Path(name), picture(6 + index, 6, seed=index))
    result = label([Path(name) for name in order], here / "out")
    assert len({row.labels for row in result.images} | {row.overlay for row in result.images}) == 6
    for row in result.images:
        assert np.array_equal(read(row.labels), forward(labeller(), row.file))
    assert len(label([Path(name) for name in order], here / "out", resume=True).images) == 3


def test_an_image_that_is_given_twice_has_one_label_map(here: Path) -> None:
    save(Path("a.jpg"), picture(6, 6))
    assert {row.labels for row in label(["a.jpg", "a.jpg"], here / "out").images} == {here / "out/labels/a.png"}


def test_a_target_that_would_be_a_file_and_a_folder_is_refused_before_the_work(here: Path) -> None:
    save(Path("x.jpg"), picture(6, 6))
    save(Path("x.png/y.jpg"), picture(6, 6))
    with pytest.raises(FewshiftError, match=r"labels/x\.png would be a file and a folder: rename"):
        label(".", here / "out")
    assert not (here / "out").exists()


def test_an_image_above_the_folder_gets_its_files_below_the_output(here: Path, monkeypatch) -> None:
    save(here / "photos/camera/day/a.png", picture(6, 6))
    save(here / "photos/old/b.png", picture(6, 6, seed=1))
    photo = Path("old/b.png").read_bytes()
    monkeypatch.chdir("camera/day")
    result = label(["a.png", "../../old/b.png"], here / "out")
    assert (here / "photos/old/b.png").read_bytes() == photo
    expected = {here / "out/labels/camera/day/a.png", here / "out/labels/old/b.png"}
    assert {row.labels for row in result.images} == expected == set((here / "out/labels").rglob("*.png"))
    for row in result.images:
        assert np.array_equal(read(row.labels), forward(labeller(), row.file))


def test_images_of_one_spelling_behind_a_link_are_refused(here: Path) -> None:
    save(Path("deep/down/x.png"), picture(6, 6))
    save(Path("deep/a.png"), picture(6, 6))
    save(Path("a.png"), picture(6, 6, seed=1))
    Path("link").symlink_to("deep/down")
    with pytest.raises(FewshiftError, match=r"link/\.\./a\.png leads through a link to another image"):
        label(["a.png", "link/../a.png"], here / "out")


def test_an_image_is_not_written_over(here: Path) -> None:
    save(here / "out/labels/a.png", picture(6, 6))
    photo = (here / "out/labels/a.png").read_bytes()
    with pytest.raises(FewshiftError, match="would be written over, and is an image that is read"):
        label(here / "out/labels", here / "out", overwrite=True)
    assert (here / "out/labels/a.png").read_bytes() == photo


@pytest.mark.parametrize(
    "options", [{"out": "out"}, {"out": "out.csv", "all_probabilities": True}, {}, {"out": "out", "pixels": True}]
)
def test_a_class_name_that_occurs_twice_is_refused_before_the_work(here: Path, options: dict[str, Any]) -> None:
    save(Path("a.png"), picture(8, 8))
    pixels = options.pop("pixels", False)
    network, steps = (labeller(), PIXELS) if pixels else (make_tiny(), STEPS)
    with pytest.raises(FewshiftError, match="the class name b occurs twice: name every class once"):
        fewshift.predict(network, ".", preprocess=steps, classes=("b", "b", "c"), **options)
    assert [path.name for path in Path().iterdir()] == ["a.png"]


# --- long names


def test_a_name_that_no_file_can_have_stops_no_other_of_a_list(here: Path) -> None:
    save(Path("a.png"), picture(8, 8))
    Path("list.txt").write_bytes(b"\xef\xbb\xbfa.png\n" + b"x" * 300 + b"\n")  # as some editors begin a file
    result = predict("@list.txt", here / "out.csv")
    assert [row.file for row in result.rows] == [Path("a.png")]
    assert len(result.broken) == 1


def test_a_target_with_too_long_a_name_is_refused_before_the_work(here: Path) -> None:
    long = "x" * 251
    save(Path(f"{long}.png"), picture(6, 6))
    assert len(label(".", here / "fits").images) == 1
    save(Path(f"{long}.jpg"), picture(6, 6))
    with pytest.raises(FewshiftError, match=r"the name x{40}\.\.\. has 259 bytes"):
        label(".", here / "out")
    assert not (here / "out").exists()


def test_a_table_whose_record_would_have_too_long_a_name_is_refused_before_the_work(here: Path) -> None:
    save(Path("a.png"), picture(8, 8))
    fits, long = here / ("x" * 242 + ".csv"), here / ("x" * 243 + ".csv")
    assert len(predict(".", fits).rows) == 1
    with pytest.raises(FewshiftError, match="has 256 bytes"):
        predict(".", long)
    assert not long.exists()
